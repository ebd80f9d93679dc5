"""The resume contract: under which conditions a checkpoint was saved, and whether this start has the same ones.

A contract is a flat list of named values. Some are found (world, versions, one `app_state.<key>` for each part), the
rest are the user's: batch size, seed, whatever a resumed run should not change by accident. The manifest keeps them;
`restore` compares before any payload is read, and a refusal reaches every rank by the vote, so nothing is installed.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptd import __version__
from ckptd.errors import Invalid
from ckptd.manifest import ContractValue
from ckptd_client.stateful import Stateful

MAX_GIVEN, MAX_NAME, MAX_TEXT = 64, 64, 500
APP_STATE, PER_RANK = "app_state.", "per_rank."
VERSIONS = ("ckptd", "python", "torch")
FOUND = ("world", "dtypes", *VERSIONS)
"""Fields that nobody has to give, besides one for each part."""

Fields = dict[str, ContractValue]
Severity = Literal["info", "warning", "refused"]


@dataclass(frozen=True)
class Difference:
    """One field that is not as it was saved. None: it was not recorded, or is not there now."""

    field: str
    saved: ContractValue | None
    present: ContractValue | None
    severity: Severity

    def __str__(self) -> str:
        return f"{self.field}: saved {_told(self.saved)}, now {_told(self.present)} ({self.severity})"


class Contract:
    """What the user says about it. `given` are values to record; of all fields, those in `strict` must be as saved,
    those in `allow` may differ although they would be refused: a part that does not fit is then left as it is built.
    `parallel` is not recorded, only compared between the ranks.
    """

    def __init__(
        self,
        given: Mapping[str, ContractValue] | None = None,
        strict: Collection[str] = (),
        allow: Collection[str] = (),
        *,
        parallel: bool = False,
    ) -> None:
        self.parallel = parallel
        self.given: Fields = {name: _checked(name, value) for name, value in (given or {}).items()}
        if len(self.given) > MAX_GIVEN:
            raise Invalid(f"contract: {len(self.given)} fields, expected at most {MAX_GIVEN}", field="contract")
        self.strict, self.allow = _names("strict", strict), _names("allow", allow)
        both = sorted(self.strict & self.allow)
        if both:
            raise Invalid(f"contract: {both} are both strict and allowed", field="strict")
        known = {*self.given, *FOUND}
        unknown = sorted(n for n in self.strict | self.allow if n not in known and not _is_part(n))
        if unknown:
            raise Invalid(
                f"contract: strict or allow name {unknown}, which are no fields of it",
                do=f"Give them in contract=, or name one of {', '.join(FOUND)}, app_state.<key>, per_rank.<key>.",
                field="strict",
            )

    @property
    def shared(self) -> Fields:
        """What all ranks must have been given alike."""
        return {**self.given, "the option parallel": self.parallel}

    def fields(self, app_state: Mapping[str, object], per_rank: Mapping[str, object] | None, world: int) -> Fields:
        """All fields as they are now. Training thread; looks at dtypes and classes, copies nothing."""
        found: Fields = {"world": world, "ckptd": __version__, "python": platform.python_version()}
        found["torch"] = str(torch.__version__)
        found["dtypes"] = ", ".join(sorted({name for value in app_state.values() for name in _dtypes(value)}))
        found |= {f"{APP_STATE}{key}": kind(value) for key, value in app_state.items()}
        found |= {f"{PER_RANK}{key}": kind(value) for key, value in (per_rank or {}).items()}
        return {**found, **self.given}

    def compare(self, saved: Mapping[str, ContractValue], present: Mapping[str, ContractValue]) -> list[Difference]:
        """Every field that differs, by name. Of a checkpoint without a contract only strict fields count."""
        names = saved.keys() | present.keys() if saved else self.strict
        pairs = ((name, saved.get(name), present.get(name)) for name in sorted(names))
        return [Difference(name, a, b, self._severity(name, a, b)) for name, a, b in pairs if a != b]

    def _severity(self, name: str, saved: ContractValue | None, present: ContractValue | None) -> Severity:
        if name in self.strict:
            return "refused"
        if name in VERSIONS:
            return "info" if _minor(saved) == _minor(present) else "warning"
        if name.startswith(APP_STATE) and name not in self.allow:
            return "refused" if None in (saved, present) or _named_kinds(saved, present) else "warning"
        return "warning"

    def refuse(self, differences: Sequence[Difference], what: str) -> None:
        """`Invalid` with the whole difference, if any field is refused; `what` says which checkpoint it is about."""
        refused = [d for d in differences if d.severity == "refused"]
        if not refused:
            return
        strict, parts = [d for d in refused if d.field in self.strict], [d for d in refused if _is_part(d.field)]
        do = ["Start as it was saved, or under another run name."]
        if strict:
            do.append("To go on with other values, take them out of strict=: then they are warnings.")
        if [d for d in parts if d not in strict]:
            allow = ", ".join(repr(d.field) for d in parts if d not in strict)
            do.append(f"To leave parts that do not fit as they are built, pass allow=({allow},).")
        raise Invalid(
            f"{what} does not fit this start:\n" + "\n".join(f"  - {difference}" for difference in differences),
            do=" ".join(do),
            differences=[{"field": d.field, "saved": d.saved, "present": d.present} for d in refused],
        )

    def left_out(
        self,
        live: Mapping[str, object],
        loaded: Mapping[str, object],
        differences: Sequence[Difference],
        prefix: str,
    ) -> set[str]:
        """The allowed parts that are only on one side, or of another kind: these are neither checked nor loaded."""
        differing = {difference.field for difference in differences}
        both = live.keys() & loaded.keys()
        allowed = {key for key in live.keys() | loaded.keys() if f"{prefix}{key}" in self.allow}
        return {key for key in allowed if key not in both or f"{prefix}{key}" in differing}


def check_one_contract(given: Sequence[Fields]) -> None:
    """`Invalid`, on every rank alike, unless all ranks were given the same contract. `given` is by rank."""
    for rank, other in enumerate(given):
        names = sorted(n for n in given[0].keys() | other.keys() if given[0].get(n) != other.get(n))
        if names:
            told = ", ".join(f"{n}: {_told(given[0].get(n))} and {_told(other.get(n))}" for n in names)
            raise Invalid(
                f"ranks 0 and {rank} were started under different contracts: {told}",
                do="Give all ranks the same settings.",
                field="contract",
            )


def kind(part: object) -> str:
    """What a part is, in words that do not change with wrappers: loading Adam's state into SGD is an error, loading
    a module that is wrapped in DDP now is none."""
    match part:
        case torch.nn.Module():
            return "module"
        case torch.optim.Optimizer():
            return f"optimizer {type(part).__qualname__}"
        case LRScheduler():
            return f"scheduler {type(part).__qualname__}"
        case torch.Tensor():
            return "tensor"
        case dict():
            return "dict"
        case Stateful() if not isinstance(part, type):
            return "stateful"
    return "value"


def _named_kinds(saved: ContractValue | None, present: ContractValue | None) -> bool:
    """Whether both name their class: an optimizer or a scheduler. Other kinds are compared by what they hold."""
    return all(isinstance(value, str) and " " in value for value in (saved, present))


def _dtypes(part: object) -> set[str]:
    if isinstance(part, torch.nn.Module):
        tensors = [*part.parameters(), *part.buffers()]
    else:
        tensors = [part] if isinstance(part, torch.Tensor) else []
    return {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


def _checked(name: str, value: Any) -> ContractValue:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or name in FOUND or _is_part(name):
        raise Invalid(
            f"contract field {name!r}: expected a name of at most {MAX_NAME} characters that is none of {FOUND} and "
            f"does not begin with {APP_STATE} or {PER_RANK}",
            field="contract",
        )
    if isinstance(value, bool | int | str) and len(str(value)) <= MAX_TEXT:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise Invalid(
        f"contract field {name}: expected a number, a bool or a text of at most {MAX_TEXT} characters, "
        f"found {value!r}"[:500],
        field="contract",
    )


def _names(argument: str, names: Collection[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise Invalid(f"{argument}={names!r}: expected a list of names", do=f"Write ({names!r},).", field=argument)
    return frozenset(names)


def _is_part(name: str) -> bool:
    return name.startswith((APP_STATE, PER_RANK))


def _minor(version: ContractValue | None) -> list[str]:
    return str(version).split(".")[:2]


def _told(value: ContractValue | None) -> str:
    return "nothing" if value is None else repr(value)
