"""A bounded cache of golden prompt messages, so that each message is built once for all nodes."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from control_plane.quality.askings import Asking
from sluice.wire.agent.v1 import agent_pb2 as wire

_SETS_MAX = 4096  # largest number of cached sets of bases
# Largest number of bytes of all cached messages. The least recently used sets are dropped first.
_BYTES_MAX = 64 << 20
_SET_BYTES = 1024  # bytes that a set counts in addition to its messages
_FIELD_BYTES = 256  # bytes that a message object counts in addition to its serialized size

Bases = frozenset[str]


@dataclass(slots=True)
class _SharedMessage:
    """A message, with the number of sets that contain the message."""

    asking: Asking
    message: wire.GoldenPrompt
    size: int
    users: int = 0


@dataclass(slots=True)
class _Set:
    """The messages of one round for nodes with one set of bases."""

    round: int
    shared: list[_SharedMessage]
    messages: list[wire.GoldenPrompt] = field(default_factory=list[wire.GoldenPrompt])


class Messages:
    """The cached messages for nodes, by the nodes' set of bases.

    Attributes:
        size: Bytes of all cached messages, with the allowances of `_SET_BYTES` and `_FIELD_BYTES`.
    """

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self.size = 0
        self._bytes_max = bytes_max
        self._sets: dict[Bases, _Set] = {}  # in the order of last use, the oldest use first
        self._shared: dict[str, _SharedMessage] = {}

    def of(
        self, bases: Bases, round_: int, choose: Callable[[], Iterable[Asking]]
    ) -> list[wire.GoldenPrompt]:
        """Return the messages of a round for nodes with the given bases.

        Without a change, repeated calls return the same list object, which callers must not change.

        Args:
            bases: Bases of the nodes.
            round_: Number of the round.
            choose: Returns the golden prompts of the round. It is called if the messages are not
                cached.
        """
        known = self._sets.pop(bases, None)
        if known is None or known.round != round_:
            known = self._made(known, round_, choose())
        self._sets[bases] = known
        while len(self._sets) > 1 and (self.size > self._bytes_max or len(self._sets) > _SETS_MAX):
            self._release(self._sets.pop(next(iter(self._sets))))
        return known.messages

    def forget(self, bases: AbstractSet[str]) -> None:
        """Drop the messages for nodes with at least one of the given bases."""
        for key in [key for key in self._sets if not bases.isdisjoint(key)]:
            self._release(self._sets.pop(key))

    def _made(self, before: _Set | None, round_: int, askings: Iterable[Asking]) -> _Set:
        made = _Set(round_, [self._use(asking) for asking in askings])
        self.size += _SET_BYTES
        if before is not None:
            self._release(before)
            if _are_same(made.shared, before.shared):
                made.messages = before.messages
                return made
        made.messages = [one.message for one in made.shared]
        return made

    def _use(self, asking: Asking) -> _SharedMessage:
        shared = self._shared.get(asking.id)
        if shared is None or shared.asking != asking:
            message = asking.wire()
            shared = _SharedMessage(asking, message, message.ByteSize() + _FIELD_BYTES)
            self._shared[asking.id] = shared
        if shared.users == 0:
            self.size += shared.size
        shared.users += 1
        return shared

    def _release(self, of: _Set) -> None:
        self.size -= _SET_BYTES
        for shared in of.shared:
            shared.users -= 1
            if shared.users == 0:
                self.size -= shared.size
                if self._shared.get(shared.asking.id) is shared:
                    del self._shared[shared.asking.id]


def _are_same(some: Sequence[_SharedMessage], others: Sequence[_SharedMessage]) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )
