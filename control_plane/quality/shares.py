"""Divides a node's capacity for golden prompts among the owners of models. Pure.

Capacity is measured in units of 4 KiB, so that 64 units express both limits of 64 prompts and 256
KiB. The platform's own prompts, a few per base, have a reserved part. The owners of models share
the rest. An owner whose need is less than an equal share receives its need, and the other owners
share the remainder.

An asking is a golden prompt for one base and adapter (`Asking`). Prompts that do not fit at the
same time are chosen in turns. A turn is the capacity for one prompt of one owner in one round. The
owners form a ring, as do the prompts of each owner, and a round continues where the previous round
ended. The position follows from the number of the round, so no state is stored. Therefore every
control plane chooses the same prompts. All nodes with the same bases receive the same prompts, so
that their answers can be compared. All releases of a prompt are chosen in the same round, because a
rollout would otherwise compare answers to different prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from control_plane.quality.askings import Asking

NODE_PROMPTS_MAX = 64
NODE_BYTES_MAX = 256 << 10
# Number of prompts per node that are reserved for the platform. If the node's bases have fewer
# platform prompts, owners use the difference.
DEFAULTS_RESERVED = 16
# Duration of a round in seconds. A replica usually answers a prompt every 60 s, so that a round
# suffices for the three answers that a judgement needs.
ROUND_S = 300
_UNIT_BYTES = NODE_BYTES_MAX // NODE_PROMPTS_MAX
_TOKEN_BYTES_MAX = 5  # largest number of bytes of a token id, which is a varint
_FRAME_BYTES = 64  # bytes for numbers, tags and lengths in the message of a prompt
# Largest size of an item in units. Three releases of the longest prompt need 9 units.
_ITEM_UNITS_MAX = 16
_Kind = TypeVar("_Kind")
# While rollouts wait for answers, every fourth turn of an owner is for its other prompts, so that
# these prompts are still run.
_TURNS = 4


@dataclass(frozen=True, slots=True)
class Item:
    """A golden prompt for one base, with one asking (`Asking`) per adapter."""

    askings: tuple[Asking, ...]
    units: int
    is_rollout: bool


def round_of(unix_s: float) -> int:
    """Return the number of the round at a Unix time."""
    return int(unix_s // ROUND_S)


def chosen(
    defaults: Sequence[Asking], items: Mapping[str, Sequence[Item]], round_: int
) -> list[Asking]:
    """Return the askings of a round for a node, the platform's askings first.

    Each of an owner's n prompts is chosen within n * owners / slots + 1 rounds. While a rollout
    waits for some of these prompts, each prompt is chosen within 8 * n * owners / slots + 2 rounds.
    Slots are the turns per round of all owners that need more than an equal share. For example,
    with 1,000 such owners there are 48 to 63 slots, if no prompt is for several releases.

    Args:
        defaults: Askings of the platform for the bases of the node, by id.
        items: Prompts of each owner for the bases of the node, by id.
        round_: Number of the round, from 0.
    """
    wanted = sum(item.units for all_ in items.values() for item in all_)
    most = max(DEFAULTS_RESERVED, NODE_PROMPTS_MAX - wanted)
    count = min(len(defaults), most)
    told = _turn(defaults, round_ * count)[:count]
    room = NODE_PROMPTS_MAX - count
    if wanted <= room:
        picked = [item for all_ in items.values() for item in all_]
    else:
        picked = _shared(items, room, round_)
    rest = [asking for item in picked for asking in item.askings]
    return sorted(told, key=lambda one: one.id) + sorted(rest, key=lambda one: one.id)


def units(asking: Asking) -> int:
    """Return an upper bound of the units that an asking needs."""
    # Ids and digests are ASCII, one byte per character.
    names = len(asking.id) + len(asking.base_digest) + len(asking.adapter_digest)
    size = names + _FRAME_BYTES
    return -(-(size + _TOKEN_BYTES_MAX * len(asking.token_ids)) // _UNIT_BYTES)


def item_of(askings: Sequence[Asking]) -> Item | None:
    """Return a prompt's askings for one base as an item, or None if the prompt is too long."""
    size = sum(units(asking) for asking in askings)
    if size > _ITEM_UNITS_MAX:
        return None
    return Item(tuple(askings), size, any(asking.is_rollout for asking in askings))


def _shared(items: Mapping[str, Sequence[Item]], room: int, round_: int) -> list[Item]:
    """Return the items that fit. The owners' turns are used first, then the remaining units."""
    longest = max(item.units for all_ in items.values() for item in all_)
    slots = room // longest
    large = sorted((owner for owner in items if items[owner]), key=lambda one: len(items[one]))
    picked: list[Item] = []
    while large and len(items[large[0]]) <= slots // len(large):
        slots -= len(items[large[0]])
        picked += items[large.pop(0)]
    large.sort()
    first = round_ * slots
    waiting: list[list[Item]] = []
    for place, owner in enumerate(large):
        before, until = (_turns(at, place, len(large)) for at in (first, first + slots))
        ordered = _ordered(items[owner], before, until - before, slots // len(large), round_)
        picked += ordered[: until - before]
        waiting.append(ordered[until - before :])
    room -= sum(item.units for item in picked)
    return picked + _filled(_turn(waiting, first + slots), room)


def _turns(slots: int, place: int, owners: int) -> int:
    """Return how many of the first `slots` turns belong to the owner at `place` in the ring."""
    return (slots - place + owners - 1) // owners


def _ordered(
    items: Sequence[Item], before: int, count: int, steady: int, round_: int
) -> list[Item]:
    """Return an owner's prompts, beginning with the prompts whose turn it is.

    Args:
        items: All prompts of the owner.
        before: Number of the owner's turns in earlier rounds.
        count: Number of the owner's turns in this round.
        steady: Least number of the owner's turns in any round.
        round_: Number of the round.
    """
    rollouts = [item for item in items if item.is_rollout]
    others = [item for item in items if not item.is_rollout]
    if not rollouts or not others:
        return _turn(items, before)
    # all rollout prompts fit into three quarters of the owner's turns
    if _TURNS * len(rollouts) <= (_TURNS - 1) * steady:
        return rollouts + _turn(others, before - round_ * len(rollouts))
    found: dict[str, Item] = {}
    for turn in range(before, before + count):
        passed, place = divmod(turn, _TURNS)
        is_other = place == _TURNS - 1
        ring, at = (others, passed) if is_other else (rollouts, turn - passed)
        item = ring[at % len(ring)]
        found.setdefault(item.askings[0].id, item)
    for item in (*rollouts, *others):
        found.setdefault(item.askings[0].id, item)
    return list(found.values())


def _filled(waiting: Sequence[Sequence[Item]], room: int) -> list[Item]:
    """Return further items that fit in `room` units, alternating between the owners."""
    found: list[Item] = []
    rings = [iter(all_) for all_ in waiting]
    while rings and room > 0:
        going, rings = rings, []
        for ring in going:
            item = next((item for item in ring if item.units <= room), None) if room > 0 else None
            if item is not None:
                found.append(item)
                room -= item.units
                rings.append(ring)
    return found


def _turn(ring: Sequence[_Kind], start: int) -> list[_Kind]:
    """Return the elements of a ring, beginning at a position."""
    at = start % len(ring) if ring else 0
    return [*ring[at:], *ring[:at]]
