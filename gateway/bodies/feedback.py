"""The body of feedback, which is a user's judgement of an answer. Pure."""

import re
from typing import Annotated, Literal

from pydantic import Field

from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Body
from sluice.ids import is_request_id

_OF_EVENT = re.compile(r"(?:chatcmpl-|cmpl-|msg_)([0-9a-f]{32})")
_GOODS = {"good": 1.0, "bad": 0.0}


class FeedbackRequest(Body):
    """A judgement of an answer. `id` is the answer's id or its header `x-request-id`."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    rating: Literal["good", "bad"]

    @property
    def answer(self) -> str:
        """Id of the usage event of the answer, or the id of the request if `id` is one."""
        found = _OF_EVENT.fullmatch(self.id)
        return self.id if found is None else f"evt_{found[1]}"

    @property
    def good(self) -> float:
        """The judgement as a number, 1 for good and 0 for bad."""
        return _GOODS[self.rating]

    def check(self) -> None:
        """Raise BadRequestError if `id` is not the id of an answer."""
        if not is_request_id(self.id):
            raise bad_value("id", "send the id of an answer, or its header 'x-request-id'")
