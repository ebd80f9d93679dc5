"""Token ids of all pairs, and padded tensors of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckptd_trainer.data import Pair
from ckptd_trainer.vocab import EOS, PAD, SOS, Vocabulary


@dataclass(frozen=True)
class Batch:
    """Padded token ids, each [samples, longest]: what goes into the model and what should come out."""

    source: torch.Tensor
    decoder_input: torch.Tensor
    labels: torch.Tensor
    """[PAD] where nothing is expected; an empty micro batch is nothing but [PAD]."""


class Corpus:
    """The encoded training pairs. Every rank holds all of them, so it knows each batch's token count."""

    def __init__(self, pairs: Sequence[Pair], vocabulary: Vocabulary, max_length: int) -> None:
        self._encoded = [vocabulary.encode(pair, max_length) for pair in pairs]

    def __len__(self) -> int:
        return len(self._encoded)

    def target_tokens(self, samples: Sequence[int]) -> int:
        """How many tokens these samples expect, [EOS] included."""
        return sum(len(self._encoded[sample][1]) for sample in samples)

    def batch(self, samples: Sequence[int], device: torch.device) -> Batch:
        """The tensors of these samples. For no samples: one that can be run and weighs nothing."""
        chosen = [self._encoded[sample] for sample in samples] or [([SOS, EOS], [])]
        return Batch(
            source=_padded([source for source, _ in chosen], device),
            decoder_input=_padded([[SOS, *target[:-1]] for _, target in chosen], device),
            labels=_padded([target or [PAD] for _, target in chosen], device),
        )


def _padded(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], device=device)
