"""Validation on rank 0: greedy translations, compared with the references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchmetrics.functional.text import bleu_score, char_error_rate, word_error_rate

from ckptd_trainer.data import Pair
from ckptd_trainer.model import Transformer
from ckptd_trainer.vocab import EOS, PAD, SOS, UNK, Vocabulary


@dataclass(frozen=True)
class Translation:
    source: str
    reference: str
    output: str
    known: bool
    """Whether the vocabulary has every word of the source; no model can translate what it cannot read."""


@dataclass(frozen=True)
class Validation:
    """Error rates (0 is perfect, may exceed 1), BLEU (1 is perfect), and what they were computed from."""

    cer: float
    wer: float
    bleu: float
    translations: tuple[Translation, ...]

    def samples(self, count: int) -> list[Translation]:
        """Some translations to look at: the first ones whose words are known, then the first others."""
        return sorted(self.translations, key=lambda translation: not translation.known)[:count]


@torch.no_grad()
def greedy_decode(model: Transformer, source: torch.Tensor, max_length: int) -> torch.Tensor:
    """The most likely next token, again and again, for all rows of `source` [batch, s] at once.

    Returns token ids without [SOS]; what follows a row's [EOS] is [PAD].
    """
    memory = model.encode(source)
    tokens = torch.full((source.shape[0], 1), SOS, device=source.device)
    ended = torch.zeros(source.shape[0], dtype=torch.bool, device=source.device)
    for _ in range(max_length - 1):
        best = model.decode(memory, source, tokens)[:, -1].argmax(-1)
        best = torch.where(ended, PAD, best)
        tokens = torch.cat([tokens, best.unsqueeze(1)], dim=1)
        ended |= best == EOS
        if bool(ended.all()):
            break
    return tokens[:, 1:]


def validate(
    model: Transformer, pairs: Sequence[Pair], vocabulary: Vocabulary, max_length: int, device: torch.device
) -> Validation:
    """Translate the pairs and score them. Rank 0 only, on the bare model: no collective runs in here.

    Draws no random number and puts the model back into its mode, so training goes on as if nothing had been.
    """
    was_training = model.training
    model.eval()
    try:
        translations: list[Translation] = []
        for start in range(0, len(pairs), 64):
            chunk = pairs[start : start + 64]
            rows = [vocabulary.encode(pair, max_length)[0] for pair in chunk]
            longest = max(map(len, rows))
            source = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], device=device)
            decoded = greedy_decode(model, source, max_length).tolist()
            for pair, row, ids in zip(chunk, rows, decoded, strict=True):
                reference = vocabulary.words(pair.target)
                translations.append(Translation(pair.source, reference, vocabulary.decode(ids), UNK not in row))
    finally:
        model.train(was_training)
    outputs, references = [t.output for t in translations], [t.reference for t in translations]
    return Validation(
        cer=float(char_error_rate(outputs, references)),
        wer=float(word_error_rate(outputs, references)),
        bleu=float(bleu_score(outputs, [[reference] for reference in references])),
        translations=tuple(translations),
    )
