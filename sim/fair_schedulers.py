"""Published fair schedulers, which order the queue of a single engine, to compare with the router.

Each engine decides separately, at its step boundaries. Unlike a router, the engine has exact
counters, and reserves memory by the true length of every answer. Service of a request = its prompt
tokens + 2 x its output tokens.

fcfs      arrival order
lcf       the client with the least service so far
vtc       lcf, with counters of returning clients raised (virtual token counters)
vtc_pred  vtc that charges the client's mean output at admission, and further output as generated
sfq       start-time fair queueing on prompt + mean output
"""

from collections import deque
from collections.abc import Callable

from sim.engines import Engine, Job
from sim.policies.base import ArrivalPolicy
from sim.pool import SimPool

OUTPUT_SERVICE = 2.0
_SMOOTHING = 0.1


class FairScheduler:
    """Chooses the client whose request is admitted next. Subclasses define rank and charge."""

    def __init__(self, output_mean: float) -> None:
        self.queues: dict[str, deque[Job]] = {}  # waiting jobs by client, in order of arrival
        self.counters: dict[str, float] = {}
        self.last_client = ""
        self._prior = output_mean
        self._means: dict[str, float] = {}

    def expected(self, client: str) -> float:
        """Return the mean output tokens of a client's finished jobs."""
        return self._means.get(client, self._prior)

    def push(self, job: Job) -> None:
        """Queue a job."""
        client = job.request.tenant
        if not self.queues.get(client):
            self.returns(client)
        self.queues.setdefault(client, deque()).append(job)

    def head(self) -> Job | None:
        """Return the job to admit next, or None if no job waits."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        return min(heads, key=lambda job: (self.rank(job), job.arrived_at), default=None)

    def pop(self, job: Job) -> None:
        """Remove an admitted job from its queue, and charge its prompt."""
        client = job.request.tenant
        self.queues[client].popleft()
        self.last_client = client
        self.admitted(job)

    def done(self, job: Job) -> None:
        """Update the client's mean output with a finished job."""
        client, output = job.request.tenant, job.request.output_tokens
        mean = self._means.get(client, output)
        self._means[client] = mean + _SMOOTHING * (output - mean)

    def charge(self, client: str, service: float) -> None:
        """Add service to a client's counter."""
        self.counters[client] = self.counters.get(client, 0.0) + service

    def rank(self, job: Job) -> float:
        """Return the rank of a client's first job. The job with the least rank is admitted next."""
        return self.counters.get(job.request.tenant, 0.0)

    def returns(self, client: str) -> None:
        """Record that an idle client has a waiting job again."""

    def admitted(self, job: Job) -> None:
        """Charge the prompt of an admitted job. Subclasses may charge differently."""
        self.charge(job.request.tenant, job.request.prompt_tokens)

    def generated(self, job: Job, before: int, tokens: int) -> None:
        """Charge the output tokens of a job after the first `before`, up to the first `tokens`."""
        self.charge(job.request.tenant, OUTPUT_SERVICE * (tokens - before))


class Fcfs(FairScheduler):
    """First come, first served, by the time of arrival."""

    def rank(self, job: Job) -> float:
        """Return the time of the job's arrival."""
        return job.arrived_at


class Vtc(FairScheduler):
    """Least counter first.

    A returning client's counter is raised to the least counter of the waiting clients.
    """

    def returns(self, client: str) -> None:
        """Raise the counter of a returning client to the least counter of the waiting clients."""
        others = [name for name, queue in self.queues.items() if queue] or [self.last_client]
        least = min(self.counters.get(name, 0.0) for name in others)
        self.counters[client] = max(self.counters.get(client, 0.0), least)


class VtcPredicted(Vtc):
    """VTC that charges the expected output at admission."""

    def __init__(self, output_mean: float) -> None:
        super().__init__(output_mean)
        self._guesses: dict[int, float] = {}

    def admitted(self, job: Job) -> None:
        """Charge the prompt and the expected output of an admitted job."""
        guess = self._guesses[job.number] = self.expected(job.request.tenant)
        service = job.request.prompt_tokens + OUTPUT_SERVICE * guess
        self.charge(job.request.tenant, service)

    def generated(self, job: Job, before: int, tokens: int) -> None:
        """Charge only output tokens beyond the expected output."""
        guess = self._guesses[job.number]
        beyond = max(0.0, tokens - guess) - max(0.0, before - guess)
        self.charge(job.request.tenant, OUTPUT_SERVICE * beyond)


class Sfq(FairScheduler):
    """Start-time fair queueing on expected service."""

    def __init__(self, output_mean: float) -> None:
        super().__init__(output_mean)
        self._now = 0.0  # virtual time
        self._starts: dict[int, float] = {}
        self._finishes: dict[str, float] = {}

    def push(self, job: Job) -> None:
        """Queue a job, with its start and finish tags in virtual time."""
        client = job.request.tenant
        start = max(self._now, self._finishes.get(client, 0.0))
        service = job.request.prompt_tokens + OUTPUT_SERVICE * self.expected(client)
        self._starts[job.number] = start
        self._finishes[client] = start + service
        super().push(job)

    def rank(self, job: Job) -> float:
        """Return the start tag of the job."""
        return self._starts[job.number]

    def admitted(self, job: Job) -> None:
        """Advance virtual time to the start tag of the admitted job."""
        self._now = max(self._now, self._starts[job.number])

    def generated(self, job: Job, before: int, tokens: int) -> None:
        """Charge nothing, because the tags contain the expected output."""


SCHEDULERS: dict[str, Callable[[float], FairScheduler]] = {
    "fcfs": Fcfs,
    "lcf": FairScheduler,
    "vtc": Vtc,
    "vtc_pred": VtcPredicted,
    "sfq": Sfq,
}


class FairEngine(Engine):
    """An engine that admits jobs in the order of its own scheduler."""

    scheduler: FairScheduler
    _charged: dict[int, int]  # charged output tokens of decoding jobs

    @classmethod
    def instead_of(cls, engine: Engine, pool: SimPool, scheduler: FairScheduler) -> "FairEngine":
        """Return a `FairEngine` with the number and the size of an existing engine."""
        made = cls(
            engine.number,
            engine.cost,
            pool.timeline,
            pool,
            block_tokens=engine.block_tokens,
            kv_tokens=engine.cache.capacity * engine.block_tokens,
            speed=engine.speed,
        )
        made.scheduler = scheduler
        made._charged = {}
        return made

    def submit(self, job: Job) -> None:
        """Queue a job in the scheduler instead of the engine's own queue."""
        job.replica = self.number
        self.scheduler.push(job)
        self.held += 1
        self._wake(self._timeline.now)

    def _admit(self) -> None:
        self._charge()
        while (job := self.scheduler.head()) is not None and self.has_room(job):
            self.scheduler.pop(job)
            job.dispatched_at = self._timeline.now
            self.waiting.append(job)
            job.owed = self.uncached(job)
            self.owed_tokens += job.owed
            super()._admit()
            assert not self.waiting, "there was room"

    def _charge(self) -> None:
        """Charge the output tokens of all decoding jobs up to the last step."""
        for job in self.decoding.values():
            self._generated(job, self.steps - job.first_step)

    def _generated(self, job: Job, tokens: int) -> None:
        before = self._charged.get(job.number, 0)
        if tokens > before:
            self._charged[job.number] = tokens
            self.scheduler.generated(job, before, tokens)

    def _finish(self, job: Job, now: float) -> None:
        self._generated(job, job.request.output_tokens - 1)
        self._charged.pop(job.number, None)
        self.scheduler.done(job)
        super()._finish(job, now)


class PerEngine(ArrivalPolicy):
    """Round robin over engines, each with a separate scheduler and counters.

    Args:
        name: One of `SCHEDULERS`.
        output_mean: Expected output tokens of a client without finished jobs.
    """

    def __init__(self, name: str, output_mean: float) -> None:
        self.name = name
        self._output_mean = output_mean
        self._next = 0

    def bind(self, pool: SimPool) -> None:
        """Replace the engines of the pool by engines with schedulers."""
        super().bind(pool)
        make = SCHEDULERS[self.name]
        pool.engines[:] = [
            FairEngine.instead_of(engine, pool, make(self._output_mean)) for engine in pool.engines
        ]

    def pick(self, job: Job) -> int:  # noqa: ARG002 - blind on purpose
        """Return the next engine of the cycle."""
        self._next += 1
        return self.pool.alive[self._next % len(self.pool.alive)]
