"""Results as images: for each workload, a bar for each system.

Used by `run`. Plain SVG, small enough for a repository.
"""

from html import escape
from pathlib import Path

from engines.bench.peers.peer import WORKLOADS
from engines.bench.peers.results import Result, Results

_COLORS = {"ours": "#2f6fb2", "transformers": "#d08a2e", "llama.cpp": "#6d8f4e"}
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 640, 190, 18, 6, 40
_STYLE = "font-family:sans-serif;font-size:12px"


def write_plots(results: Results, folder: Path) -> None:
    """One file a workload, `peers-decode-1.svg` and so on. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in WORKLOADS:
        rows = [result for (_, each), result in results.by_cell.items() if each == name]
        if rows:
            (folder / f"peers-{name}.svg").write_text(draw(name, rows))


def draw(name: str, rows: list[Result]) -> str:
    """Medians as bars, the rounds' least and most as a line on each."""
    longest = max(max(row.values) for row in rows)
    scale = (_WIDTH - _LEFT - 70) / longest
    height = _TOP + len(rows) * (_BAR + _GAP) + _GAP
    better = "less" if rows[0].unit == "ms" else "more"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" style="{_STYLE}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-weight="bold">{escape(name)}, {rows[0].unit} ({better} is better)</text>',
    ]
    for place, row in enumerate(rows):
        parts.append(_bar(row, _TOP + place * (_BAR + _GAP), scale))
    return "\n".join([*parts, "</svg>\n"])


def _bar(row: Result, y: int, scale: float) -> str:
    color = _COLORS[row.system.partition(":")[0]]
    low, high = (_LEFT + each * scale for each in (min(row.values), max(row.values)))
    end, middle = _LEFT + row.median * scale, y + _BAR / 2
    digits = 0 if row.median >= 100 else 1
    return (
        f'<text x="{_LEFT - 8}" y="{middle + 4:.0f}" text-anchor="end">{escape(row.system)}</text>'
        f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="{_BAR}" fill="{color}"/>'
        f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="black"/>'
        f'<text x="{max(end, high) + 6:.1f}" y="{middle + 4:.0f}">{row.median:,.{digits}f}</text>'
    )
