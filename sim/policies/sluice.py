"""The policy `sluice`, which is the real router core with the inputs of production.

The core receives the state of engines only as frames, which arrive `report_age_s` after the end of
their step. A KV event is sent with the first frame that arrives at least `index_delay_s` later. The
router does not know the lengths of answers. A dispatch needs 1 ms. Everything else is the product's
own code.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from gateway.dispatch.cell_choice import CellView, Wish, choose
from router.core.fleet.prefix_index import BlockHashes
from router.core.fleet.prefix_sketch import MARKS_MAX
from router.core.router import RouterCore
from router.core.types.actions import Actions
from router.core.types.canary import CanaryAnswer
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import Request
from router.core.types.service import ServiceReport
from sim.engines import Engine, Job, StepRecord
from sim.policies.cell_knowledge import CellKnowledge, board_of
from sim.pool import SimPool
from sluice.detector.consensus import Text
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

LINK_S = 0.001  # delay of a message from the router to the engine
FRAME_S = 0.1  # longest time between two frames while an engine only decodes, in seconds
HEARTBEAT_S = 0.25  # time between two frames of an idle engine, in seconds
ACCOUNTS_TOLD = 1024  # accounts in one round of reports, of all cells together
_GATEWAY = 1
_EPOCH = 1
_TICK_MIN_S = 1e-6  # least delay of a tick, so that virtual time advances
_CANARY = CanaryAnswer(Text((1, 2, 3, 4)))
_PROBE_S = 0.1
_NO_DEADLINE_S = 1e6  # peers serve every request, however late, and so does the core here
# No request is refused for a full queue, so that all requests of all policies are compared.
STUDY_CONFIG = CoreConfig(
    queue_requests_max=1 << 30,
    queue_tokens_max=1 << 50,
    tenant_requests_max=1 << 30,
    tenant_tokens_max=1 << 50,
)
_OUTCOMES_GOOD = (wire.OUTCOME_KIND_STOP, wire.OUTCOME_KIND_LENGTH)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of the simulated router.

    Attributes:
        report_age_s: Seconds from the end of a step to its frame at the router.
        index_delay_s: Seconds from a change of a cache to the update of the router's index.
        cells: Number of cells, each with a separate core and every n-th replica.
        config: Configuration of the core.
        output_max: `max_tokens` of clients, or None for twice the longest answer of the trace.
        service_age_s: Greatest age in seconds of a cell's data about the service of other cells, or
            None if each cell counts only its own service.
        knowledge: Data of gateways about the cached blocks of cells.
        marks_max: Greatest number of marks in one generation of a cell's sketch.
    """

    report_age_s: float = 0.1
    index_delay_s: float = 3.0
    cells: int = 1
    config: CoreConfig = STUDY_CONFIG
    output_max: int | None = None
    service_age_s: float | None = None
    knowledge: CellKnowledge = CellKnowledge.SKETCHES
    marks_max: int = MARKS_MAX


class SluiceLink:
    """The router's attachment to a simulated replica.

    Attributes:
        number: Number of the engine.
        jobs: Jobs that run on the engine or are being sent to it, by sequence.
        events: Unsent events, each with the time, the block, and whether it was stored.
        frames: Number of sent frames.
    """

    __slots__ = (
        "cell",
        "events",
        "frames",
        "is_heartbeat_planned",
        "is_up",
        "jobs",
        "number",
        "replica_id",
    )

    def __init__(self, number: int, cell: "_Cell") -> None:
        self.number = number
        self.replica_id = f"replica-{number}"
        self.cell = cell
        self.jobs: dict[int, Job] = {}
        self.events: deque[tuple[float, int, bool]] = deque()
        self.frames = 0
        self.is_up = True
        self.is_heartbeat_planned = False


class _Cell:
    """A cell with its router core. `view` is the state of the cell that gateways have received."""

    __slots__ = ("cell_id", "core", "members", "tick_at", "view")

    def __init__(self, cell_id: str, core: RouterCore) -> None:
        self.cell_id = cell_id
        self.core = core
        self.members: list[int] = []
        self.view = CellView(cell_id)
        self.tick_at = float("inf")


class Sluice:
    """The router core as a policy of the simulation.

    Attributes:
        name: Name of the policy, by default "sluice".
        cores: Router cores, one per cell, for inspection.
        refusals: Requests that were not served, by outcome code.
        resumes: Number of resumes after the loss of a replica.
    """

    def __init__(self, settings: RouterSettings, *, name: str = "sluice") -> None:
        self.name = name
        self.settings = settings
        self.refusals: dict[str, int] = {}
        self.resumes = 0

    # --- the pool ---------------------------------------------------------------------------

    def bind(self, pool: SimPool) -> None:
        """Create the cells and their cores, and attach the replicas of the pool."""
        self.pool = pool
        self._handles = 0
        self._jobs: dict[int, Job] = {}  # unfinished jobs by handle
        self._cells = [
            _Cell(f"cell-{number}", RouterCore(self.settings.config))
            for number in range(self.settings.cells)
        ]
        self.cores = [cell.core for cell in self._cells]
        cells = [cell.cell_id for cell in self._cells]
        self._board = board_of(self.settings.knowledge, pool, cells)
        self._links = [
            SluiceLink(number, self._cells[number % len(self._cells)])
            for number in range(pool.replicas_max)
        ]
        self._by_id = {link.replica_id: link for link in self._links}
        self._limits = self.engine_limits(pool.engines[0])
        for cell in self._cells:
            cell.core.on_gateway(_GATEWAY, pool.now)
        for replica in pool.alive:
            self.added(replica)
        if self.settings.service_age_s is not None and len(self._cells) > 1:
            self._tell_service(self.settings.service_age_s / 2)

    def _tell_service(self, half_age_s: float) -> None:
        """Report service at intervals of half the greatest age, until no job is left.

        The delay of each report is the other half of the age.
        """
        for number, cell in enumerate(self._cells):
            book = cell.core.cells[cell.cell_id]
            accounts_max = ACCOUNTS_TOLD // len(self._cells)
            report = book.service_report(f"router-{number}", accounts_max, self.pool.now)
            self._after(half_age_s, self._hear_service, cell, report)
        if self._jobs or not self.pool.jobs or self.pool.now < self.pool.jobs[-1].arrived_at:
            self._after(half_age_s, self._tell_service, half_age_s)

    def _hear_service(self, teller: _Cell, report: ServiceReport) -> None:
        for cell in self._cells:
            if cell is not teller:
                cell.core.on_service_elsewhere(cell.cell_id, report, self.pool.now)

    def engine_limits(self, replica: Engine) -> EngineLimits:
        """Return the limits that an engine reports to the router."""
        cache = replica.cache.capacity
        return EngineLimits(
            context_tokens_max=cache * replica.block_tokens,
            sequences_max=replica.cost.size.sequences_max,
            step_tokens_max=replica.cost.size.step_tokens_max,
            kv_blocks=cache,
            block_tokens=replica.block_tokens,
        )

    def added(self, replica: int) -> None:
        """Attach a new replica to its cell."""
        link, serving = self._links[replica], self.pool.engines[replica]
        link.cell.members.append(replica)
        self._plan_replicas(link.cell)
        link.cell.core.on_attached(link.replica_id, _EPOCH, self._limits, self.pool.now)
        serving.recorder = self._stepped
        serving.stretch_max_s = FRAME_S
        self._tick(link.cell)

    def lost(self, replica: int, jobs: Sequence[Job]) -> None:  # noqa: ARG002
        """Detach a dead replica, which the router notices after its last frame."""
        link = self._links[replica]
        link.is_up = False
        self._after(self.settings.report_age_s, self._detach, link)

    def _detach(self, link: SluiceLink) -> None:
        link.jobs.clear()
        core = link.cell.core
        core.on_replica_lost(link.replica_id, _EPOCH, self.pool.now)
        link.cell.members.remove(link.number)
        self._plan_replicas(link.cell)
        self._tick(link.cell)

    def _plan_replicas(self, cell: _Cell) -> None:
        plans = [
            ReplicaPlan(self._links[number].replica_id, cell.cell_id) for number in cell.members
        ]
        cell.core.on_cells([cell.cell_id], plans)
        sketch = cell.core.cells[cell.cell_id].fleet.sketch
        sketch.is_wanted = len(self._cells) > 1
        sketch.marks_max = self.settings.marks_max

    def _after(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self.pool.timeline.at(self.pool.now + delay_s, action, *args)

    # --- requests ---------------------------------------------------------------------------

    def arrive(self, job: Job) -> None:
        """Submit an arriving job to the cell that a gateway chooses."""
        cell = self._cells[self.choose_cell(job)]
        self._submit(job, cell)
        self._tick(cell)

    def _submit(self, job: Job, cell: _Cell) -> None:
        self._handles += 1
        self._jobs[self._handles] = job
        cell.core.submit(_GATEWAY, self.request(job, self._handles, cell.cell_id), self.pool.now)

    def request(self, job: Job, handle: int, cell_id: str) -> Request:
        """Return the gateway's request for a job."""
        return Request(
            handle=handle,
            cell_id=cell_id,
            tenant_id=job.request.tenant,
            prompt_tokens=job.prompt_tokens,
            output_max=self._output_max() - job.emitted,
            priority=job.request.priority,
            deadline_s=_NO_DEADLINE_S,
            hashes=hashes_of(job.blocks),
            session=max(0, job.request.session + 1),
            adapter=self.adapter_of(job),
        )

    def adapter_of(self, job: Job) -> str:  # noqa: ARG002 - for subclasses with adapters
        """Return the digest of the adapter that a job requests, or empty for the base."""
        return ""

    def _output_max(self) -> int:
        if self.settings.output_max is not None:
            return self.settings.output_max
        if not hasattr(self, "_longest"):
            self._longest = max(job.request.output_tokens for job in self.pool.jobs)
        return 2 * self._longest

    def choose_cell(self, job: Job) -> int:
        """Return the number of the cell that a gateway chooses for a job."""
        if len(self._cells) == 1:
            return 0
        wish = Wish(
            session=max(0, job.request.session + 1),
            hashes=hashes_of(job.blocks),
            prompt_tokens=job.prompt_tokens,
            salt=job.number,
            adapter=crc32(self.adapter_of(job).encode()),
        )
        view, known = choose([cell.view for cell in self._cells], wish, self._board)
        if self._board is not None and not wish.session:
            self._board.sent(view.cell_id, wish.hashes, known)
        view.tokens_owed += job.prompt_tokens
        return next(n for n, cell in enumerate(self._cells) if cell.view is view)

    def home_of(self, adapter: str) -> int:
        """Return the number of the cell that gateways choose for an adapter while all are idle."""
        wish = Wish(session=0, hashes=(), prompt_tokens=1, salt=0, adapter=crc32(adapter.encode()))
        views = [cell.view for cell in self._cells]
        return views.index(choose(views, wish, None)[0])

    # --- the core ---------------------------------------------------------------------------

    def _tick(self, cell: _Cell) -> None:
        now = self.pool.now
        self._perform(cell, cell.core.tick(now))
        if cell.core.live_requests:
            due = max(cell.core.next_tick_at(now), now + _TICK_MIN_S)
            if not now < cell.tick_at <= due:
                cell.tick_at = due
                self.pool.timeline.at(due, self._tick_due, cell, due)

    def _tick_due(self, cell: _Cell, due: float) -> None:
        if cell.tick_at == due:  # an earlier tick may have been planned since
            self._tick(cell)

    def _perform(self, cell: _Cell, actions: Actions) -> None:
        for replica_id, dispatches in actions.dispatches.items():
            link = self._by_id[replica_id]
            for dispatch in dispatches:
                job = self._jobs[dispatch.handle]
                link.jobs[dispatch.sequence] = job
                self._after(LINK_S, self.deliver_job, link, dispatch.sequence, job)
        for replica_id, sequences in actions.cancels.items():
            self._after(LINK_S, self._cancel, self._by_id[replica_id], sequences)
        for replica_id in actions.probes:
            self._after(_PROBE_S, self._probe, self._by_id[replica_id])
        for _, batch in actions.batches:
            for part in batch.sketches:
                self._learn_sketch(part)
            for state in batch.cells:
                cell.view = CellView(
                    cell.cell_id,
                    replicas_ready=state.replicas_ready,
                    tokens_owed=state.tokens_owed,
                    wait_ms=state.wait_ms,
                )
            for outcome in batch.outcomes:
                self._end(cell, outcome)

    def _learn_sketch(self, part: wire.CellSketch) -> None:
        if self._board is not None:
            self._board.learn(part.cell_id, part.epoch, part.generation, part.marks[:])

    def deliver_job(self, link: SluiceLink, sequence: int, job: Job) -> None:
        """Submit a job to its engine, unless the job was cancelled on the way."""
        if link.is_up and link.jobs.get(sequence) is job:
            job.restart(self.pool.block_tokens)
            job.sequence = sequence
            self.pool.dispatch(job, link.number)

    def _cancel(self, link: SluiceLink, sequences: Sequence[int]) -> None:
        if not link.is_up:
            return
        for sequence in sequences:
            job = link.jobs.get(sequence)
            if job is not None and job.sequence == sequence:
                self.pool.engines[job.replica].cancel(job)

    def _probe(self, link: SluiceLink) -> None:
        now, core = self.pool.now, link.cell.core
        if link.is_up:
            core.on_probe(link.replica_id, _CANARY, now)
        else:
            core.on_probe_failed(link.replica_id, now)
        self._tick(link.cell)

    def _end(self, cell: _Cell, outcome: wire.Outcome) -> None:
        job = self._jobs.pop(outcome.handle)
        if outcome.kind == wire.OUTCOME_KIND_LOST:
            self.resumes += 1
            job.restart(self.pool.block_tokens)
            self._submit(job, cell)
        elif outcome.kind not in _OUTCOMES_GOOD:
            self.refusals[outcome.code] = self.refusals.get(outcome.code, 0) + 1

    # --- frames of engines ------------------------------------------------------------------

    def first(self, job: Job) -> None:
        """Ignore a first token, which a frame reports to the router."""

    def done(self, job: Job) -> None:
        """Ignore the end of a job, which a frame reports to the router."""

    def block_changed(self, replica: int, block: int, *, is_stored: bool) -> None:
        """Record a change of a cache, which a later frame reports to the router."""
        link = self._links[replica]
        link.events.append((self.pool.now, block, is_stored))

    def _stepped(self, serving: Engine, record: StepRecord) -> None:
        link = self._links[serving.number]
        frame = frame_of(serving, record)
        for job in (*record.finished, *record.cancelled):
            del link.jobs[job.sequence]
        self.send_frame(link, frame)

    def send_frame(self, link: SluiceLink, frame: engine.StepFrame) -> None:
        """Send a frame to the router."""
        link.frames += 1
        self._after(self.settings.report_age_s, self._deliver, link, frame)
        if not link.is_heartbeat_planned:
            self._plan_heartbeat(link)

    def _plan_heartbeat(self, link: SluiceLink) -> None:
        link.is_heartbeat_planned = self._jobs != {} or len(link.events) > 0
        if link.is_heartbeat_planned:
            self._after(HEARTBEAT_S, self._heartbeat, link, link.frames)

    def _heartbeat(self, link: SluiceLink, frames: int) -> None:
        """Send a heartbeat of a silent engine."""
        if not link.is_up:
            return
        serving = self.pool.engines[link.number]
        if link.frames == frames and serving.is_idle:
            frame = engine.StepFrame(step=serving.steps)
            frame.state.CopyFrom(state_of(serving, 0.0, 0))
            self.send_frame(link, frame)
        self._plan_heartbeat(link)

    def _deliver(self, link: SluiceLink, frame: engine.StepFrame) -> None:
        events = link.events
        known_by = self.pool.now - self.settings.index_delay_s
        if events and events[0][0] <= known_by:
            stored, removed = array("Q"), array("Q")
            while events and events[0][0] <= known_by:
                _, block, is_stored = events.popleft()
                (stored if is_stored else removed).extend((block, 0))
            frame.kv_events.stored = stored.tobytes()
            frame.kv_events.removed = removed.tobytes()
        link.cell.core.on_frame(link.replica_id, _EPOCH, frame, self.pool.now)
        self._tick(link.cell)


def frame_of(serving: Engine, record: StepRecord) -> engine.StepFrame:
    """Return the frame of an engine host for a step or a stretch, with zeros as tokens."""
    frame = engine.StepFrame(step=serving.steps, steps=max(1, record.steps))
    frame.sequence.extend(record.decoded)
    frame.sequence.extend([job.sequence for job in record.firsts])
    frame.count.extend([record.steps] * len(record.decoded) + [1] * len(record.firsts))
    frame.token.extend(bytes(record.steps * len(record.decoded) + len(record.firsts)))
    for job in record.admitted:
        frame.admitted.add(
            sequence=job.sequence,
            queue_us=int((job.admitted_at - job.dispatched_at) * 1e6),
            cached_tokens=job.hit_tokens,
        )
    for jobs, reason in (
        (record.finished, engine.FINISH_REASON_LENGTH),
        (record.cancelled, engine.FINISH_REASON_CANCELLED),
    ):
        for job in jobs:
            frame.finished.add(
                sequence=job.sequence,
                reason=reason,
                prompt_tokens=job.prompt_tokens,
                output_tokens=job.output_tokens,
            )
    frame.state.CopyFrom(state_of(serving, record.step_s, record.prompt_tokens))
    return frame


def state_of(serving: Engine, step_s: float, prompt_tokens: int) -> engine.EngineState:
    """Return the engine state that every frame contains."""
    return engine.EngineState(
        running=serving.running,
        waiting=len(serving.waiting),
        kv_blocks_used=serving.cache.used,
        kv_blocks_total=serving.cache.capacity,
        prefill_tokens_owed=serving.owed_tokens,
        step_us=int(step_s * 1e6),
        step_prompt_tokens=prompt_tokens,
        prefilling=serving.prefilling,
    )


def hashes_of(blocks: Sequence[int]) -> BlockHashes:
    """Return block ids as 16-byte hashes of eight bytes of the id and eight zero bytes."""
    data = array("Q", bytes(16 * len(blocks)))
    data[::2] = array("Q", blocks)
    return BlockHashes(data.tobytes())
