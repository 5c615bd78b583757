"""Types of the fields of admin requests. Pure."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sluice.ids import ID_PATTERN

_ID = re.compile(ID_PATTERN)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")


class AdminBody(BaseModel):
    """A request body that refuses unknown fields, and strings in place of numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def is_id(value: str) -> bool:
    """Return whether a text is a valid id."""
    return _ID.fullmatch(value) is not None


def is_digest(value: str) -> bool:
    """Return whether a text is a SHA-256 in lower-case hex."""
    return _DIGEST.fullmatch(value) is not None


def checked_id(value: str) -> str:
    """Return a valid id unchanged. Raises ValueError with the allowed form if the id is invalid."""
    if not is_id(value):
        raise ValueError(
            "1 to 128 of A-Z a-z 0-9 . _ : / @ + - are allowed, beginning with a letter or digit"
        )
    return value


def checked_digest(value: str) -> str:
    """Return a valid SHA-256 unchanged.

    Raises:
        ValueError: The text has another form. The message has the expected form.
    """
    if not is_digest(value):
        raise ValueError("64 hexadecimal digits (a SHA-256, lower case) are expected")
    return value


def _digest_or_empty(value: str) -> str:
    return checked_digest(value) if value else ""


def _id_or_none(value: str) -> str | None:
    return checked_id(value) if value else None


def _checked_text(value: str) -> str:
    if _CONTROL_CHARACTERS.search(value):
        raise ValueError("control characters are not allowed")
    return value


# The common range of PostgreSQL's integer and the wire's uint32.
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Id = Annotated[str, AfterValidator(checked_id)]
OptionalId = Annotated[str, AfterValidator(_id_or_none)]  # an empty string is stored as NULL
Text = Annotated[str, Field(max_length=256), AfterValidator(_checked_text)]
Digest = Annotated[str, AfterValidator(checked_digest)]
OptionalDigest = Annotated[str, AfterValidator(_digest_or_empty)]
