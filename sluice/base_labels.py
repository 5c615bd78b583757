"""Reads the number of labels of a base that classifies texts, for gateway and engine."""

from collections.abc import Mapping
from typing import Any

_CLASSIFIER = "BertForSequenceClassification"
_LABELS_DEFAULT = 2  # number of labels if the configuration has none


def label_count(config: Mapping[str, Any]) -> int:
    """Return the number of labels in a base's `config.json`, or 0 if it does not classify."""
    if _CLASSIFIER not in (config.get("architectures") or ()):
        return 0
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or _LABELS_DEFAULT)
