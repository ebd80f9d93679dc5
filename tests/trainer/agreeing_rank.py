"""One rank of the tests that need several: started by torchrun, leaves what it saw in a file of its own.

Arguments: a folder, and the name of what to do.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ckptd.errors import Invalid
from ckptd_trainer.config import TrainConfig
from ckptd_trainer.data import load_split
from ckptd_trainer.learner import Learner
from ckptd_trainer.model import weights_digest
from ckptd_trainer.place import agree, find_place, process_group
from ckptd_trainer.vocab import shared_vocabulary

CONFIG = TrainConfig(
    url="file:///unused",
    run_name="agree",
    limit=61,
    validation_fraction=0.2,
    accumulate=2,
    d_model=16,
    heads=2,
    layers=1,
    d_feed_forward=16,
    dropout=0.0,
    device="cpu",
)


def agreement(differ: bool) -> dict[str, object]:
    place = find_place("cpu")
    split = load_split(replace(CONFIG, seed=place.rank if differ else 0))
    with process_group(place, 60) as store:
        try:
            ranks = agree(store, place, "training data", split.digest)
        except Invalid as error:
            return {"refused": error.message}
        vocabulary = shared_vocabulary(store, place, split, CONFIG.vocab_size)
        return {"ranks": ranks, "split": split.digest, "vocabulary": vocabulary.digest}


def one_epoch() -> dict[str, object]:
    """Train an epoch, its short last batch included; returns losses and weights."""
    torch.set_num_threads(1)
    place = find_place("cpu")
    split = load_split(CONFIG)
    config = replace(CONFIG, micro_batch=6 // place.world)
    with process_group(place, 60) as store:
        learner = Learner(config, place, split, shared_vocabulary(store, place, split, CONFIG.vocab_size))
        learner.warm_up()
        batches = list(learner.sampler)
        losses = [learner.step(batch)[0] for batch in batches]
        return {
            "losses": losses,
            "sizes": [len(batch.samples) for batch in batches],
            "digest": weights_digest(learner.model),
            "weights": [p.double().sum().item() for p in learner.model.parameters()],
        }


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    found = one_epoch() if what == "epoch" else agreement(differ=what == "differ")
    (folder / f"rank-{find_place('cpu').rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
