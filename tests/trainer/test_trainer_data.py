"""Pairs, the split and the tokenizers: real ones, equal everywhere, wrong ones refused by line."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptd.errors import Invalid
from ckptd_trainer.corpus import Corpus
from ckptd_trainer.data import Pair, Split, load_pairs, split_pairs
from ckptd_trainer.vocab import EOS, PAD, SOS, SPECIAL, UNK, Vocabulary, build_vocabulary

PAIRS = [Pair(f"word{n} house", f"parola{n} casa") for n in range(40)]


def test_the_installed_catalogues_give_thousands_of_clean_pairs() -> None:
    pairs = load_pairs("gettext", max_length=24)
    assert len(pairs) > 4000
    assert Pair("Albanian languages", "Lingue albanesi") in pairs  # pycountry
    assert Pair("Advanced options", "Opzioni avanzate") in pairs  # django
    assert pairs == sorted(pairs)
    assert len({pair.source for pair in pairs}) == len(pairs)
    assert not any("\x04" in text or "\n" in text for pair in pairs for text in (pair.source, pair.target))


def test_another_process_reads_the_same_split() -> None:
    code = (
        "from ckptd_trainer.data import load_pairs, split_pairs\n"
        "split = split_pairs(load_pairs('gettext', 24), seed=3, limit=100, validation_fraction=0.1)\n"
        "print(split.digest)"
    )
    split = split_pairs(load_pairs("gettext", 24), seed=3, limit=100, validation_fraction=0.1)
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == split.digest


def test_a_split_parts_the_pairs_and_depends_on_the_seed() -> None:
    split = split_pairs(PAIRS, seed=1, limit=0, validation_fraction=0.25)
    assert (len(split.training), len(split.validation)) == (30, 10)
    assert sorted(split.training + split.validation) == sorted(PAIRS)
    assert split == split_pairs(PAIRS, seed=1, limit=0, validation_fraction=0.25)
    assert split.digest != split_pairs(PAIRS, seed=2, limit=0, validation_fraction=0.25).digest
    limited = split_pairs(PAIRS, seed=1, limit=8, validation_fraction=0.01)
    assert (len(limited.training), len(limited.validation)) == (7, 1)
    with pytest.raises(Invalid, match="limit is 1"):
        split_pairs(PAIRS, seed=1, limit=1, validation_fraction=0.5)


def test_the_digest_sees_which_side_a_pair_is_on() -> None:
    whole = Split(training=tuple(PAIRS), validation=())
    moved = Split(training=tuple(PAIRS[:-1]), validation=tuple(PAIRS[-1:]))
    assert whole.digest != moved.digest


def test_a_tsv_is_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("the  cat\til gatto\nOslo\tOslo\n\nthe cat\til  felino\na dog\tun cane\none two three\tuno\n")
    assert load_pairs(str(path), max_length=4) == [Pair("a dog", "un cane"), Pair("the cat", "il felino")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\nonly one\n", "line 2: 1 columns"),
        (b"a\tb\tc\n", "line 1: 3 columns"),
        (b"a\tb\n\n\t \n", "line 3: 2 columns"),
        (b"a\tb\n\xff\tc\n", "line 2: not UTF-8"),
        (b"a\tb\n", "1 pairs of at most 22 words"),
    ],
)
def test_a_bad_tsv_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=message):
        load_pairs(str(path), max_length=24)


def test_a_missing_tsv_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"absent\.tsv: No such file"):
        load_pairs(str(tmp_path / "absent.tsv"), max_length=24)


def test_a_vocabulary_is_deterministic_and_survives_its_text() -> None:
    vocabulary = build_vocabulary(PAIRS, size=20)
    assert build_vocabulary(list(PAIRS), size=20).to_text() == vocabulary.to_text()
    shuffled = random.Random(0).sample(PAIRS, len(PAIRS))
    assert build_vocabulary(shuffled, size=20).digest == vocabulary.digest
    copy = Vocabulary.from_text(vocabulary.to_text())
    assert copy.to_text() == vocabulary.to_text()
    assert copy.sizes == vocabulary.sizes == (5, 5)  # only "house" and "casa" occur more than once
    ids = [vocabulary.target.token_to_id(word) for word in SPECIAL]
    assert ids == list(range(4)) == [UNK, PAD, SOS, EOS]


def test_encoding_marks_cuts_and_decodes() -> None:
    vocabulary = build_vocabulary(PAIRS, size=20)
    house, casa = vocabulary.source.token_to_id("house"), vocabulary.target.token_to_id("casa")
    assert house is not None
    assert casa is not None
    pair = Pair("house house new", "casa nuova")
    assert vocabulary.encode(pair, 24) == ([SOS, house, house, UNK, EOS], [casa, UNK, EOS])
    assert vocabulary.encode(pair, 3) == ([SOS, house, EOS], [casa, UNK, EOS])
    assert vocabulary.decode([casa, UNK, EOS, casa]) == "casa [UNK]"
    assert vocabulary.words("L'isola, qui.") == "L ' isola , qui ."


def test_batches_are_padded_and_an_empty_one_expects_nothing() -> None:
    pairs = [Pair("house", "casa casa"), Pair("house house house", "casa")]
    corpus = Corpus(pairs, build_vocabulary(PAIRS, size=20), max_length=24)
    batch = corpus.batch([0, 1], torch.device("cpu"))
    assert batch.source.shape == (2, 5)
    assert batch.source[0, 3:].tolist() == [PAD, PAD]
    assert batch.decoder_input[:, 0].tolist() == [SOS, SOS]
    assert batch.labels[0].tolist()[-1] == EOS
    assert batch.labels[1].tolist()[1:] == [EOS, PAD]
    assert corpus.target_tokens([0, 1]) == int((batch.labels != PAD).sum()) == 5
    empty = corpus.batch([], torch.device("cpu"))
    assert empty.labels.tolist() == [[PAD]]
    assert corpus.target_tokens([]) == 0


def test_opus_books_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(Invalid, match="the package datasets is not installed") as caught:
        load_pairs("opus_books", 24)
    assert "Use --dataset gettext" in caught.value.do
