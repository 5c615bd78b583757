"""Writes embeddings for OpenAI's clients, as numbers or base64, and shortens them. Pure."""

import math
from array import array
from base64 import b64encode

import orjson


def shortened(vector: "array[float]", dimensions: int) -> "array[float]":
    """Return the first `dimensions` values of a vector, scaled to length 1."""
    if dimensions >= len(vector):
        return vector
    head = vector[:dimensions].tolist()
    length = math.hypot(*head) or 1.0
    return array("f", [value / length for value in head])


def rendered(index: int, vector: "array[float]", *, is_base64: bool) -> bytes:
    """Return one element of an answer's `data`. Base64 contains little-endian float32 values."""
    content = b'"%b"' % b64encode(vector.tobytes()) if is_base64 else orjson.dumps(vector.tolist())
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, content)
