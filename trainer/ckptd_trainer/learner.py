"""Model, optimizer, schedule and samples of one rank, and how one optimizer step is done exactly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ckptd_client.data import GlobalBatch, ResumableSampler
from ckptd_trainer.config import TrainConfig
from ckptd_trainer.corpus import Corpus
from ckptd_trainer.data import Split
from ckptd_trainer.model import Transformer
from ckptd_trainer.place import Place
from ckptd_trainer.vocab import PAD, Vocabulary


class Learner:
    """Built on every rank after the process group formed; rank 0's initial weights go to all."""

    def __init__(self, config: TrainConfig, place: Place, split: Split, vocabulary: Vocabulary) -> None:
        self._place, self._clip_norm = place, config.clip_norm
        self._corpus = Corpus(split.training, vocabulary, config.max_length)
        self.sampler = ResumableSampler(
            len(self._corpus),
            seed=config.seed,
            rank=place.rank,
            world=place.world,
            micro_batch=config.micro_batch,
            accumulate=config.accumulate,
            data_digest=f"{split.digest}-{vocabulary.digest}",
        )
        torch.manual_seed(config.seed)
        self.model = Transformer(config, *vocabulary.sizes).to(place.device)
        device_ids = [place.local_rank] if place.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, device_ids=device_ids)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.98), eps=1e-9, fused=True
        )
        self.schedule = LambdaLR(self.optimizer, lambda done: lr_factor(done, config.warmup_steps))
        self._criterion = nn.CrossEntropyLoss(
            ignore_index=PAD, label_smoothing=config.label_smoothing, reduction="sum"
        )

    def warm_up(self) -> None:
        """Two passes whose gradients are thrown away. Every rank, on every start, before any state is loaded.

        DDP lays out its gradient buckets anew after a process's first backward pass, and the layout decides
        in which order the ranks' gradients are added. Without this, the first steps after a resume would add
        in another order than an undisturbed run does, and the last bits would differ.
        """
        for _ in range(2):
            self._loss([0]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: GlobalBatch) -> tuple[float, float]:
        """One optimizer step over one global batch; every rank, with its own share of it.

        Returns the batch's mean loss per target token, the same number on every rank, and the learning rate
        that was used. Every rank knows all samples of the batch, so it knows their token count without
        asking. Sums of losses are divided by it, which makes the gradient the exact mean at any world size
        and in a short last batch.
        """
        tokens = self._corpus.target_tokens(batch.samples)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._place.device)
        last = len(batch.micro_batches) - 1
        for number, samples in enumerate(batch.micro_batches):
            # Gradients travel once per step, with the last micro batch.
            with self.ddp.no_sync() if number < last else contextlib.nullcontext():
                loss = self._loss(samples)
                # DDP divides by the world size, and we have divided by all tokens already.
                (loss * (self._place.world / tokens)).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        dist.all_reduce(loss_sum)
        return loss_sum.item() / tokens, lr

    def _loss(self, samples: Sequence[int]) -> torch.Tensor:
        """The summed loss of some samples; zero, but with a graph, for none."""
        batch = self._corpus.batch(samples, self._place.device)
        logits = self.ddp(batch.source, batch.decoder_input)
        loss: torch.Tensor = self._criterion(logits.flatten(0, 1), batch.labels.flatten())
        return loss


def lr_factor(done: int, warmup_steps: int) -> float:
    """Rises to 1 over the warm-up, then falls with 1/sqrt(step); `done` counts finished steps."""
    step, warmup = done + 1, max(1, warmup_steps)
    return min(step / warmup, math.sqrt(warmup / step))
