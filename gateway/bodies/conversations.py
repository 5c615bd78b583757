"""The bodies of requests that create and change conversations. Pure."""

from typing import Annotated

from pydantic import Field

from gateway.bodies.fields import Metadata
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Body
from gateway.bodies.response_items import InputItem, ItemReference

_ITEMS_MAX = 20  # maximum number of items per request, equal to OpenAI's
_FewItems = Annotated[list[InputItem], Field(fail_fast=True, max_length=_ITEMS_MAX)]


class ConversationRequest(Body):
    """A new conversation."""

    items: _FewItems | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        """Raise BadRequestError if an item is a reference."""
        _refuse_references(self.items or ())


class MetadataChange(Body):
    """New metadata of a stored object."""

    metadata: Metadata


class AddedItems(Body):
    """Items to add to a conversation."""

    items: Annotated[_FewItems, Field(min_length=1)]

    def check(self) -> None:
        """Raise BadRequestError if an item is a reference."""
        _refuse_references(self.items)


def _refuse_references(items: list[InputItem] | tuple[()]) -> None:
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            raise bad_value(f"items[{index}].type", "send the item itself")
