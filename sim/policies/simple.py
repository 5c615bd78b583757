"""Simple policies, of which some use no state, and others the requests in flight or the session."""

import bisect
import math
import random

from sim.engines import Job
from sim.policies.base import ArrivalPolicy
from sim.pool import SimPool

_RING_POINTS = 100  # points of each replica on the hash ring
_BOUND = 1.25


class RoundRobin(ArrivalPolicy):
    """Chooses the replicas one after another, in a cycle."""

    name = "round_robin"
    _turn = -1

    def pick(self, job: Job) -> int:  # noqa: ARG002
        """Return the next replica of the cycle."""
        self._turn += 1
        return self.pool.alive[self._turn % len(self.pool.alive)]


class Random(ArrivalPolicy):
    """Chooses a random replica."""

    name = "random"

    def pick(self, job: Job) -> int:  # noqa: ARG002
        """Return a random live replica."""
        return self.random.choice(self.pool.alive)


class LeastRequests(ArrivalPolicy):
    """Chooses the replica with the fewest requests in flight."""

    name = "least_requests"

    def pick(self, job: Job) -> int:  # noqa: ARG002
        """Return the live replica with the fewest requests in flight."""
        return self.smallest(self.in_flight)


class PowerOfTwo(ArrivalPolicy):
    """Draws two replicas and chooses the one with fewer requests in flight."""

    name = "power_of_two"

    def pick(self, job: Job) -> int:  # noqa: ARG002
        """Return the better of two random replicas."""
        alive = self.pool.alive
        one, other = self.random.sample(alive, 2) if len(alive) > 1 else (alive[0], alive[0])
        return one if self.in_flight[one] <= self.in_flight[other] else other


class LeastTokens(ArrivalPolicy):
    """Chooses the replica with the fewest prompt tokens in flight.

    The throughput of this policy defines load 1.0.
    """

    name = "least_tokens"

    def bind(self, pool: SimPool) -> None:
        """Begin a run without tokens in flight."""
        super().bind(pool)
        self._tokens = [0] * pool.replicas_max

    def pick(self, job: Job) -> int:
        """Return the replica with the fewest tokens in flight, and add the job's tokens."""
        replica = self.smallest(self._tokens)
        self._tokens[replica] += job.prompt_tokens
        return replica

    def done(self, job: Job) -> None:
        """Subtract the tokens of an ended job."""
        super().done(job)
        self._tokens[job.replica] -= job.prompt_tokens


class SessionSticky(ArrivalPolicy):
    """Sends a conversation to one replica, which had the fewest requests at the first turn."""

    name = "session_sticky"

    def bind(self, pool: SimPool) -> None:
        """Begin a run without sessions."""
        super().bind(pool)
        self._homes: dict[int, int] = {}

    def pick(self, job: Job) -> int:
        """Return the replica of the job's session."""
        session = job.request.session
        home = self._homes.get(session)
        if home is None or home not in self.pool.alive:
            home = self._homes[session] = self.smallest(self.in_flight)
        return home


class BoundedHash(ArrivalPolicy):
    """Consistent hashing of the conversation, with at most 1.25 times the mean load per replica."""

    name = "chwbl"

    def bind(self, pool: SimPool) -> None:
        """Begin a run with the points of all replicas on the hash ring."""
        super().bind(pool)
        draw = random.Random(7)  # noqa: S311 - any fixed ring will do
        self._ring = sorted(
            (draw.random(), replica)
            for replica in range(pool.replicas_max)
            for _ in range(_RING_POINTS)
        )
        self._points = [point for point, _ in self._ring]

    def pick(self, job: Job) -> int:
        """Return the first replica on the ring whose load is below the bound."""
        alive = self.pool.alive
        bound = math.ceil(_BOUND * (sum(self.in_flight) + 1) / len(alive))
        point = random.Random(job.request.session).random()  # noqa: S311 - a hash, nothing more
        start = bisect.bisect(self._points, point)
        for step in range(len(self._ring)):
            replica = self._ring[(start + step) % len(self._ring)][1]
            if replica in alive and self.in_flight[replica] < bound:
                return replica
        return self.smallest(self.in_flight)
