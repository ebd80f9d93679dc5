"""Word-level tokenizers for both languages, built by rank 0 and handed to the others as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from torch.distributed.distributed_c10d import Store

from ckptd_trainer.data import Pair, Split
from ckptd_trainer.place import Place, from_first_rank

UNK, PAD, SOS, EOS = 0, 1, 2, 3
SPECIAL = ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]
"""In the order of their ids."""


@dataclass(frozen=True)
class Vocabulary:
    """The two tokenizers of a run."""

    source: Tokenizer
    target: Tokenizer

    def to_text(self) -> str:
        """JSON. The same training pairs give the same text, on every host."""
        return json.dumps({"source": self.source.to_str(), "target": self.target.to_str()})

    @classmethod
    def from_text(cls, text: str) -> Vocabulary:
        texts = json.loads(text)
        return cls(Tokenizer.from_str(texts["source"]), Tokenizer.from_str(texts["target"]))

    @property
    def sizes(self) -> tuple[int, int]:
        """Words the source and the target tokenizer know, special tokens included."""
        return self.source.get_vocab_size(), self.target.get_vocab_size()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]

    def encode(self, pair: Pair, max_length: int) -> tuple[list[int], list[int]]:
        """Source ids as [SOS] words [EOS]; target ids as words [EOS], the decoder's input adds [SOS] itself.

        Both fit into `max_length`: words beyond it are cut off.
        """
        source: list[int] = self.source.encode(pair.source).ids[: max_length - 2]
        target: list[int] = self.target.encode(pair.target).ids[: max_length - 1]
        return [SOS, *source, EOS], [*target, EOS]

    def decode(self, target_ids: Sequence[int]) -> str:
        """Target ids up to the first [EOS] as text; unknown words stay visible as [UNK]."""
        words: list[str] = []
        for token in target_ids:
            if token == EOS:
                break
            if token not in (SOS, PAD):
                words.append(self.target.id_to_token(token) or SPECIAL[UNK])
        return " ".join(words)

    def words(self, text: str) -> str:
        """A reference text in the spelling `decode` gives: words and punctuation apart."""
        return " ".join(word for word, _ in Whitespace().pre_tokenize_str(text))


def build_vocabulary(training_pairs: Sequence[Pair], size: int) -> Vocabulary:
    """Rank 0 only; the others get its text. Reads the training split alone, so validation stays unseen."""
    return Vocabulary(
        source=_build((pair.source for pair in training_pairs), size),
        target=_build((pair.target for pair in training_pairs), size),
    )


def _build(texts: Iterator[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(vocab_size=size, min_frequency=2, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def shared_vocabulary(store: Store, place: Place, split: Split, size: int) -> Vocabulary:
    """The vocabulary of the run, built on rank 0 and the same on every rank; every rank calls it."""
    built = from_first_rank(store, place, "vocabulary", lambda: build_vocabulary(split.training, size).to_text())
    return Vocabulary.from_text(built)
