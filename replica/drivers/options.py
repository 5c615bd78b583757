"""Parses engine options into a frozen dataclass, and refuses unknown names and wrong types."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

_OptionsT = TypeVar("_OptionsT")
_BOOLEANS = {"true": True, "false": False}


class OptionsError(ValueError):
    """An engine option is unknown or has a wrong type. The message names the option."""


def parse_options(cls: type[_OptionsT], given: Mapping[str, Any]) -> _OptionsT:
    """Return `cls(**given)`. The type of an option is that of its field's default value.

    Numbers and booleans may be given as text, because a pool's options are text.
    """
    defaults = cls()
    known: dict[str, Any] = {
        item.name: getattr(defaults, item.name)
        for item in fields(cls)  # pyright: ignore[reportArgumentType]
    }
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise OptionsError(f"unknown engine option {name}; known are {', '.join(known)}")
        wanted = type(known[name])
        try:
            values[name] = _converted(value, wanted)
        except (KeyError, TypeError, ValueError):
            raise OptionsError(
                f"engine option {name} is {value!r}; a value like {known[name]!r} is needed"
            ) from None
    return cls(**values)


def _converted(value: Any, wanted: type) -> Any:
    if isinstance(value, str) and wanted is bool:
        return _BOOLEANS[value.lower()]
    if isinstance(value, str) or (wanted is float and type(value) is int):
        return wanted(value)
    if type(value) is not wanted:
        raise TypeError(value)
    return value
