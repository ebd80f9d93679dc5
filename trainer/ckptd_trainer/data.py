"""English-Italian sentence pairs, the same list in the same order on every host."""

from __future__ import annotations

import gettext
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptd.errors import Invalid, Unavailable
from ckptd_trainer.config import TrainConfig

CATALOGUES = {"pycountry": "locales/it/LC_MESSAGES/*.mo", "django": "**/locale/it/LC_MESSAGES/*.mo"}
"""Installed packages with Italian translations, and where their compiled catalogues lie."""
WORDS = re.compile(r"\w+|[^\w\s]+")
"""What the tokenizers take for a word or a punctuation mark."""


@dataclass(frozen=True, order=True)
class Pair:
    source: str
    target: str


@dataclass(frozen=True)
class Split:
    """Training and validation pairs. All ranks must hold the same: compare `digest`."""

    training: tuple[Pair, ...]
    validation: tuple[Pair, ...]

    @property
    def digest(self) -> str:
        """Covers every pair, their order and the side they are on."""
        running = hashlib.sha256()
        for name, pairs in (("training", self.training), ("validation", self.validation)):
            running.update(f"{name}\0{len(pairs)}\0".encode())
            for pair in pairs:
                running.update(f"{pair.source}\t{pair.target}\n".encode())
        return running.hexdigest()[:16]


def load_split(config: TrainConfig) -> Split:
    """What this host reads as the run's training and validation pairs. Every rank."""
    return split_pairs(
        load_pairs(config.dataset, config.max_length),
        seed=config.seed,
        limit=config.limit,
        validation_fraction=config.validation_fraction,
    )


def load_pairs(dataset: str, max_length: int) -> list[Pair]:
    """Cleaned, sorted pairs, one for each source sentence. Every rank, with its own installed packages or
    file.

    `max_length` counts tokens with [SOS] and [EOS]; longer pairs are left out. Raises `Invalid` when the
    data set is wrong or missing, `Unavailable` when the hub is.
    """
    if dataset == "gettext":
        raw: Iterable[Pair] = _read_catalogues()
    elif dataset == "opus_books":
        raw = _read_opus_books()
    else:
        raw = _read_tsv(Path(dataset))
    pairs = _clean(raw, max_words=max_length - 2)
    if len(pairs) < 2:
        raise Invalid(
            f"data set {dataset}: {len(pairs)} pairs of at most {max_length - 2} words, expected 2 or more",
            do="Use more data or a larger --max-length.",
            field="dataset",
        )
    return pairs


def split_pairs(pairs: Sequence[Pair], *, seed: int, limit: int, validation_fraction: float) -> Split:
    """Draw `limit` pairs (0: all) by the seed and part them. The same arguments give the same split."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [pairs[index] for index in order[: limit or None]]
    held_out = min(max(1, round(len(drawn) * validation_fraction)), len(drawn) - 1)
    if held_out < 1:
        raise Invalid(
            f"setting limit is {limit}: expected at least 2, one pair to train and one to validate",
            field="limit",
        )
    return Split(training=tuple(drawn[held_out:]), validation=tuple(drawn[:held_out]))


def _clean(raw: Iterable[Pair], max_words: int) -> list[Pair]:
    kept: dict[str, str] = {}
    for pair in raw:
        source, target = " ".join(pair.source.split()), " ".join(pair.target.split())
        # A name that is the same in both languages teaches nothing.
        if not source or not target or source == target:
            continue
        if max(len(WORDS.findall(source)), len(WORDS.findall(target))) > max_words:
            continue
        # Of several translations the smallest one stays, whatever order they came in.
        kept[source] = min(target, kept.get(source, target))
    return sorted(Pair(source, target) for source, target in kept.items())


def _read_catalogues() -> Iterator[Pair]:
    for package, pattern in CATALOGUES.items():
        # Found, not imported: django and pycountry are only read as files.
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise Invalid(
                f"data set gettext: the package {package} is not installed",
                do=f"pip install {package} (it is in the extra 'trainer'), or use --dataset PATH.tsv.",
                field="dataset",
            )
        for path in sorted(Path(spec.origin).parent.glob(pattern)):
            yield from _read_catalogue(path)


def _read_catalogue(path: Path) -> Iterator[Pair]:
    with path.open("rb") as file:
        catalogue = gettext.GNUTranslations(file)
    for message, translation in vars(catalogue)["_catalog"].items():
        # A plural message is keyed (text, form); its form 0 is the singular.
        text, form = message if isinstance(message, tuple) else (message, 0)
        if form == 0:
            yield Pair(text.rpartition("\x04")[2], translation)  # a context may stand before \x04


def _read_tsv(path: Path) -> Iterator[Pair]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise Invalid(f"data set {path}: {error.strerror or error}", field="dataset") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip(b"\r "):  # an empty line
            continue
        try:
            columns = line.decode("utf-8").split("\t")
        except UnicodeDecodeError as error:
            raise Invalid(f"data set {path}, line {number}: not UTF-8 ({error.reason})", line=number) from error
        if len(columns) != 2 or not all(column.strip() for column in columns):
            raise Invalid(
                f"data set {path}, line {number}: {len(columns)} columns, expected 2 that are not empty",
                do="Write one pair a line: English, a tab, Italian.",
                field="dataset",
                line=number,
            )
        yield Pair(*columns)


def _read_opus_books() -> Iterator[Pair]:
    instead = "Use --dataset gettext, which needs no download, or --dataset PATH.tsv."
    try:
        import datasets
    except ImportError as error:
        raise Invalid(
            "data set opus_books: the package datasets is not installed",
            do=f"pip install datasets. {instead}",
            field="dataset",
        ) from error
    try:
        rows = datasets.load_dataset("Helsinki-NLP/opus_books", "en-it", split="train")
    except (OSError, ValueError) as error:  # the hub's errors are children of these two
        raise Unavailable(f"data set opus_books: the Hugging Face hub did not answer: {error}", do=instead) from error
    for row in rows:
        yield Pair(row["translation"]["en"], row["translation"]["it"])
