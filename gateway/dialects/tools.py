"""The description of a tool, from which a dialect's grammars are written. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    Attributes:
        name: Name of the function.
        parameters: JSON schema of the arguments, or None for any object.
        is_strict: Whether the schema is enforced even if the request forces no call.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
