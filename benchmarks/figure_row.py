"""A row of the tables of docs/benchmarks.md."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.figure_texts import Result


@dataclass(frozen=True, slots=True)
class FigureRow:
    """A row of a table of docs/benchmarks.md.

    Attributes:
        measure: Text of the first column.
        file: Name of the result file, without suffix.
        figure: Function that returns the text of the figure from the result.
        target: Target with its unit, or an empty text if the figure meets its target.
    """

    measure: str
    file: str
    figure: Callable[[Result], str]
    target: str = ""
