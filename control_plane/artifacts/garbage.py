"""Decides which unreferenced artifacts to retire, restore or remove; pure.

An artifact is removed in two steps. First it is retired: invisible, but still stored. Some minutes
later, when every transaction of that time has ended, it is checked again: with a new reference it
is restored, else removed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class ArtifactUse:
    """The references to an artifact, and the state of its removal.

    Attributes:
        is_needed: Whether the artifact is pinned, or named by a model, release, base, upload, or an
            adapter on it.
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
    """The digests to change.

    Attributes:
        noticed: Artifacts that have lost their last reference, as of now.
        needed: Artifacts with a new reference: visible again, and their grace time is cleared.
        retired: Artifacts without a reference for the grace time.
        removed: Retired artifacts without a new reference.
    """

    noticed: list[str] = field(default_factory=_none)
    needed: list[str] = field(default_factory=_none)
    retired: list[str] = field(default_factory=_none)
    removed: list[str] = field(default_factory=_none)


def decide(
    uses: Iterable[ArtifactUse], now: datetime, grace: timedelta, settle: timedelta
) -> GarbageDecision:
    """Return the next steps for artifacts.

    Args:
        uses: References of all artifacts.
        now: Time of the database's clock.
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
        state: `kept`; `noticed`: the next sweep finds it unreferenced; `grace`: kept for the grace
            time; `due`: the next sweep takes the next step; `retired`: invisible, still stored.
        at: Earliest time of its retirement (`grace`) or removal (`retired`); else None.
    """

    state: str
    at: datetime | None = None


def fate(use: ArtifactUse, now: datetime, grace: timedelta, settle: timedelta) -> Fate:
    """Return the future decision of `decide` on an artifact, and its time; same arguments."""
    if use.is_needed:
        return Fate("kept")
    if use.retired_at is not None:
        at = use.retired_at + settle
        return Fate("due") if now >= at else Fate("retired", at)
    if use.unreferenced_since is None:
        return Fate("noticed")
    at = use.unreferenced_since + grace
    return Fate("due") if now >= at else Fate("grace", at)
