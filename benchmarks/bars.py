"""A bar for each contender, as SVG: the median of its seconds, and a line at its minimum."""

from __future__ import annotations

from html import escape

from benchmarks.results import Table
from benchmarks.tables import number

WIDTH, LABELS, ROW, TOP = 720, 250, 26, 44
OURS, OTHERS = "#2f6fde", "#9aa5b1"


def svg(table: Table) -> str:
    """The picture of a table whose rows have seconds; those that could not run are left out."""
    rows = [row for row in table.rows if "seconds" in row.samples]
    longest = max(row.median("seconds") for row in rows)
    scale = (WIDTH - LABELS - 110) / longest
    height = TOP + ROW * len(rows) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-weight="bold">{escape(table.title)}: seconds, less is better</text>',
    ]
    for place, row in enumerate(rows):
        y, median, best = TOP + ROW * place, row.median("seconds"), row.best("seconds")
        colour = OURS if row.name.startswith("ckptd") else OTHERS
        x = LABELS + best * scale
        lines += [
            f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(row.name)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{median * scale:.1f}" height="{ROW - 8}" fill="{colour}"/>',
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + ROW - 8}" stroke="#000000"/>',
            f'<text x="{LABELS + median * scale + 6:.1f}" y="{y + 14}">{number(median)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
