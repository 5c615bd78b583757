"""The judges of a worker, made from the operator's file."""

from pathlib import Path

from prometheus_client import Counter

from gateway.guard.classifiers.config import read_classifiers
from gateway.guard.classifiers.line import ClassifierLine
from gateway.guard.judges import Judges


def make_judges(file: Path | None, texts: Counter) -> Judges:
    """Return the judges; `texts` counts by `classifier` and `result`.

    Raises:
        ClassifiersError: The file cannot be used.
    """
    entries = read_classifiers(file)
    return Judges([ClassifierLine(it, it.make(), texts) for it in entries])
