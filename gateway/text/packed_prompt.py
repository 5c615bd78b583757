"""A long prompt in wire form, packed in the thread that has tokenized it."""

from collections.abc import Sequence

from sluice.wire.router.v1 import router_pb2 as wire

PACKED_AT_ONCE = 4096  # Number of token ids per part, which needs 0.2 ms.


class PackedPrompt:
    """A serialized `Submit` with only the token ids, to be merged into complete `Submit` messages.

    Adding 69,000 ids to a message costs the event loop 3 ms, but merging them only 0.6 ms. The
    packed form is as large as the ids, so it is dropped once all answers have begun. Later
    submissions add the ids one by one.

    Attributes:
        data: Serialized ids, empty once dropped.
    """

    __slots__ = ("_waiting", "data")

    def __init__(self, data: bytes) -> None:
        """Store the result of `packed_ids` for all ids."""
        self.data = data
        self._waiting = 0

    def expect(self, answers: int) -> None:
        """Wait for this many more answers to begin."""
        self._waiting += answers

    def begun(self) -> None:
        """Count an answer that has begun, and drop the data after the last one."""
        self._waiting -= 1
        if self._waiting <= 0:
            self.data = b""


def packed_ids(ids: Sequence[int]) -> bytes:
    """Return ids in the wire form of `Submit`, packed in parts whose bytes are concatenated.

    Other threads can acquire the interpreter lock between two parts.
    """
    parts = range(0, len(ids), PACKED_AT_ONCE)
    return b"".join(
        [wire.Submit(prompt=ids[at : at + PACKED_AT_ONCE]).SerializeToString() for at in parts]
    )
