"""Decides which unreferenced artifacts to retire, restore or remove. Pure.

An artifact is removed in two steps. First it is retired, which means invisible but still stored.
Some minutes later, every transaction that ran at the retirement has ended, and the references are
checked again. An artifact with a new reference is restored. Any other is removed.
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
        unreferenced_since: Time at which a sweep first found the artifact without a reference, or
            None while it has one.
        retired_at: Time of the retirement, or None if the artifact is not retired.
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
        noticed: Artifacts that this sweep is the first to find without a reference.
        needed: Artifacts with a new reference, which become visible again. Their grace time is
            reset.
        retired: Artifacts that had no reference for the grace time.
        removed: Retired artifacts without a new reference.
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
        state: `kept` if the artifact is needed, `noticed` before the next sweep marks it as
            unreferenced, and `grace` during the grace time. `due` means that the next sweep will
            retire or remove it, and `retired` means invisible but still stored.
        at: Earliest time of retirement (`grace`) or removal (`retired`), or None in other states.
    """

    state: str
    at: datetime | None = None


def fate(use: ArtifactUse, now: datetime, grace: timedelta, settle: timedelta) -> Fate:
    """Return the next step that `decide` will choose for an artifact."""
    if use.is_needed:
        return Fate("kept")
    if use.retired_at is not None:
        at = use.retired_at + settle
        return Fate("due") if now >= at else Fate("retired", at)
    if use.unreferenced_since is None:
        return Fate("noticed")
    at = use.unreferenced_since + grace
    return Fate("due") if now >= at else Fate("grace", at)
