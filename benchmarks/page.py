"""Generates the tables of docs/benchmarks.md from the result files, for `make docs`.

A test fails if the page differs from these tables.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.figure_texts import Result
from benchmarks.figures import GROUPS
from benchmarks.results import RESULTS

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
_TABLES_BEGIN, _TABLES_END = "<!-- figures: made by `make docs` -->", "<!-- end of figures -->"


def read_result(name: str) -> Result:
    """Return a result file of benchmarks/results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def benchmarks_page(page: str) -> str:
    """Return the text of docs/benchmarks.md with new tables."""
    head, _, rest = page.partition(_TABLES_BEGIN)
    _, _, tail = rest.partition(_TABLES_END)
    return f"{head}{_TABLES_BEGIN}\n{_tables()}{_TABLES_END}{tail}"


def _tables() -> str:
    parts: list[str] = []
    for title, rows in GROUPS:
        has_targets = any(row.target for row in rows)
        columns = ("measure", *["target"] * has_targets, "figure", "result file")
        parts.append(f"\n## {title}\n\n{_line(columns)}{_line(['---'] * len(columns))}")
        for row in rows:
            figure = row.figure(read_result(row.file))
            parts.append(_line((row.measure, *[row.target] * has_targets, figure, f"`{row.file}`")))
    return "".join(parts)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(benchmarks_page(PAGE.read_text()))
