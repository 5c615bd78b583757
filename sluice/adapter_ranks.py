"""The largest rank of adapters that a replica serves, by its engine and its options. Pure.

Engines read their defaults from the same table (`sluice.engines`), so the control plane and the
engines refuse the same ranks.
"""

from collections.abc import Mapping

from sluice.engines import ENGINES, AdapterRoom

RANK, SLOTS = "adapter_rank", "adapter_slots"  # names of engine options
RANK_MAX = 1024  # largest rank that the option permits


def adapter_room(engine: str) -> AdapterRoom:
    """Return the default room for adapters of an engine that takes adapters."""
    room = ENGINES[engine].adapters
    assert room is not None, f"{engine} takes no adapters"
    return room


def adapter_rank_max(engine: str, options: Mapping[str, str]) -> int | None:
    """Return the largest served rank, 0 without adapters, or None without a rule.

    Args:
        engine: Name of the engine.
        options: Engine options of the replica's pool. A value that is no number counts as missing.
    """
    kind = ENGINES.get(engine)
    if kind is None or kind.adapters is None:
        return None
    room = kind.adapters
    slots, rank = _number(options, SLOTS, room.slots), _number(options, RANK, room.rank)
    return rank if slots else 0


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    given = options.get(name, "")
    return int(given) if given.isdecimal() else default
