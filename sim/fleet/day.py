"""The simulated fleet, and a day of its demand and faults, as pure functions of the seed."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, exp, pi

DAY_S = 86_400.0
STEP_S = 5.0
ZONES = 3


@dataclass(frozen=True, slots=True)
class BaseKind:
    """A kind of base, whose replicas have the same cost and boot times.

    Attributes:
        name: Name of the kind.
        cost: Cost model of a replica.
        accelerators: Number of accelerators per replica.
        boot_s: Shortest and longest time of a boot, in seconds.
    """

    name: str
    cost: str
    accelerators: int
    boot_s: tuple[float, float]


KINDS = (
    BaseKind("small", "h100-8b", 1, (90.0, 180.0)),
    BaseKind("large", "h100-70b", 4, (180.0, 300.0)),
)


@dataclass(frozen=True, slots=True)
class FleetDay:
    """The size of the fleet, and the parameters of its day.

    Attributes:
        accelerators: Number of accelerators of the fleet.
        bases: Number of bases, each with a pool. Every fifth base is large.
        adapters: Number of adapters of all bases together.
        tenants: Number of tenants of all bases together.
        peak_rps: Requests per second of all pools at the busiest time, without flash crowds.
        crowds: Number of flash crowds of the day.
        bad_per_hour: Number of replicas that become slow, per hour and thousand replicas.
        seed: Seed of demand, faults and boot times.
        hours: Hours to simulate.
    """

    accelerators: int = 5000
    bases: int = 20
    adapters: int = 10_000
    tenants: int = 50_000
    peak_rps: float = 100_000.0
    crowds: int = 12
    bad_per_hour: float = 1.0
    seed: int = 0
    hours: float = 24.0

    def kind(self, base: int) -> BaseKind:
        """Return the kind of a base."""
        return KINDS[base % 5 == 4]


@dataclass(frozen=True, slots=True)
class Crowd:
    """A flash crowd, which multiplies the demand of a base within half a minute.

    Attributes:
        base: Number of the base.
        from_s: Begin of the crowd, in seconds of the day.
        until_s: End of the crowd, in seconds of the day.
        factor: Factor on the demand.
    """

    base: int
    from_s: float
    until_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class ZoneLoss:
    """The loss of a zone with its replicas and routers, and the zone's return.

    Attributes:
        zone: Number of the zone.
        from_s: Time of the loss, in seconds of the day.
        until_s: Time of the return, in seconds of the day.
    """

    zone: int
    from_s: float
    until_s: float


class DemandOfDay:
    """The demand of each base over the day, in requests per second.

    Attributes:
        crowds: Flash crowds.
        zone_loss: The loss of a zone.
    """

    def __init__(self, day: FleetDay) -> None:
        draw = random.Random(f"day {day.seed}")  # noqa: S311 - repeatable on purpose
        weights = [
            (rank + 1) ** -0.6 * (0.2 if rank % 5 == 4 else 1.0) for rank in range(day.bases)
        ]
        self._shares = [weight / sum(weights) for weight in weights]
        self._peak_rps = day.peak_rps
        self._offsets_s = [draw.uniform(-7200.0, 7200.0) for _ in weights]
        self._noise = [random.Random(f"noise {day.seed} {base}") for base in range(day.bases)]  # noqa: S311
        self._levels = [0.0] * day.bases
        self.crowds = self._crowds(day, draw)
        middle_s = 0.6 * day.hours * 3600
        self.zone_loss = ZoneLoss(
            draw.randrange(ZONES), middle_s, middle_s + 0.05 * day.hours * 3600
        )

    @staticmethod
    def _crowds(day: FleetDay, draw: random.Random) -> tuple[Crowd, ...]:
        found: list[Crowd] = []
        for _ in range(day.crowds):
            begin_s = draw.uniform(0.05, 0.95) * day.hours * 3600
            length_s, factor = draw.uniform(600.0, 1500.0), draw.uniform(1.5, 2.5)
            found.append(Crowd(draw.randrange(day.bases), begin_s, begin_s + length_s, factor))
        return tuple(sorted(found, key=lambda crowd: crowd.from_s))

    def rps(self, base: int, at_s: float) -> float:
        """Return a base's requests per second. Calls must be in order of time."""
        phase = (at_s + self._offsets_s[base]) / DAY_S
        daily = 0.65 - 0.35 * cos(2 * pi * (phase - 0.125))  # quietest at 3:00, busiest at 15:00
        level = self._levels[base] = 0.97 * self._levels[base] + self._noise[base].gauss(0.0, 0.012)
        factor = 1.0
        for crowd in self.crowds:
            if crowd.base == base and crowd.from_s <= at_s < crowd.until_s:
                rise = min(1.0, (at_s - crowd.from_s) / 30.0)
                factor = max(factor, 1.0 + (crowd.factor - 1.0) * rise)
        return self._shares[base] * self._peak_rps * daily * factor * exp(level)


@dataclass(frozen=True, slots=True)
class Moment:
    """A minute of one pool, to be grouped into strata.

    Attributes:
        kind: Name of the kind of the pool's base.
        utilisation: Demand divided by the capacity of the pool's ready replicas.
        requests: Number of requests in the minute.
        has_bad: Whether a replica has just become slow.
    """

    kind: str
    utilisation: float
    requests: float
    has_bad: bool


@dataclass(frozen=True, slots=True)
class Stratum:
    """Moments with the same kind of base, similar utilisation and the same faults.

    Attributes:
        kind: Name of the kind of base.
        utilisation: Mean utilisation of the moments, weighted by requests.
        share: Share of all requests of the day.
        has_bad: Whether a replica is slow.
    """

    kind: str
    utilisation: float
    share: float
    has_bad: bool


EDGES = (0.5, 0.7, 0.8, 0.9, 1.0)


def strata_of(moments: Sequence[Moment]) -> list[Stratum]:
    """Return the strata of a day by kind, utilisation and faults, with shares that add up to 1."""
    groups: dict[tuple[str, int, bool], list[Moment]] = {}
    for moment in moments:
        key = (moment.kind, bisect_right(EDGES, moment.utilisation), moment.has_bad)
        groups.setdefault(key, []).append(moment)
    total = sum(moment.requests for moment in moments)
    found: list[Stratum] = []
    for (kind, _, has_bad), members in sorted(groups.items()):
        requests = sum(moment.requests for moment in members)
        if requests > 0:
            mean = sum(moment.utilisation * moment.requests for moment in members) / requests
            found.append(Stratum(kind, mean, requests / total, has_bad))
    return found
