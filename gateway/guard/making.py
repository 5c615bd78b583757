"""Builds the judges of a worker from the operator's file of classifiers."""

from pathlib import Path

from prometheus_client import Counter

from gateway.guard.classifiers.config import read_classifiers
from gateway.guard.classifiers.line import ClassifierLine
from gateway.guard.judges import Judges


def make_judges(file: Path | None, texts: Counter) -> Judges:
    """Return the judges of a worker.

    Args:
        file: The operator's file of classifiers, or None for only the shipped classifier.
        texts: Counts judged texts, by labels `classifier` and `result`.

    Raises:
        ClassifiersError: The file cannot be read or is invalid.
    """
    entries = read_classifiers(file)
    return Judges([ClassifierLine(it, it.make(), texts) for it in entries])
