"""Tells how many labels a base has: the gateway names them, the engine computes their scores."""

from collections.abc import Mapping
from typing import Any

_CLASSIFIER = "BertForSequenceClassification"
_LABELS_DEFAULT = 2  # of a classifier whose configuration gives no number


def label_count(config: Mapping[str, Any]) -> int:
    """Return the number of labels of a base, by its `config.json`; 0 if it does not classify."""
    if _CLASSIFIER not in (config.get("architectures") or ()):
        return 0
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or _LABELS_DEFAULT)
