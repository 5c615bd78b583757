"""Prompts without a chat template: one or several texts or lists of token ids. Pure."""

from collections.abc import Iterable
from typing import Annotated, Any, cast

from pydantic import Discriminator, Field, Tag

from gateway.bodies.fields import Text, TokenId
from gateway.bodies.mistakes import bad_value

INPUTS_MAX = 2048  # maximum number of inputs per embeddings request, equal to OpenAI's

Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


def _form(value: Any) -> str:
    """Return the union's tag for a prompt. Error paths omit it, so no field has this name."""
    if not isinstance(value, list):
        return "a text"
    first: object = value[0] if value else ""
    if isinstance(first, list):
        return "lists of ids"
    return "token ids" if isinstance(first, int) else "texts"


_FilledText = Annotated[Text, Field(min_length=1)]
_Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=INPUTS_MAX)]
_FilledTexts = Annotated[
    list[_FilledText], Field(fail_fast=True, min_length=1, max_length=INPUTS_MAX)
]
_Lists = Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=INPUTS_MAX)]
TextOrIds = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[_Texts, Tag("texts")]
    | Annotated[Ids, Tag("token ids")]
    | Annotated[_Lists, Tag("lists of ids")],
    Discriminator(_form),
]
FilledTextOrIds = Annotated[
    Annotated[_FilledText, Tag("a text")]
    | Annotated[_FilledTexts, Tag("texts")]
    | Annotated[Ids, Tag("token ids")]
    | Annotated[_Lists, Tag("lists of ids")],
    Discriminator(_form),
]


def listed(given: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """Return the given texts or id lists as a list, even if only one is given."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [cast("list[int]", given)]
    return cast("list[str] | list[list[int]]", given)


def check_ids(param: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raise BadRequestError if an id is not below `vocabulary`, the number of tokens."""
    largest = max(ids, default=-1)
    if largest >= vocabulary:
        text = f"the model has no token {largest}; its ids end at {vocabulary - 1}"
        raise bad_value(param, text)
