"""An error crosses a pickle and an HTTP answer unchanged, and says what to do."""

from __future__ import annotations

import json
import pickle

import pytest

from ckptd import errors
from ckptd.errors import (
    CkptdError,
    Conflict,
    Corrupt,
    Fenced,
    InUse,
    NotInitialised,
    OutcomeUnknown,
    Unavailable,
    Unreachable,
    by_code,
    describe,
    from_dict,
)


def kinds(base: type[CkptdError] = CkptdError) -> list[type[CkptdError]]:
    return [base, *(found for child in base.__subclasses__() for found in kinds(child))]


@pytest.mark.parametrize("kind", kinds())
def test_an_error_survives_pickle_and_json(kind: type[CkptdError]) -> None:
    error = kind("what failed", do="what to do", run="r", step=7)
    for again in (pickle.loads(pickle.dumps(error)), from_dict(json.loads(json.dumps(error.to_dict())))):
        assert type(again) is kind
        assert (again.message, again.do, again.fields) == ("what failed", "what to do", {"run": "r", "step": 7})
        assert str(again) == str(error)


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in kinds()]
    assert len(set(codes)) == len(codes)
    assert all(by_code(kind.code) is kind for kind in kinds())


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind is not NotInitialised])
def test_every_kind_says_what_to_do_by_itself(kind: type[CkptdError]) -> None:
    assert f"what to do: {kind.default_do}" in str(kind("it failed"))
    assert kind is CkptdError or kind.default_do != CkptdError.default_do or "code" not in vars(kind)


def test_a_code_of_a_younger_version_is_still_an_error() -> None:
    error = from_dict({"code": "brand-new", "message": "m", "do": "d", "fields": {"a": 1}})
    assert type(error) is CkptdError
    assert (error.message, error.do, error.fields) == ("m", "d", {"a": 1})


def test_an_incomplete_description_is_still_an_error() -> None:
    assert from_dict({}).do == CkptdError.default_do
    assert type(from_dict({"code": "corrupt", "message": "m"})) is Corrupt


def test_the_family_says_what_the_caller_does_next() -> None:
    assert issubclass(Unreachable, Unavailable)
    assert issubclass(OutcomeUnknown, Unavailable)
    assert issubclass(NotInitialised, Unavailable)
    assert issubclass(InUse, Conflict)
    assert not issubclass(Fenced, Unavailable)
    assert not issubclass(Corrupt, Unavailable)


def test_candidates_are_listed_one_a_line() -> None:
    error = Corrupt("none is valid", candidates=[{"save": "s", "step": 5, "reason": "chunk 3 differs"}, "odd"])
    assert "  - step 5 (s): chunk 3 differs\n  - odd\n" in str(error)


def test_statuses_tell_whose_turn_it_is() -> None:
    assert {kind.status for kind in kinds() if issubclass(kind, Unavailable)} == {503}
    assert {kind.status for kind in kinds() if issubclass(kind, Conflict)} == {409}
    assert errors.Invalid.status == 422


def test_describe_is_one_line() -> None:
    assert describe(ValueError("a\nb")) == "ValueError: a"
    assert describe(ValueError()) == "ValueError"
