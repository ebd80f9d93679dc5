"""Distributed training that goes on where it was: `torchrun ... -m ckptd_trainer --url URL --run-name NAME`.

Read it from top to bottom. The lines marked `ckptd 1` to `ckptd 5` are all that a loop of your own needs.
To let torchrun restart the ranks (--max-restarts), set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its
environment and use --standalone or --rdzv-backend=c10d; otherwise restarted gloo ranks look for the dead
ones.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from ckptd.errors import (
    CkptdError,
    Conflict,
    Corrupt,
    Fenced,
    InUse,
    Invalid,
    NotFound,
    Unauthorized,
    Unavailable,
    Unfit,
)
from ckptd_client import CheckpointClient
from ckptd_client.data import ResumableSampler, RngState, seed_rank
from ckptd_trainer.bar import Bar
from ckptd_trainer.config import STRICT, TrainConfig, parse_config
from ckptd_trainer.data import Split, load_split
from ckptd_trainer.evaluate import Validation, validate
from ckptd_trainer.learner import Learner
from ckptd_trainer.metrics import Reporter
from ckptd_trainer.model import weights_digest
from ckptd_trainer.place import Place, agree, find_place, from_first_rank, process_group, warn_about_restarts
from ckptd_trainer.vocab import shared_vocabulary

EXIT_CODES: tuple[tuple[type[CkptdError], int], ...] = (
    (Unfit, 8),  # before Invalid, of which it is one
    (Invalid, 2),
    (NotFound, 3),
    (Unavailable, 4),
    (InUse, 9),  # before Conflict
    (Conflict, 5),
    (Fenced, 5),
    (Corrupt, 6),
    (Unauthorized, 7),
)


def main(argv: Sequence[str] | None = None) -> int:
    """One process of a training job, on every rank alike. Returns the exit code."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
    except Invalid as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks have the same command line
            print(error, file=sys.stderr, flush=True)
        return exit_code(error)
    try:
        place = find_place(config.device)
        warn_about_restarts(place)
        split = load_split(config)
        # ckptd 1: on every rank, before the process group forms
        with CheckpointClient(
            config.url,
            run=config.run_name,
            contract=config.contract(),
            strict=STRICT,
            spool=config.spool,
            spool_saves=config.spool_saves,
            start_deadline_seconds=config.start_deadline_seconds,
        ) as client:
            train(config, place, split, client)
    except CkptdError as error:
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    return 0


def train(config: TrainConfig, place: Place, split: Split, client: CheckpointClient) -> None:
    """The whole training on one rank; returns when the last checkpoint is durable."""
    with process_group(place, config.collective_timeout_seconds) as store:
        # Every rank asks before DDP broadcasts initial weights, and all get the same answer, which is
        # pinned. It is loaded further down, after the warm-up, because the warm-up needs the wrapped model.
        found = client.latest()  # ckptd 2
        store = PrefixStore(f"generation-{client.generation}", store)  # older ones may have left words in it

        ranks = agree(store, place, "training data", split.digest)
        vocabulary = shared_vocabulary(store, place, split, config.vocab_size)
        learner = Learner(config, place, split, vocabulary)
        sampler = learner.sampler
        learner.warm_up()
        seed_rank(config.seed, 0, place.rank)  # after the warm-up, which has drawn random numbers

        state: dict[str, Any] = {
            "model": learner.model,
            "optimizer": learner.optimizer,
            "schedule": learner.schedule,
            "sampler": sampler,
            "loss": math.nan,
            "wandb_run_id": from_first_rank(store, place, "wandb run id", lambda: secrets.token_hex(4)),
        }
        rng = RngState(place.device)
        own_state: dict[str, object] = {"rng": rng}
        step = client.restore(state, per_rank=own_state)  # ckptd 3: in place, on every rank
        if found is not None and not client.per_rank_restored:
            # Another world size: no saved random state fits. The client has said so.
            seed_rank(config.seed, client.generation, place.rank)

        last_step = step + steps_left(config, sampler, step)
        report = None
        if place.is_first:
            report = Reporter(config, client.generation, step, state["wandb_run_id"])
            report.event("start", step=step, world=place.world, ranks=ranks)
        with Bar(last_step, step=step, shown=place.local_rank == 0) as bar:
            origin = "new" if found is None else f"resumed from step {step}"
            bar.say(f"run {config.run_name}, generation {client.generation}, {place.world} ranks, {origin}")
            if client.per_rank_restored and rng.moved:
                bar.say("warning: random numbers were drawn or seeded after restore; they do not go on as saved")
            while step < last_step:
                batch = sampler.next_batch()
                state["loss"], lr = learner.step(batch)
                step += 1
                if report:
                    report.step(step, batch.epoch, state["loss"], lr, sampler.samples_seen)
                bar.step(step, batch.epoch, state["loss"])
                if step % config.save_every == 0 or batch.ends_epoch or step == last_step:
                    save(client, state, own_state, step, bar)
                if report and batch.ends_epoch and is_due(batch.epoch, config.validate_every):
                    # The other ranks go on, and wait for rank 0 in their next step.
                    pairs = split.validation[: config.validate_samples]
                    scores = validate(learner.model, pairs, vocabulary, config.max_length, place.device)
                    report.validation(step, batch.epoch, scores)
                    show(scores, batch.epoch, bar)
        client.close()  # ckptd 5: queued is not durable; this returns when the last save is
        if report:
            report.result(
                run=config.run_name,
                step=step,
                loss=state["loss"],
                samples=sampler.samples_seen,
                weights_sha256=weights_digest(learner.model),
                generation=client.generation,
                world=place.world,
            )
            report.close()


def save(client: CheckpointClient, state: dict[str, Any], own: dict[str, object], step: int, bar: Bar) -> None:
    """Every rank. The values are taken now and written in the background; training goes on at once.

    A save that failed since the last call costs the run that checkpoint, not the training: it is reported, and
    this one is made in its place. Only `Fenced` and the like end the process.
    """
    metrics = {"loss": state["loss"]}
    try:
        client.save(state, step=step, metrics=metrics, per_rank=own)  # ckptd 4
    except (Unavailable, Conflict) as error:
        bar.say(f"warning: a checkpoint is missing: {error}")
        client.save(state, step=step, metrics=metrics, per_rank=own)


def show(scores: Validation, epoch: int, bar: Bar) -> None:
    """The scores and two translations, for the eye."""
    rates = f"CER {scores.cer:.3f} WER {scores.wer:.3f} BLEU {scores.bleu:.3f}"
    bar.say(f"validation after epoch {epoch}: {rates}")
    for sample in scores.samples(2):
        bar.say(f"  source:   {sample.source}\n  expected: {sample.reference}\n  output:   {sample.output}")


def steps_left(config: TrainConfig, sampler: ResumableSampler, step: int) -> int:
    """Optimizer steps until the run ends, if the world stays as it is."""
    if sampler.epoch >= config.epochs:
        return 0
    block = config.micro_batch * config.accumulate * sampler.world
    this_epoch = -(-(sampler.size - sampler.consumed) // block)
    later_epochs = (config.epochs - sampler.epoch - 1) * -(-sampler.size // block)
    left = this_epoch + later_epochs
    return max(0, min(left, config.max_steps - step)) if config.max_steps else left


def is_due(epoch: int, every: int) -> bool:
    return every > 0 and (epoch + 1) % every == 0


def exit_code(error: CkptdError) -> int:
    """What whoever restarts this process should know: docs/AWAY.md. The numbers are those of the `ckptd` command, but
    for another live job of the same name, which is waited out where a fence ends the process for good."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)
