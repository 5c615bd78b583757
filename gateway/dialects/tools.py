"""A tool as a dialect needs to know it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    Attributes:
        name: As the caller gave it.
        parameters: JSON schema of its arguments; None: it takes any object.
        is_strict: Whether the caller wants calls of it held to the schema even where the model
            chooses freely.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
