"""Collects the pieces of an answer's tool calls, as OpenAI streams them. Pure."""

from collections.abc import Callable

from gateway.dialects.delta import CallDelta


class CallWriter:
    """Numbers calls, and collects their pieces (deltas) until `take` returns them.

    Attributes:
        count: Number of calls begun so far.
    """

    __slots__ = ("_deltas", "_new_call_id", "count")

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        """Start before the first call. `new_call_id` returns a new id for each call."""
        self._new_call_id = new_call_id
        self._deltas: list[CallDelta] = []
        self.count = 0

    @property
    def is_waiting(self) -> bool:
        """Whether there are deltas that `take` has not returned yet."""
        return bool(self._deltas)

    def begin(self, name: str) -> None:
        """Begin the next call."""
        self._deltas.append(CallDelta(self.count, "", self._new_call_id(), name))
        self.count += 1

    def extend(self, arguments: str) -> None:
        """Append to the arguments of the latest call."""
        if not arguments:
            return
        last = self._deltas[-1] if self._deltas else CallDelta(self.count - 1)
        self._deltas[-1:] = [last._replace(arguments=last.arguments + arguments)]

    def take(self) -> tuple[CallDelta, ...]:
        """Return the deltas since the previous call of `take`."""
        deltas = tuple(self._deltas)
        self._deltas.clear()
        return deltas
