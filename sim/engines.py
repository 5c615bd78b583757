"""The simulated engine of the routing study, with continuous batching as discrete events.

Each step computes at most `step_tokens_max` tokens. Every decoding request uses one token, and
prompt chunks in order of arrival use the rest. Memory for prompt and output is reserved at
admission. A prompt's blocks can be shared once its prefill has ended. No work is done per token,
because a series of decode-only steps is one event, called a stretch. This engine is fast, and only
counts tokens. `sim.engine` is the small engine that emits token ids for fault tests.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from replica.drivers.sim_costs import CostModel, StepWork
from sim.blocks import BlockCache, SharedPrefixes
from sim.timeline import Timeline
from sim.workload import TraceRequest
from sluice.hashing import BLOCK_TOKENS

STRETCH_STEPS_MAX = 64
_RESUMED_BLOCK = 1 << 62  # least id of blocks with answers, above all ids of a trace
_STARVED_TOKENS = 64  # prompt tokens in a step whose token budget is already full of decodes


class Job:
    """A request and its progress in a run. Times are virtual seconds of the timeline.

    Attributes:
        request: The request of the trace.
        number: Order of arrival, from 0.
        arrived_at: Time of its arrival at the router.
        prompt_tokens: Prompt tokens of the current attempt, which include all tokens emitted before
            it.
        output_tokens: Tokens still to emit in the current attempt.
        blocks: Blocks of the current attempt's prompt.
        sequence: Id of the current attempt on its engine.
        replica: Number of the job's current or last engine, or -1 before the first dispatch.
        hit_tokens: Prompt tokens that the last engine found in its cache.
        emitted: Tokens of earlier attempts, which ended when their replica died.
        dispatched_at: Time of the last dispatch to an engine.
        admitted_at: Time at which the last engine admitted the job to its batch.
        first_at: Time of the first token, or None before it.
        ended_at: Time of the last token, or None before it and for refused jobs.
        computed: Prompt tokens that are computed or cached in the engine.
        owed: Prompt tokens that the engine still has to compute, estimated until admission.
    """

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "blocks",
        "computed",
        "dispatched_at",
        "emitted",
        "ended_at",
        "first_at",
        "first_step",
        "hit_tokens",
        "is_cancelled",
        "matched",
        "number",
        "output_tokens",
        "owed",
        "prompt_tokens",
        "replica",
        "request",
        "reserved",
        "sequence",
    )

    def __init__(self, request: TraceRequest, number: int, arrived_at: float) -> None:
        self.request = request
        self.number = number
        self.arrived_at = arrived_at
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.blocks = request.blocks
        self.sequence = number
        self.replica = -1
        self.hit_tokens = 0
        self.emitted = 0
        self.dispatched_at = self.admitted_at = arrived_at
        self.first_at: float | None = None
        self.ended_at: float | None = None
        # Fields for use by the engine only.
        self.computed = 0
        self.owed = 0
        self.matched = 0
        self.reserved = 0
        self.first_step = -1  # step of the attempt's first token, or -1 before it
        self.is_cancelled = False

    def restart(self, block_tokens: int) -> None:
        """Begin another attempt, in which the emitted tokens are part of the prompt."""
        request = self.request
        self.prompt_tokens = request.prompt_tokens + self.emitted
        self.output_tokens = request.output_tokens - self.emitted
        if self.emitted:
            full = request.prompt_tokens // block_tokens
            more = -(-self.prompt_tokens // block_tokens) - full
            first = _RESUMED_BLOCK + (self.number << 20)
            self.blocks = (*request.blocks[:full], *range(first, first + more))
        self.first_step = -1
        self.is_cancelled = False


class Listener(Protocol):
    """The receiver of an engine's events, at the moment of each event."""

    def on_first(self, job: Job) -> None:
        """Record the first token of an attempt."""
        ...

    def on_done(self, job: Job) -> None:
        """Record the last token of an attempt."""
        ...

    def on_stored(self, replica: int, block: int) -> None:
        """Record a block that other prompts can reuse from now on."""
        ...

    def on_removed(self, replica: int, block: int) -> None:
        """Record a block that a replica has evicted."""
        ...


@dataclass(slots=True)
class StepRecord:
    """An engine's report of one step, or of a stretch of steps that only decoded.

    Attributes:
        steps: Number of steps in the record.
        step_s: Duration of each of these steps.
        prompt_tokens: Prompt tokens computed in the last step.
        decoded: Sequences that received `steps` tokens each.
        admitted: Jobs that were scheduled for the first time since the last record.
        firsts: Jobs whose first token was computed.
        finished: Jobs that ended.
        cancelled: Jobs that were cancelled.
    """

    steps: int
    step_s: float
    prompt_tokens: int
    decoded: list[int]
    admitted: list[Job]
    firsts: list[Job]
    finished: list[Job]
    cancelled: list[Job]


Recorder = Callable[["Engine", StepRecord], None]


class Engine:
    """A simulated replica, with its batch, its KV memory and its step loop.

    Attributes:
        number: Index among the replicas.
        cost: Cost model of the steps at speed 1.
        cache: KV memory.
        waiting: Jobs that are not admitted, oldest first.
        owed_tokens: Uncached prompt tokens of jobs that wait or are in prefill.
        decoding: Jobs that have their first token, by sequence.
        context_tokens: Tokens that the next step's decodes attend to.
        held: Number of jobs in the engine, waiting or running.
        steps: Steps since the start.
        busy_s: Seconds spent in steps.
        prefilled_tokens: Computed prompt tokens.
        decoded_tokens: Emitted tokens, not counting the first token of each request.
        recorder: Called with a `StepRecord` at the end of each step, or stretch.
        stretch_max_s: Longest stretch, in seconds, which is short if a recorder needs frequent
            reports.
    """

    def __init__(
        self,
        number: int,
        cost: CostModel,
        timeline: Timeline,
        listener: Listener,
        *,
        block_tokens: int,
        kv_tokens: int | None = None,
        speed: float = 1.0,
        shared: SharedPrefixes | None = None,
    ) -> None:
        self.number = number
        self.cost = cost
        self.block_tokens = block_tokens
        self.speed = speed
        kv_tokens = kv_tokens or cost.size.blocks * BLOCK_TOKENS
        self.cache = BlockCache(
            kv_tokens // block_tokens,
            on_stored=lambda block: listener.on_stored(number, block),
            on_removed=lambda block: listener.on_removed(number, block),
        )
        self.waiting: deque[Job] = deque()
        self.decoding: dict[int, Job] = {}
        self.owed_tokens = self.context_tokens = self.held = 0
        self.steps = self.prefilled_tokens = self.decoded_tokens = 0
        self.busy_s = 0.0
        self.recorder: Recorder | None = None
        self.stretch_max_s = float("inf")
        self._timeline = timeline
        self._listener = listener
        self._shared = shared
        self._prefilling: deque[Job] = deque()
        self._endings: list[tuple[int, int]] = []  # heap of (last step, sequence)
        self._chunks: list[tuple[Job, int]] = []  # prompt chunks of the running step
        self._is_stepping = False
        self._plan = 0  # number of the planned step end, so that older plans' events are ignored
        self._began_at = self._step_s = 0.0
        self._steps_planned = 0
        self._admitted: list[Job] = []
        self._firsts: list[Job] = []
        self._finished: list[Job] = []
        self._cancelling: list[Job] = []
        self._cancelled: list[Job] = []

    @property
    def running(self) -> int:
        """The number of admitted jobs that are not finished."""
        return len(self.decoding) + len(self._prefilling)

    @property
    def prefilling(self) -> int:
        """The number of admitted jobs whose prompt is not fully computed."""
        return len(self._prefilling)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no job."""
        return not self._is_stepping

    def uncached(self, job: Job) -> int:
        """Return the prompt tokens that the engine would compute for a job now, at least 1."""
        matched = self.cache.match(job.blocks) * self.block_tokens
        return job.prompt_tokens - min(matched, job.prompt_tokens - 1)

    def has_room(self, job: Job) -> bool:
        """Return whether a job would be admitted at once if no other job waited."""
        matched = self._matched(job)
        return self.running < self.cost.size.sequences_max and self.cache.has_room(
            job.blocks[:matched], self._new_blocks(job, matched)
        )

    # --- calls from outside -----------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job, whose first step begins now or after the running step."""
        now = self._timeline.now
        job.replica = self.number
        job.dispatched_at = now
        job.owed = self.uncached(job)
        self.owed_tokens += job.owed
        self.waiting.append(job)
        self.held += 1
        self._wake(now)

    def cancel(self, job: Job) -> None:
        """Cancel a job of this engine. Its memory is released after the running step."""
        job.is_cancelled = True
        self._cancelling.append(job)
        self._wake(self._timeline.now)

    def kill(self) -> list[Job]:
        """Stop like a killed process, and return all jobs, each with its emitted tokens."""
        done = 0
        if self._is_stepping and not self._chunks and self.recorder is None:
            done = int((self._timeline.now - self._began_at) / self._step_s)
        lost = [*self.decoding.values(), *self._prefilling, *self.waiting]
        for job in lost:
            if job.first_step >= 0:
                job.emitted += min(
                    self.steps + done - job.first_step + 1, max(1, job.output_tokens - 1)
                )
        self.cache.clear()
        self.decoding.clear()
        self._prefilling.clear()
        self.waiting.clear()
        self._endings.clear()
        self._chunks.clear()
        for jobs in (self._admitted, self._firsts, self._finished, self._cancelled):
            jobs.clear()
        self._cancelling.clear()
        self.owed_tokens = self.context_tokens = self.held = 0
        self._is_stepping = False
        self._plan += 1
        return lost

    # --- steps ------------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        if not self._is_stepping:
            self._begin(now)
        elif not self._chunks:  # shorten the planned steps to the one that runs
            done = int((now - self._began_at) / self._step_s) + 1
            if done < self._steps_planned:
                self._plan_end(done)

    def _plan_end(self, steps: int) -> None:
        self._steps_planned = steps
        self._plan += 1
        self._timeline.at(self._began_at + steps * self._step_s, self._end, self._plan)

    def _begin(self, now: float) -> None:
        """Begin a step with prompt chunks, or a stretch that only decodes."""
        self._reap()
        self._admit()
        self._is_stepping = True
        self._began_at = now
        if self._prefilling:
            self._step_s = self.cost.step_s(self._fill()) / self.speed
            self._plan_end(1)
        elif self.decoding:
            left = self._endings[0][0] - self.steps
            steps = max(1, min(STRETCH_STEPS_MAX, left))
            decodes = len(self.decoding)
            context = self.context_tokens + decodes * steps / 2  # mean context over the stretch
            work = StepWork(decode_tokens=decodes, decode_context=int(context))
            self._step_s = self.cost.step_s(work) / self.speed
            if self.recorder is not None:
                steps = max(1, min(steps, int(self.stretch_max_s / self._step_s)))
            self._plan_end(steps)
        else:
            self._is_stepping = False
            self._record(0, 0, [])  # confirms a cancel even if no job runs

    def _fill(self) -> StepWork:
        """Choose the prompt chunks of the next step."""
        decodes = len(self.decoding)
        left = self.cost.size.step_tokens_max - decodes
        left = left if left > 0 else _STARVED_TOKENS
        tokens, pairs, context = 0, 0.0, 0
        for job in self._prefilling:
            if left <= 0:
                break
            chunk = min(left, job.prompt_tokens - job.computed)
            self._chunks.append((job, chunk))
            tokens += chunk
            pairs += chunk * (job.computed + chunk / 2)
            context += job.computed
            left -= chunk
        return StepWork(tokens, pairs, context, decodes, self.context_tokens)

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        now = self._timeline.now
        steps, decodes = self._steps_planned, len(self.decoding)
        decoded = list(self.decoding) if self.recorder is not None else []
        self.busy_s += steps * self._step_s
        self.steps += steps
        self.context_tokens += decodes * steps
        self.decoded_tokens += decodes * steps
        for job, chunk in self._chunks:
            job.computed += chunk
            job.owed -= chunk
            self.owed_tokens -= chunk
            self.prefilled_tokens += chunk
            if job.computed >= job.prompt_tokens:
                self._prefilled(job, now)
        prompt_tokens = sum(chunk for _, chunk in self._chunks)
        self._chunks.clear()
        endings = self._endings
        while endings and endings[0][0] <= self.steps:
            job = self.decoding.get(heappop(endings)[1])
            if job is not None:  # None if the job was cancelled
                self._finish(job, now)
        self._reap()
        self._record(steps, prompt_tokens, decoded)
        self._begin(now)

    def _record(self, steps: int, prompt_tokens: int, decoded: list[int]) -> None:
        if self.recorder is None:
            self._admitted.clear()
            self._firsts.clear()
            self._finished.clear()
            self._cancelled.clear()
            return
        if not (steps or self._cancelled or self._finished):
            return
        record = StepRecord(
            *(steps, self._step_s, prompt_tokens, decoded, self._admitted, self._firsts),
            *(self._finished, self._cancelled),
        )
        self._admitted, self._firsts, self._finished, self._cancelled = [], [], [], []
        self.recorder(self, record)

    # --- jobs -------------------------------------------------------------------------------

    def _matched(self, job: Job) -> int:
        """Return the number of leading blocks to reuse, always without the last token's block."""
        longest = (job.prompt_tokens - 1) // self.block_tokens
        return min(self.cache.match(job.blocks), longest)

    def _new_blocks(self, job: Job, matched: int) -> int:
        return len(job.blocks) - matched - (-job.output_tokens // self.block_tokens)

    def _admit(self) -> None:
        """Start waiting jobs, in order, while there is memory for prompt and output."""
        while self.waiting and self.running < self.cost.size.sequences_max:
            job = self.waiting[0]
            matched = self._matched(job)
            new = self._new_blocks(job, matched)
            if not self.cache.has_room(job.blocks[:matched], new):
                return
            self.waiting.popleft()
            self.cache.take(job.blocks[:matched], new)
            job.matched, job.reserved = matched, new
            hit = matched if self._shared is None else self._shared.match(job.blocks)
            job.hit_tokens = min(hit * self.block_tokens, job.prompt_tokens - 1)
            job.computed = job.hit_tokens
            self.owed_tokens -= job.owed
            job.owed = job.prompt_tokens - job.hit_tokens
            self.owed_tokens += job.owed
            job.admitted_at = self._timeline.now
            self._prefilling.append(job)
            self._admitted.append(job)

    def _prefilled(self, job: Job, now: float) -> None:
        """Record the first token. From now on other jobs can reuse the prompt's blocks."""
        self._prefilling.remove(job)
        job.first_at = now if job.first_at is None else job.first_at
        job.first_step = self.steps
        self._firsts.append(job)
        self._listener.on_first(job)
        if self._shared is not None:
            self._shared.add(job.blocks)
        computed = job.blocks[job.matched :]
        self.cache.publish(computed)
        job.reserved -= len(computed)
        self.decoding[job.sequence] = job
        self.context_tokens += job.prompt_tokens
        if job.output_tokens <= 1:
            self._finish(job, now)
        else:
            heappush(self._endings, (self.steps + job.output_tokens - 1, job.sequence))

    def _finish(self, job: Job, now: float) -> None:
        self._drop(job)
        job.ended_at = now
        self._finished.append(job)
        self._listener.on_done(job)

    def _drop(self, job: Job) -> None:
        """Remove a decoding job from the batch."""
        del self.decoding[job.sequence]
        self.context_tokens -= job.prompt_tokens + self.steps - job.first_step
        self.cache.release(job.blocks, job.reserved)
        self.held -= 1

    def _reap(self) -> None:
        """Remove jobs that were cancelled while a step ran."""
        for job in self._cancelling:
            if self.decoding.get(job.sequence) is job:
                job.emitted += self.steps - job.first_step + 1
                self._drop(job)
            elif job in self._prefilling:
                self._prefilling.remove(job)
                self.cache.release(job.blocks[: job.matched], job.reserved)
                self._unowe(job)
            elif job in self.waiting:
                self.waiting.remove(job)
                self._unowe(job)
            else:
                continue  # the job finished before its cancel
            self._cancelled.append(job)
        self._cancelling.clear()

    def _unowe(self, job: Job) -> None:
        self.owed_tokens -= job.owed
        self.held -= 1
