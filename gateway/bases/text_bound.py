"""Bounds the number of characters in one token, so that too long texts are refused early.

Tokenizing needs 0.5 ms per KB, while counting characters is free. There is no bound for a tokenizer
that drops characters, because its tokens may cover any number of characters.
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from gateway.bodies.mistakes import too_long

# Maximum number of characters that a normalizer composes into one. Hangul and stacked accents
# consist of at most four characters.
_COMPOSED = 4
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"})


def require_fit(characters: int, per_token_max: int, context_tokens_max: int, param: str) -> None:
    """Refuse a text with more characters than the tokens of the whole context can have.

    Args:
        characters: Number of characters of the text.
        per_token_max: Maximum number of characters in one token, or 0 for no bound.
        context_tokens_max: Context of the model, in tokens, or 0 if it is not specified.
        param: Name of the body's field for the text.

    Raises:
        BadRequestError: CONTEXT_LENGTH_EXCEEDED.
    """
    characters_max = per_token_max * context_tokens_max
    if characters_max and characters > characters_max:
        raise too_long(param, characters, context_tokens_max, characters_max)


def characters_per_token_max(tokenizer: Tokenizer) -> int:
    """Return the maximum number of characters in one token of a tokenizer, or 0 for no bound."""
    described = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder().values()
    factor = _shrinking(described.get("normalizer"))
    keeps_all = (
        factor > 0
        and _keeps(described.get("pre_tokenizer"))
        and _knows_all(described["model"], described.get("pre_tokenizer"))
        and not described.get("truncation")
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not keeps_all:
        return 0
    return factor * max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)


def _shrinking(stage: Mapping[str, Any] | None) -> int:
    """Return the maximum factor by which a normalizer shortens a text, or 0 for no bound."""
    if stage is None or stage["type"] in {"Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel"}:
        return 1
    if stage["type"] in {"NFC", "NFKC"}:
        return _COMPOSED
    if stage["type"] == "Replace":
        pattern = stage["pattern"].get("String")
        return int(pattern is not None and len(stage["content"]) >= len(pattern))
    if stage["type"] == "Sequence":
        factor = 1
        for part in stage["normalizers"]:
            factor *= _shrinking(part)
        return factor
    return 0


def _keeps(stage: Mapping[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer drops no character."""
    if stage is None:
        return True
    if stage["type"] not in _KEEPING or stage.get("behavior") == "Removed":
        return False
    return all(map(_keeps, stage.get("pretokenizers", ())))


def _knows_all(model: Mapping[str, Any], stage: Mapping[str, Any] | None) -> bool:
    """Return whether each unknown character has its own token, so that tokens stay short."""
    if model["type"] not in {"BPE", "Unigram"}:
        return False
    return bool(model.get("byte_fallback")) or _has_bytes(stage)


def _has_bytes(stage: Mapping[str, Any] | None) -> bool:
    if stage is None:
        return False
    return stage["type"] == "ByteLevel" or any(map(_has_bytes, stage.get("pretokenizers", ())))
