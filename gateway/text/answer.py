"""A whole answer, assembled from its deltas. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.dialects.delta import AnswerDelta
from gateway.text.logprobs import TokenLogprob


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    arguments: list[str]


@dataclass(slots=True)
class ChoiceText:
    """The text, reasoning and calls of one choice.

    Attributes:
        logprobs: Log probabilities of the content's tokens, empty unless requested.
    """

    logprobs: list[TokenLogprob] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The content of the answer."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The model's reasoning before its answer."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[dict[str, object]]:
        """The tool calls, in OpenAI's form."""
        return [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in self._calls
        ]

    def add(self, delta: AnswerDelta, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add the next delta."""
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.index == len(self._calls):
                self._calls.append(_Call(call.call_id, call.name, []))
            self._calls[call.index].arguments.append(call.arguments)
        self.logprobs += logprobs
