"""A tool, in the form that dialects use. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    Attributes:
        name: Name of the function.
        parameters: JSON schema of the arguments; None: any object.
        is_strict: Whether the caller wants calls of it held to the schema even where the model
            chooses freely.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
