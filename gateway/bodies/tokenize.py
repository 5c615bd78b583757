"""The bodies of the requests that turn text into token ids and back. Pure."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gateway.bodies.fields import Flag, ModelName, Text
from gateway.bodies.messages import (
    MESSAGES_MAX,
    TOOLS_MAX,
    Message,
    Tool,
    check_messages,
    in_order_of_calls,
)
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Body, parse
from gateway.bodies.prompts import Ids, check_ids


class TokenizeRequest(Body):
    """A text, or a chat that the model's template renders, to be turned into token ids.

    Attributes:
        add_special_tokens: Whether the tokenizer adds special tokens to a text, as it does to a
            prompt. The default is yes. A chat has only the special tokens of its template.
    """

    model: ModelName
    prompt: Text | None = None
    messages: (
        Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)]
        | None
    ) = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=TOOLS_MAX)] | None = None
    add_special_tokens: Flag | None = None

    @property
    def shown_messages(self) -> Sequence[Message]:
        """The turns for the template."""
        return in_order_of_calls(self.messages or ())

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools for the template."""
        return self.tools or ()

    def check(self) -> None:
        """Raise BadRequestError unless the body has either a text or a valid chat."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_value("prompt", "send either 'prompt' or 'messages'")
        if self.messages is None and self.tools:
            raise bad_value("tools", "they need 'messages'")
        if self.messages is not None:
            check_messages(self.messages)
            self._check_whole(self.messages)
            if self.add_special_tokens:
                raise bad_value("add_special_tokens", "it needs 'prompt'")

    def _check_whole(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            if message.compaction is not None:
                text = "a compacted chat is counted by its completion; leave it out"
                raise bad_value(f"messages[{index}].compaction", text)


class DetokenizeRequest(Body):
    """Token ids to be turned into text."""

    model: ModelName
    tokens: Ids

    def check_vocabulary(self, size: int) -> None:
        """Raise BadRequestError if a token id is not below `size`, the number of tokens."""
        check_ids("tokens", self.tokens, size)


def parse_tokenize_request(body: bytes) -> TokenizeRequest:
    """Return the request in `body`, or raise BadRequestError with the name of the wrong field."""
    return parse(TokenizeRequest, body)


def parse_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Return the request in `body`, or raise BadRequestError with the name of the wrong field."""
    return parse(DetokenizeRequest, body)
