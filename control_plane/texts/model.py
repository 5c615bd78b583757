"""A tenant's policy on the storage of prompts and answers, and on their redaction. Pure."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from control_plane.fields import AdminBody
from control_plane.percent import Percent

RETENTION_DAYS_MAX = 365
WORDS_MAX = 100


class RedactedText(StrEnum):
    """The kinds of text that gateways redact (`gateway.texts.redaction`)."""

    EMAIL = "email"
    PHONE = "phone"
    CARD = "card"
    IBAN = "iban"
    IP = "ip"
    SECRET = "secret"  # noqa: S105 - the name of a class


_ALWAYS = (RedactedText.CARD, RedactedText.SECRET)


def _with_those_that_always_go(values: list[RedactedText]) -> list[str]:
    return sorted({str(value) for value in (*values, *_ALWAYS)})


def _all() -> list[RedactedText]:
    return list(RedactedText)


def _once(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _none() -> list[str]:
    return []


def _checked_word(value: str) -> str:
    if value != value.strip() or "\0" in value:
        raise ValueError("a word without blanks around it is expected")
    return value


class TextPolicyBody(AdminBody):
    """Whether prompts and answers of a tenant are stored.

    The texts of `share_percent` of the tenant's requests are stored. The requests' ids determine
    which requests are chosen. Texts are deleted after `retention_days`. `redacted` names the kinds
    of text that the gateway removes before it stores a text. Secrets and numbers of payment cards
    are always removed. `words` are removed everywhere, in upper or lower case.
    """

    is_on: bool = False
    share_percent: Percent = 100.0
    retention_days: Annotated[int, Field(ge=1, le=RETENTION_DAYS_MAX)] = 30
    redacted: Annotated[
        list[Annotated[RedactedText, Field(strict=False)]],
        Field(max_length=16, default_factory=_all),
        AfterValidator(_with_those_that_always_go),
    ]
    words: Annotated[
        list[Annotated[str, Field(min_length=3, max_length=64), AfterValidator(_checked_word)]],
        Field(max_length=WORDS_MAX, default_factory=_none),
        AfterValidator(_once),
    ]
