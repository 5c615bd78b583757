"""Decides which unreferenced artifacts to retire, restore or remove; pure.

An artifact goes in two steps. First it is retired: nobody sees it, but all of it is there. Some
minutes later it is looked at again, when everything that was under way has ended: has somebody
begun to refer to it meanwhile, it is restored, else removed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class ArtifactUse:
    """The references to an artifact, and the state of its removal.

    Attributes:
        is_needed: Pinned, or named by a model, release, base, upload, or an adapter on it.
        unreferenced_since: Time at which it was first found without a reference; None: not yet.
        retired_at: Time of its retirement; None: it is not retired.
    """

    digest: str
    is_needed: bool
    unreferenced_since: datetime | None
    retired_at: datetime | None


def _none() -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class GarbageDecision:
    """Digests of what changes.

    Attributes:
        noticed: Are not needed, as of now.
        needed: Are needed again: visible, and with no time counted.
        retired: Have not been needed for the grace time.
        removed: Were retired, and nobody came.
    """

    noticed: list[str] = field(default_factory=_none)
    needed: list[str] = field(default_factory=_none)
    retired: list[str] = field(default_factory=_none)
    removed: list[str] = field(default_factory=_none)


def decide(
    uses: Iterable[ArtifactUse], now: datetime, grace: timedelta, settle: timedelta
) -> GarbageDecision:
    """Return what to do with artifacts.

    Args:
        uses: All there are.
        now: Time by the clock that wrote theirs.
        grace: Time for which an unneeded artifact is kept as it is.
        settle: Time between retirement and removal; longer than any transaction.
    """
    decision = GarbageDecision()
    for use in uses:
        if use.is_needed:
            if use.unreferenced_since is not None or use.retired_at is not None:
                decision.needed.append(use.digest)
        elif use.retired_at is not None:
            if now - use.retired_at >= settle:
                decision.removed.append(use.digest)
        elif use.unreferenced_since is None:
            decision.noticed.append(use.digest)
        elif now - use.unreferenced_since >= grace:
            decision.retired.append(use.digest)
    return decision


@dataclass(frozen=True, slots=True)
class Fate:
    """The next step of an artifact's removal if nothing changes.

    Attributes:
        state: `kept`; `noticed`: the next sweep sees that nobody needs it; `grace`: it is kept for
            the grace time; `due`: the next sweep goes on with it; `retired`: invisible, and whole.
        at: Time at which it is retired (`grace`) or removed (`retired`) at the earliest; else None.
    """

    state: str
    at: datetime | None = None


def fate(use: ArtifactUse, now: datetime, grace: timedelta, settle: timedelta) -> Fate:
    """Return what `decide` will make of an artifact, and when; the arguments are its own."""
    if use.is_needed:
        return Fate("kept")
    if use.retired_at is not None:
        at = use.retired_at + settle
        return Fate("due") if now >= at else Fate("retired", at)
    if use.unreferenced_since is None:
        return Fate("noticed")
    at = use.unreferenced_since + grace
    return Fate("due") if now >= at else Fate("grace", at)
