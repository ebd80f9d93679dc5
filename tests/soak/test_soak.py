"""The soak, short: it does what it is asked, and finds what must not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd import layout
from ckptd.storage import init_root
from ckptd.testing.soak import Soak
from ckptd.testing.soak_journal import Journal, Tally, operations_in

OPERATIONS = 60


@pytest.mark.e2e
def test_a_short_soak_has_no_findings(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/root"
    init_root(url)
    said = list[str]()
    soak = Soak(url, tmp_path, seed=3, services=1, operations=OPERATIONS, say=said.append)
    assert soak.run() == [], said
    assert soak.tally.operations.total() == OPERATIONS  # killed processes go on where they were
    assert soak.kills == {"process": 2, "service": 1}
    assert sum(map(len, soak.tally.durable.values())) > 0
    assert len(soak.service_actors) == 2  # one service, two lives
    assert all(custody.state.seq for custody in soak.custody.values())
    assert "upkeep records: " in soak.summary()
    assert f"operations: {OPERATIONS} " in soak.summary()


def test_a_service_that_met_a_fault_is_a_finding(tmp_path: Path) -> None:
    """Its log is read, whatever its requests were answered."""
    url = f"file://{tmp_path}/root"
    init_root(url)
    (tmp_path / "service-0.log").write_text("INFO well\nERROR housekeeping met a fault of ckptd, and goes on\n")
    found = Soak(url, tmp_path, seed=3, processes=0, services=1, operations=0, say=list[str]().append).run()
    assert found == ["service-0.log: ERROR housekeeping met a fault of ckptd, and goes on"]


def test_a_soak_finds_what_contradicts_the_log(tmp_path: Path) -> None:
    """Lies in a journal: each is a finding, and told once."""
    url = f"file://{tmp_path}/root"
    init_root(url)
    said = list[str]()
    save = layout.save_id(1, 5, all_ranks=True, count=1)
    with Journal(tmp_path / "liar.jsonl") as liar:
        liar.durable("soak-0-0", save, f"commit:{save}:{'0' * 64}")
        liar.counts("soak-0-0", f"open:{'0' * 32}")
        liar.finding("soak-0-0", "it rained")
    found = Soak(url, tmp_path, seed=3, processes=0, services=0, operations=0, say=said.append).run()
    assert [f"FINDING {finding}" for finding in found] == said
    assert f"soak-0-0: I6 {save}: was acknowledged, and no record of it counts" in found
    assert f"soak-0-0: open:{'0' * 32} was acknowledged, and does not count" in found
    assert "soak-0-0: it rained" in found
    assert f"soak-0-0: commit:{save}:{'0' * 64} was acknowledged, and does not count" in found
    assert len(found) == 4


def test_a_journal_is_read_on_as_it_grows(tmp_path: Path) -> None:
    tally = Tally(tmp_path)
    assert tally.read_on() == set()
    path = tmp_path / "one.jsonl"
    with Journal(path) as journal:
        journal.operation("save")
        journal.durable("r", "s", "rid")
        assert tally.read_on() == {"r"}
        journal.operation("save")
        journal.event("fenced")
        journal.refused("q", "rid2")
        journal.damaged("q", "s2", "key")
        journal.means("q", "unpin", "s2", "ann")
        journal.told("q", "pin", "s2", "ann", 1.5)
        assert tally.read_on() == {"q"}
    with Journal(path) as again:
        again.operation("start")
    assert tally.read_on() == set()
    assert tally.operations == {"save": 2, "start": 1}
    assert (tally.durable, tally.counting, tally.refused) == ({"r": {"s"}}, {"r": {"rid"}}, {"q": {"rid2"}})
    assert (tally.damaged, tally.damaged_saves) == ({"q": {"s2", "key"}}, {"q": {"s2"}})
    assert tally.meant == {"q": {("unpin", "s2", "ann")}}
    assert tally.told == {"q": {("pin", "s2", "ann"): 1.5}}
    assert (tally.events, tally.findings) == ({"fenced": 1}, [])
    assert operations_in(path) == 3
    assert operations_in(tmp_path / "none.jsonl") == 0


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path, tally = tmp_path / "one.jsonl", Tally(tmp_path)
    whole = b'{"what": "event", "name": "x"}\n'
    path.write_bytes(whole + whole[:10])
    tally.read_on()
    assert tally.events == {"x": 1}
    path.write_bytes(whole * 2)
    tally.read_on()
    assert tally.events == {"x": 2}
