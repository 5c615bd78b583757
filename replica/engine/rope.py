"""Computes the rotation frequencies of rotary positions, with the supported scalings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Kind of scaling -> fields that it requires in addition to its name.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", *_LLAMA3),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary position embedding of a checkpoint.

    Attributes:
        theta: Base of the frequencies.
        kind: Kind of scaling: default, linear or llama3.
        factor: Factor by which the context was extended.
        low_freq_factor: For llama3. Waves longer than the original context / this factor are
            stretched by the whole `factor`.
        high_freq_factor: For llama3. Waves shorter than the original context / this factor are not
            stretched.
        original_context_tokens: For llama3. Length of the context in tokens before its extension.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context_tokens: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Rope":
        """Return the embedding in `rope_theta`, `rope_scaling` or `rope_parameters` of config.json.

        Raises:
            ValueError: The kind is not supported, or fields are missing or unknown.
        """
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        given = dict(config.get(name) or {})
        theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
        kinds = {given.pop(key) for key in ("rope_type", "type") if key in given}
        kind = str(kinds.pop()) if len(kinds) == 1 else "default"
        fields = _FIELDS.get(kind)
        # Some checkpoints contain the default value of this field.
        if given.get("partial_rotary_factor") == 1:
            del given["partial_rotary_factor"]
        if kinds or fields is None or given.keys() != set(fields):
            known = "; ".join(f"{k}: {', '.join(f) or 'no fields'}" for k, f in _FIELDS.items())
            raise ValueError(f"{name} {config[name]!r} (supported are {known})")
        rope = cls(
            theta=float(theta),
            kind=kind,
            factor=float(given.get("factor", 1.0)),
            low_freq_factor=float(given.get(_LLAMA3[0], 1.0)),
            high_freq_factor=float(given.get(_LLAMA3[1], 1.0)),
            original_context_tokens=int(given.get(_LLAMA3[2], 0)),
        )
        is_valid = rope.theta > 1 and rope.factor >= 1
        if kind == "llama3":
            is_valid &= 0 < rope.low_freq_factor < rope.high_freq_factor
            is_valid &= rope.original_context_tokens > 0
        if not is_valid:
            raise ValueError(f"{name} {config.get(name)!r}, rope_theta {theta!r}")
        return rope

    def frequencies(self, head_dim: int) -> npt.NDArray[np.float64]:
        """Return the radians per position of each of the `head_dim / 2` rotated pairs."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        frequencies = 1.0 / self.theta**exponents
        if self.kind == "default":
            return frequencies
        stretched = frequencies / self.factor
        if self.kind == "linear":
            return stretched
        turns = self.original_context_tokens * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return kept * frequencies + (1 - kept) * stretched
