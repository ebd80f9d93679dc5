"""The figures of a run go into the document between two marks, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.document import BEGIN, DOCUMENT, END, write_figures
from benchmarks.goals import GOALS
from benchmarks.results import Figure, Part, Report, Row, Table
from benchmarks.tables import cells, number

ROWS = (
    Row(name="raw write + fsync", samples={"seconds": (2.0, 1.0, 4.0), "peak_bytes": (5e6,), "errors": (0.0,)}),
    Row(name="ckptd", samples={"seconds": (1.0, 1.0, 3.0)}),
    Row(name="a <peer> | more", missing="not installed"),
)
TABLE = Table(group="saving", title="Durable save, 1 GB", rows=ROWS, reference="raw write + fsync", note="A note.")
REPORT = Report.of(
    [Part(tables=(TABLE,), figures=(Figure(figure="save/raw", at="1 GB", value=0.5, best=1.0),))],
    mode="quick",
    started="2026-01-01 00:00 UTC",
    seconds=12.0,
    machine={"cores": "2"},
    problems=("something: it ended with 1",),
)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "BENCHMARKS.md"
    path.write_text(f"# Before\n{BEGIN}\nold figures\n{END}\nafter\n")
    return path


def test_the_section_is_replaced_and_the_rest_stays(document: Path) -> None:
    write_figures(REPORT, document)
    first = document.read_text()
    assert first.startswith(f"# Before\n{BEGIN}\n")
    assert first.endswith(f"{END}\nafter\n")
    assert "old figures" not in first
    write_figures(REPORT, document)
    assert document.read_text() == first


def test_goals_contenders_and_failures_are_in_it(document: Path) -> None:
    write_figures(REPORT, document)
    lines = document.read_text().splitlines()
    assert "| durable save / raw write+fsync | 1 GB | 0.85 x | 0.5000 | 1.00 | pass |" in lines
    assert "| ckptd | 1.00 | 1.00 | 0.50 |  |" in lines
    assert "| a <peer> \\| more | not installed |  |  |  |" in lines
    assert "Failed: something: it ended with 1" in lines
    assert sum(line.endswith("| not measured |") for line in lines) == len(GOALS) - 2


def test_pictures_lie_beside_it_and_are_sound_svg(document: Path) -> None:
    write_figures(REPORT, document)
    assert "![Durable save, 1 GB](bench-save.svg)" in document.read_text()
    drawn = ElementTree.parse(document.parent / "bench-save.svg").getroot()
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "ckptd" in texts
    assert not (document.parent / "bench-stall.svg").exists()


def test_a_document_without_the_marks_is_refused(document: Path) -> None:
    document.write_text("# Before\n")
    with pytest.raises(ValueError, match="no section"):
        write_figures(REPORT, document)


def test_our_own_document_has_the_marks() -> None:
    text = DOCUMENT.read_text()
    assert text.count(BEGIN) == text.count(END) == 1


def test_columns_in_which_nothing_happened_are_left_out() -> None:
    headers, lines = cells(TABLE)
    assert headers == ["contender", "median, s", "min, s", "x", "extra memory, MB"]
    assert lines[0] == ["raw write + fsync", "2.00", "1.00", "1.00", "5.00"]


def test_numbers_keep_about_three_digits() -> None:
    assert [number(value) for value in (0, 1234.4, 12.344, 0.12344, 0.00012344)] == [
        "0",
        "1234",
        "12.34",
        "0.1234",
        "0.000123",
    ]


def test_an_earlier_report_is_shown_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    path.write_text(REPORT.model_dump_json())
    assert main(["--from", str(path)]) == 1  # it tells of a failure
    shown = capsys.readouterr().out
    assert "not measured: something: it ended with 1" in shown
    assert "pass" in shown
