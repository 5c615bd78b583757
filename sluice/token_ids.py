"""The wire form of a prompt's token ids: little-endian integers of four bytes.

Protobuf writes and reads a list of integers one by one, which takes milliseconds for 60,000 ids in
each process on their way. Bytes are only copied.
"""

from array import array
from collections.abc import Sequence

ID_BYTES = 4


def packed_ids(ids: Sequence[int]) -> bytes:
    """Return the wire form of ids. Raises OverflowError for an id that needs more than 32 bits."""
    # an array has the byte order of the machine, which is little-endian on all supported ones
    packed = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    return packed.tobytes()


def unpacked_ids(data: bytes) -> "array[int]":
    """Return the ids of a wire form. Raises ValueError if the last id is incomplete."""
    ids = array("I")
    ids.frombytes(data)
    return ids
