"""The largest rank of adapters that a replica serves, by its engine and its options. Pure.

Engines read their defaults from this table, so the control plane and the engines refuse the same
ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

RANK, SLOTS = "adapter_rank", "adapter_slots"  # names of engine options
RANK_MAX = 1024  # largest rank that the option permits


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """An engine's default room for adapters.

    Attributes:
        slots: Most adapters in one batch, or 0 if no adapters are served.
        rank: Largest rank of an adapter.
    """

    slots: int
    rank: int


OPENVINO = AdapterRoom(slots=8, rank=16)
SIM = AdapterRoom(slots=8, rank=64)
TRTLLM = AdapterRoom(slots=0, rank=64)
_ROOMS: Mapping[str, AdapterRoom] = {"openvino": OPENVINO, "sim": SIM, "trtllm": TRTLLM}


def adapter_rank_max(engine: str, options: Mapping[str, str]) -> int | None:
    """Return the largest served rank, 0 without adapters, or None for an unknown engine.

    Args:
        engine: Name of the engine.
        options: Engine options of the replica's pool. A value that is no number counts as missing.
    """
    room = _ROOMS.get(engine)
    if room is None:
        return None
    slots, rank = _number(options, SLOTS, room.slots), _number(options, RANK, room.rank)
    return rank if slots else 0


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    given = options.get(name, "")
    return int(given) if given.isdecimal() else default
