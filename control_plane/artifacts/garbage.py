"""Decides which unreferenced artifacts to retire, restore or remove. Pure.

An artifact is removed in two steps. First it is retired: invisible, but still stored. Some minutes
later, when every transaction of that time has ended, it is checked again. If it has a new reference
by then, it is restored; otherwise it is removed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class ArtifactUse:
    """The references to an artifact, and the state of its removal.

    Attributes:
        is_needed: Whether the artifact is pinned, or is referenced by a model, a release, a base,
            an upload, or an adapter on it.
        unreferenced_since: Time at which the artifact was first found without a reference; None: it
            was not.
        retired_at: Time of the retirement; None: the artifact is not retired.
    """

    digest: str
    is_needed: bool
    unreferenced_since: datetime | None
    retired_at: datetime | None


def _none() -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class GarbageDecision:
    """The digests of the artifacts whose state changes.

    Attributes:
        noticed: Artifacts that were now first found without a reference.
        needed: Artifacts with a new reference, which become visible again; their grace time is
            reset.
        retired: Artifacts that had no reference for the grace time.
        removed: Retired artifacts that got no new reference.
    """

    noticed: list[str] = field(default_factory=_none)
    needed: list[str] = field(default_factory=_none)
    retired: list[str] = field(default_factory=_none)
    removed: list[str] = field(default_factory=_none)


def decide(
    uses: Iterable[ArtifactUse], now: datetime, grace: timedelta, settle: timedelta
) -> GarbageDecision:
    """Return the next changes for artifacts.

    Args:
        uses: References and states of all artifacts.
        now: Present time of the database's clock.
        grace: Time for which an unreferenced artifact stays visible.
        settle: Time between retirement and removal, longer than any transaction.
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
    """The next step of an artifact's removal if its references do not change.

    Attributes:
        state: `kept` if it is needed; `noticed` if the next sweep will find it unreferenced;
            `grace` during the grace time; `due` if the next sweep will change its state; `retired`
            if it is invisible and still stored.
        at: Earliest time of retirement (`grace`) or removal (`retired`); None in other states.
    """

    state: str
    at: datetime | None = None


def fate(use: ArtifactUse, now: datetime, grace: timedelta, settle: timedelta) -> Fate:
    """Return the next step that `decide` will take on an artifact, for the same arguments."""
    if use.is_needed:
        return Fate("kept")
    if use.retired_at is not None:
        at = use.retired_at + settle
        return Fate("due") if now >= at else Fate("retired", at)
    if use.unreferenced_since is None:
        return Fate("noticed")
    at = use.unreferenced_since + grace
    return Fate("due") if now >= at else Fate("grace", at)
