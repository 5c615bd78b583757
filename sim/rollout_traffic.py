"""Generated traffic of a model in rollout, with tenants, sessions, daily drift and incidents.

Requests of a session are alike, tenants differ, load and errors change with the hour, and sometimes
all requests fail for a while. The gates must not mistake any of these effects for a difference
between the two releases.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from control_plane.rollouts.evidence import Arm, Histogram, ScoreEvidence
from sluice.buckets import BUCKETS
from sluice.errors import ErrorCode
from sluice.split import ReleaseSplit

WINDOW_S = 10.0
_DAY_S = 86_400.0
_TENANTS = 40
_SESSIONLESS = 0.1  # share of requests that name no session
_TURNS_MEAN = 8.0
_SESSION_S = 180.0  # mean duration of a session, approximately
_TENANT_SPREAD = 0.5  # standard deviation of a logarithm, as are the following spreads
_TTFT_SPREAD = 0.9
_TPOT_SPREAD = 0.3
_LENGTH_SPREAD = 0.7
_SURPRISAL_SPREAD = 0.5
_ENTROPY_SPREAD = 0.5
_SCORES_MAX = 10  # most scores per window and arm, one per second of one gateway worker
_GOLDEN_RUNS = 2  # answers to golden prompts per window and arm
_DEADLINE_MS = 30_000.0
_OVERLOADED = 0.02  # share of requests refused for overload, then the share abandoned by clients
_CLOSED = 0.01
_INCIDENT_EVERY_S = 3_600.0
_INCIDENT_S = 30.0
_INCIDENT_ERRORS = 0.25

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SimRelease:
    """The behaviour of a release. Latencies and lengths are medians of lognormal distributions."""

    ttft_ms: float = 300.0
    tpot_us: float = 20_000.0
    output_tokens: float = 200.0
    errors: float = 0.01
    refusals: float = 0.02
    empty: float = 0.002
    repetitive: float = 0.01
    cut: float = 0.05
    base_like: float = 0.03
    surprisal_mnats: float = 3_000.0
    entropy_mnats: float = 500.0
    golden_wrong: float = 0.005


CONTROL = SimRelease()


@dataclass(frozen=True, slots=True)
class TrafficProfile:
    """The parameters of the traffic.

    Attributes:
        rate: Requests per second, mean over the day.
        session_spread: Sigma of the logarithm of a session's median length.
        counts_every_turn: Whether every request and answer of a session is counted. Otherwise, only
            the first request in a window and the first answer of the session are counted.
    """

    rate: float = 60.0
    session_spread: float = 0.4
    counts_every_turn: bool = False


@dataclass(slots=True)
class _Callers:
    """The properties and releases of requests or sessions, as arrays by index.

    Attributes:
        style: Factor on the lengths of answers.
        is_canary: Whether canary answers the request.
        is_pinned: Whether the tenant of the request is pinned.
        is_new: Whether the session has no earlier answer of the same release.
    """

    style: _Floats
    is_canary: NDArray[np.bool_]
    is_pinned: NDArray[np.bool_]
    is_new: NDArray[np.bool_]


class Traffic:
    """Generates the requests of one seed, window by window."""

    def __init__(self, profile: TrafficProfile, seed: int) -> None:
        self._profile = profile
        self._draw = draw = np.random.default_rng(seed)
        self._flaws = np.random.default_rng((seed, 1))
        self._scored = np.random.default_rng((seed, 2))
        self._time_s = draw.uniform(0, _DAY_S)
        weights = 1 / np.arange(1, _TENANTS + 1)
        self._weights = weights / weights.sum()
        self._tenant_style = draw.lognormal(0, _TENANT_SPREAD, _TENANTS)
        self._incident_left_s = 0.0
        self._named = 0
        slots = max(10, round(profile.rate * (1 - _SESSIONLESS) * _SESSION_S / _TURNS_MEAN))
        self._names = [self._name() for _ in range(slots)]
        self._tenants = self._some_tenants(slots)
        self._styles = draw.lognormal(0, profile.session_spread, slots)
        nobody = np.zeros(0, np.bool_)
        self._sessions = _Callers(np.zeros(0), nobody, nobody, nobody)
        self._split: ReleaseSplit | None = None

    def window(
        self, split: ReleaseSplit, mirrored: int, canary: SimRelease
    ) -> tuple[Arm, Arm, int]:
        """Return ten seconds' outcomes in canary and in control, and the requests sent to canary.

        Args:
            split: Split between the releases by which requests are sent.
            mirrored: Share of the requests that are copied to canary, in basis points.
            canary: Behaviour of the new release. The old release behaves as `CONTROL`.
        """
        self._time_s += WINDOW_S
        day = float(np.sin(self._time_s / _DAY_S * 2 * np.pi))
        count = int(self._draw.poisson(self._profile.rate * WINDOW_S * (1 + 0.5 * day)))
        callers, exposed = self._callers(split, count)
        drift = 1 + 0.5 * day
        errors_too = self._incident()
        is_canary = callers.is_canary
        control = self._arm(CONTROL, callers, ~is_canary, drift, errors_too)
        if mirrored:
            is_canary = self._draw.random(len(is_canary)) < mirrored / 10_000
        return self._arm(canary, callers, is_canary, drift, errors_too), control, exposed

    def _incident(self) -> float:
        """Return the share of requests that fail now under any release."""
        self._incident_left_s -= WINDOW_S
        if self._draw.random() < WINDOW_S / _INCIDENT_EVERY_S:
            self._incident_left_s = self._draw.exponential(_INCIDENT_S)
        return _INCIDENT_ERRORS if self._incident_left_s > 0 else 0.0

    def _callers(self, split: ReleaseSplit, count: int) -> tuple[_Callers, int]:
        """Return the compared requests, and the number of unpinned requests sent to canary."""
        draw = self._draw
        alone = int(draw.binomial(count, _SESSIONLESS))
        turns = draw.integers(len(self._names), size=count - alone)
        self._renew(split, draw.integers(len(self._names), size=round(len(turns) / _TURNS_MEAN)))
        tenants = self._some_tenants(alone)
        spread = self._profile.session_spread
        single = _sent(
            split,
            tenants,
            [("", self._name()) for _ in range(alone)],
            draw.lognormal(0, spread, alone) * self._tenant_style[tenants],
        )
        exposed = np.count_nonzero(single.is_canary & ~single.is_pinned) + np.count_nonzero(
            (self._sessions.is_canary & ~self._sessions.is_pinned)[turns]
        )
        if not self._profile.counts_every_turn:
            turns = np.unique(turns)
        together = _joined(single, self._sessions, turns)
        if not self._profile.counts_every_turn:
            self._sessions.is_new[turns] = False
        return together, int(exposed)

    def _renew(self, split: ReleaseSplit, ended: NDArray[np.int64]) -> None:
        """Replace ended sessions, and reassign all sessions after a change of the split."""
        self._tenants[ended] = self._some_tenants(len(ended))
        self._styles[ended] = self._draw.lognormal(0, self._profile.session_spread, len(ended))
        for slot in ended:
            self._names[slot] = self._name()
        slots = range(len(self._names)) if split != self._split else ended
        tenants = self._tenants[slots]
        sent = _sent(
            split,
            tenants,
            [(self._names[slot], "") for slot in slots],
            self._styles[slots] * self._tenant_style[tenants],
        )
        if split != self._split:
            if self._split is not None:
                has_stayed = sent.is_canary == self._sessions.is_canary
                has_stayed[ended] = False
                sent.is_new[has_stayed] = self._sessions.is_new[has_stayed]
            self._split, self._sessions = split, sent
            return
        self._sessions.style[ended] = sent.style
        self._sessions.is_canary[ended] = sent.is_canary
        self._sessions.is_pinned[ended] = sent.is_pinned
        self._sessions.is_new[ended] = True

    def _arm(
        self,
        release: SimRelease,
        callers: _Callers,
        is_own: NDArray[np.bool_],
        drift: float,
        errors_too: float,
    ) -> Arm:
        draw, style = self._draw, callers.style[is_own]
        requests = len(style)
        fate = draw.random(requests)
        failing = min(1.0, release.errors * drift + errors_too)
        is_overloaded = fate < _OVERLOADED
        is_closed = ~is_overloaded & (fate < _OVERLOADED + _CLOSED)
        is_failed = ~is_overloaded & ~is_closed & (draw.random(requests) < failing)
        ttft_ms = draw.lognormal(0, _TTFT_SPREAD, requests) * release.ttft_ms * drift
        is_served = ~(is_overloaded | is_closed | is_failed)
        is_late = is_served & (ttft_ms > _DEADLINE_MS)
        answered = is_served & ~is_late
        first = answered & callers.is_new[is_own]
        answers = int(np.count_nonzero(first))
        tokens = draw.lognormal(0, _LENGTH_SPREAD, requests) * release.output_tokens * style
        tpot_us = draw.lognormal(0, _TPOT_SPREAD, requests) * release.tpot_us * drift**0.5
        errors = {
            ErrorCode.OVERLOADED: int(np.count_nonzero(is_overloaded)),
            ErrorCode.CLIENT_CLOSED: int(np.count_nonzero(is_closed)),
            ErrorCode.ENGINE_FAILED: int(np.count_nonzero(is_failed)),
            ErrorCode.DEADLINE_EXCEEDED: int(np.count_nonzero(is_late)),
        }
        return Arm(
            requests,
            errors,
            first_answers=answers,
            refusals=int(draw.binomial(answers, release.refusals)),
            empty_answers=int(self._flaws.binomial(answers, release.empty)),
            repetitive_answers=int(self._flaws.binomial(answers, release.repetitive)),
            cut_answers=int(self._flaws.binomial(answers, release.cut)),
            ttft_ms=histogram(ttft_ms[answered]),
            tpot_us=histogram(tpot_us[answered]),
            output_tokens=histogram(tokens[first]),
            scores=self._scores(release, min(answers, _SCORES_MAX)),
            golden_runs=_GOLDEN_RUNS,
            golden_mismatches=int(draw.binomial(_GOLDEN_RUNS, release.golden_wrong)),
        )

    def _scores(self, release: SimRelease, answers: int) -> ScoreEvidence:
        draw = self._scored
        surprisal = draw.lognormal(0, _SURPRISAL_SPREAD, answers) * release.surprisal_mnats
        entropy = draw.lognormal(0, _ENTROPY_SPREAD, answers) * release.entropy_mnats
        base_like = int(draw.binomial(answers, release.base_like))
        return ScoreEvidence(answers, base_like, histogram(surprisal), histogram(entropy))

    def _some_tenants(self, count: int) -> NDArray[np.int64]:
        return self._draw.choice(_TENANTS, count, p=self._weights)

    def _name(self) -> str:
        self._named += 1
        return str(self._named)


def histogram(values: _Floats) -> Histogram:
    """Return the histogram of values, with the buckets of `bucket_of`."""
    places = np.minimum(np.log2(np.maximum(values, 1.0)) * 4, BUCKETS - 1).astype(np.int64)
    return Histogram(tuple(np.bincount(places, minlength=BUCKETS).tolist()))


def tenant_id(number: int) -> str:
    """Return the id of a tenant, of which number 0 has the most requests."""
    return f"tenant-{number}"


def _sent(
    split: ReleaseSplit, tenants: NDArray[np.int64], names: list[tuple[str, str]], style: _Floats
) -> _Callers:
    """Return the release of each request, where `names` are session and request id."""
    choices = [
        split.choose(tenant_id(tenant), *name)
        for tenant, name in zip(tenants.tolist(), names, strict=True)
    ]
    return _Callers(
        style,
        np.array([choice.is_canary for choice in choices], np.bool_),
        np.array([choice.is_pinned for choice in choices], np.bool_),
        np.ones(len(choices), np.bool_),
    )


def _joined(single: _Callers, sessions: _Callers, turns: NDArray[np.int64]) -> _Callers:
    """Return the requests with and without a session together, without pinned tenants."""
    style = np.concatenate((single.style, sessions.style[turns]))
    is_canary = np.concatenate((single.is_canary, sessions.is_canary[turns]))
    is_new = np.concatenate((single.is_new, sessions.is_new[turns]))
    is_drawn = ~np.concatenate((single.is_pinned, sessions.is_pinned[turns]))
    drawn = style[is_drawn], is_canary[is_drawn], ~is_drawn[is_drawn], is_new[is_drawn]
    return _Callers(*drawn)
