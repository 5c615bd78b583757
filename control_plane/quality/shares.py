"""Divides a node's room for golden prompts among the owners of models; pure.

Room is counted in units of 4 KiB, so that 64 units are both limits: 64 prompts and 256 KiB. The
platform's own prompts, one per base, have a reserved part. The owners of models share the rest: an
owner that needs less than an equal share gets all it needs, the others share the remainder.

Prompts that do not fit take turns. The owners stand in a ring, and so do the prompts of each; a
round continues where the last one ended. That needs no memory: it follows from the number of the
round. So every control plane computes the same, and all nodes with the same bases get the same
prompts, whose answers are compared. All releases of a prompt are asked in the same round: else a
rollout would compare answers to different prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from control_plane.quality.askings import Asking

NODE_PROMPTS_MAX = 64
NODE_BYTES_MAX = 256 << 10
DEFAULTS_RESERVED = 16  # prompts of a node that are the platform's if it has so many bases
ROUND_S = 300  # long enough for the three answers that are judged, at the usual interval
_UNIT_BYTES = NODE_BYTES_MAX // NODE_PROMPTS_MAX
_TOKEN_BYTES_MAX = 5  # as a varint
_FRAME_BYTES = 64  # numbers, tags and lengths of a prompt's message
_ITEM_UNITS_MAX = 16  # three releases of the longest prompt that was ever allowed need 9
_Kind = TypeVar("_Kind")
# While rollouts are asked about, every fourth turn of an owner is for the other prompts.
_TURNS = 4


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt with all its askings for a base."""

    askings: tuple[Asking, ...]
    units: int
    is_rollout: bool


def round_of(unix_s: float) -> int:
    """Return the number of the round at a time."""
    return int(unix_s // ROUND_S)


def chosen(
    defaults: Sequence[Asking], items: Mapping[str, Sequence[Item]], round_: int
) -> list[Asking]:
    """Return the prompts of a round for a node: the platform's first, then by id.

    Each of an owner's n prompts has its turn within n * owners / slots + 1 rounds; while a rollout
    waits for some of them, within 8 * n * owners / slots + 2. Slots are the common room of the
    owners that need more than an equal share: with 1,000 of them 48 to 63, if no prompt is for
    several releases.

    Args:
        defaults: Platform's askings, by id, for the bases of the node.
        items: Prompts of each owner, by id, for these bases.
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
    """Return the room that an asking takes, at most."""
    # These are made of ASCII: a byte each.
    names = len(asking.id) + len(asking.base_digest) + len(asking.adapter_digest)
    size = names + _FRAME_BYTES
    return -(-(size + _TOKEN_BYTES_MAX * len(asking.token_ids)) // _UNIT_BYTES)


def item_of(askings: Sequence[Asking]) -> Item | None:
    """Return a prompt's askings for one base as an item; None: the prompt is too long."""
    size = sum(units(asking) for asking in askings)
    if size > _ITEM_UNITS_MAX:
        return None
    return Item(tuple(askings), size, any(asking.is_rollout for asking in askings))


def _shared(items: Mapping[str, Sequence[Item]], room: int, round_: int) -> list[Item]:
    """Return the items that fit: first all owners' turns, then more."""
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
    """Return the number of an owner's turns among the first slots."""
    return (slots - place + owners - 1) // owners


def _ordered(
    items: Sequence[Item], before: int, count: int, steady: int, round_: int
) -> list[Item]:
    """Return an owner's prompts, those whose turn it is first.

    Args:
        items: All of the owner's prompts.
        before: Turns of the owner in earlier rounds.
        count: Turns of the owner in this round.
        steady: Least turns of the owner in any round.
        round_: Number of the round.
    """
    rollouts = [item for item in items if item.is_rollout]
    others = [item for item in items if not item.is_rollout]
    if not rollouts or not others:
        return _turn(items, before)
    if _TURNS * len(rollouts) <= (_TURNS - 1) * steady:  # all of them, and room for others
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
    """Return the items that still fit, one of each owner in turn."""
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
    """Return a ring from one of its places on."""
    at = start % len(ring) if ring else 0
    return [*ring[at:], *ring[:at]]
