"""The router's record of one replica, with dispatched work, received results and learned speed.

From this record `router.core.fleet.engine_model` predicts the engine's present work.
"""

from router.core.fleet.engine_model import IDLE, EngineModel, Prompt
from router.core.fleet.speed import Speed
from router.core.types.plan import EngineLimits, ReplicaRole
from router.core.types.request import Dispatch
from sluice.wire.engine.v1 import engine_pb2 as engine

_OUTGROWN_PART = 4  # an exceeded reservation grows by the emitted tokens divided by this


class ReplicaBook:
    """One replica's dispatches and backlog. The caller calls `refresh` after every change.

    Attributes:
        limits: Limits of the engine, or None while the replica is not attached.
        is_leaving: Whether the replica is no longer planned for this cell.
        is_broken: Whether the replica's stream is broken, and may be resumed soon.
        may_take: Whether the replica is attached, healthy and not draining, with a free batch slot.
            Only a full next step can delay a dispatch to such a replica.
        slack_s: Value of `EngineModel.slack_s` at the last frame.
        tokens_s: Prompt tokens that the replica computes per second in full steps.
        foreign: Number of sequences from other senders, such as the cell's previous owner.
        foreign_blocks: KV blocks of the foreign sequences.
        sent_at: Time of the last dispatch.
        gathers_until: Time until which this full replica collects freed KV memory for a group of
            requests that are far beyond their objective.
    """

    __slots__ = (
        *("_book_owed", "_prefills", "_tpot_s", "_unlisted", "busy_until", "cell_id", "slack_s"),
        *("emitted", "epoch", "foreign", "foreign_blocks", "frame_at", "is_broken", "is_draining"),
        *("is_leaving", "kv_booked", "limits", "may_take", "output_booked", "pauses", "replica_id"),
        *("role", "running", "engine_model", "dispatches", "speed", "tokens_s"),
        *("sent_at", "gathers_until", "_kv_told", "_rest_blocks"),
    )

    def __init__(self, replica_id: str, cell_id: str, tpot_s: float) -> None:
        """Create a record. `tpot_s` is the objective of the mean seconds per output token."""
        self.replica_id = replica_id
        self.cell_id = cell_id
        self.is_draining = False
        self.is_leaving = False
        self.role = ReplicaRole.BOTH
        self.epoch = 0
        self.limits: EngineLimits | None = None
        self.speed = Speed(1)
        self.tokens_s = 1.0
        self._tpot_s = tpot_s
        self._reset()

    def _reset(self) -> None:
        self.dispatches: dict[int, Dispatch] = {}  # by sequence, in the order of dispatch
        self._prefills: dict[int, Dispatch] = {}  # the dispatches without a first token
        self.kv_booked = 0
        self._kv_told = 0  # blocks in use in the engine's report, plus blocks of later dispatches
        self.sent_at = self.gathers_until = 0.0
        self.running = 0  # running sequences in the engine's last report
        self.foreign = self.foreign_blocks = 0
        self.busy_until = self.frame_at = 0.0
        self.is_broken = self.may_take = False
        self.output_booked = 0
        self.emitted = 0  # emitted tokens of live dispatches
        self.slack_s = 0.0
        self.pauses = 0
        self.engine_model = EngineModel(self.speed, self.speed.budget, self._tpot_s)
        self._book_owed = 0  # prompt tokens of dispatches without a first token
        self._unlisted: set[int] = set()
        # blocks in use in the engine's last report if the engine was idle, or None
        self._rest_blocks: int | None = None

    # --- attachment -------------------------------------------------------------------------

    def attach(self, epoch: int, limits: EngineLimits, now: float) -> None:
        """Start an attachment to an engine without sequences."""
        assert not self.dispatches, "the dispatches of an older attachment were not given up"
        if self.speed.budget != limits.step_tokens_max:
            self.speed = Speed(limits.step_tokens_max)
        self._reset()
        self.epoch = epoch
        self.limits = limits
        self.frame_at = now

    def detach(self) -> list[Dispatch]:
        """End the attachment, and return its live dispatches in the order of dispatch."""
        dispatches = list(self.dispatches.values())
        self._reset()
        self.limits = None
        return dispatches

    def resume(self, epoch: int, listed: set[int], now: float) -> None:
        """Continue under a new epoch. Sequences not in `listed` have ended or never arrived."""
        self.epoch = epoch
        self.frame_at = now
        self.is_broken = False
        self._rest_blocks = None
        self._unlisted = set(self.dispatches) - listed

    def take_unlisted(self) -> list[Dispatch]:
        """Return, once after a resume, the dispatches that the engine has not listed."""
        if not self._unlisted:
            return []
        gone = [self.dispatches[key] for key in sorted(self._unlisted) if key in self.dispatches]
        self._unlisted = set()
        return gone

    # --- dispatches ------------------------------------------------------------------------------

    def blocks(self, tokens: int) -> int:
        """Return how many KV blocks `tokens` need."""
        assert self.limits is not None
        return -(-tokens // self.limits.block_tokens)

    def kv_free_blocks(self) -> int:
        """Return the free KV blocks, by the router's reservations and the engine's reports.

        The used blocks are the lesser of two estimates. The router's reservations count a block
        once for each sequence that shares it. The engine's count is exact, and the expected growth
        of the running sequences is added to it.
        """
        limits = self.limits
        if limits is None:
            return 0
        told = self._kv_told
        used = self.kv_booked + self.foreign_blocks
        if used <= told:
            return limits.kv_blocks - told
        grown = told + self.output_owed() // limits.block_tokens
        return limits.kv_blocks - min(used, grown)

    def fits(self, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> bool:
        """Return whether the KV cache has room for a sequence. An idle replica has room for any.

        Cached blocks of the prompt need no further room.
        """
        limits = self.limits
        assert limits is not None
        if prompt_tokens > limits.prompt_tokens_max:
            return False
        needed = self.blocks(prompt_tokens - cached_tokens + output_tokens)
        return needed <= self.kv_free_blocks() or not self.dispatches

    def add(self, dispatch: Dispatch, output_tokens: int, cached_tokens: int, now: float) -> None:
        """Record a dispatch, and reserve KV blocks for its prompt and expected output."""
        limits = self.limits
        assert limits is not None
        assert len(self.dispatches) < limits.sequences_max, "a replica was sent more than it holds"
        dispatch.output_booked = output_tokens
        dispatch.cached_tokens = cached_tokens
        dispatch.prefill_owed = dispatch.prompt_tokens - cached_tokens
        room = limits.context_tokens_max - dispatch.prompt_tokens
        prior = (
            dispatch.prompt_tokens - dispatch.request.prompt_tokens
        )  # tokens that were emitted before a preemption
        dispatch.output_max = min(dispatch.request.output_max - prior, room)
        dispatch.kv_blocks = self.blocks(dispatch.prompt_tokens + output_tokens)
        self.dispatches[dispatch.sequence] = self._prefills[dispatch.sequence] = dispatch
        self.kv_booked += dispatch.kv_blocks
        self._kv_told += dispatch.kv_blocks
        self.sent_at = now
        self._book_owed += dispatch.prefill_owed
        self.output_booked += output_tokens
        self.engine_model.send(dispatch.prefill_owed, self._work_s(dispatch), now)

    def admitted(self, dispatch: Dispatch, cached_tokens: int) -> None:
        """Record that the engine started a sequence with `cached_tokens` cached prompt tokens."""
        if dispatch.sequence in self._prefills:
            owed = dispatch.prompt_tokens - min(cached_tokens, dispatch.prompt_tokens - 1)
            self._owe(dispatch, owed)
            dispatch.cached_tokens = cached_tokens
            dispatch.is_admitted = True

    def prefilled(self, dispatch: Dispatch) -> None:
        """Record a first token, with which the prefill of the sequence is complete."""
        if self._prefills.pop(dispatch.sequence, None) is not None:
            self._owe(dispatch, 0)
            dispatch.slack_s = self.slack_s
            self.engine_model.began(dispatch.slack_s)

    def outgrow(self, dispatch: Dispatch) -> None:
        """Reserve more KV blocks for an answer that is longer than expected."""
        output = min(
            dispatch.output_max, dispatch.emitted + max(1, dispatch.emitted // _OUTGROWN_PART)
        )
        self.output_booked += output - dispatch.output_booked
        dispatch.output_booked = output
        blocks = self.blocks(dispatch.prompt_tokens + dispatch.output_booked)
        self.kv_booked += blocks - dispatch.kv_blocks
        dispatch.kv_blocks = blocks

    def finish(self, dispatch: Dispatch) -> None:
        """Remove a sequence that the engine has ended."""
        del self.dispatches[dispatch.sequence]
        if self._prefills.pop(dispatch.sequence, None) is None:
            self.engine_model.ended(dispatch.slack_s)
        self.kv_booked -= dispatch.kv_blocks
        self._book_owed -= dispatch.prefill_owed
        self.output_booked -= dispatch.output_booked
        self.emitted -= dispatch.emitted

    def _owe(self, dispatch: Dispatch, tokens: int) -> None:
        self._book_owed += tokens - dispatch.prefill_owed
        dispatch.prefill_owed = tokens

    def _work_s(self, dispatch: Dispatch) -> float:
        done = dispatch.prompt_tokens - dispatch.prefill_owed
        return self.speed.prompt_work_s(dispatch.prefill_owed, done)

    # --- reports of the engine ----------------------------------------------------------------

    def is_at_rest(self, frame: engine.StepFrame) -> bool:
        """Return whether the engine was and is idle, so that only steps of probes are news."""
        state = frame.state
        before, self._rest_blocks = self._rest_blocks, None
        if self.dispatches or state.running or state.waiting or self._unlisted:
            return False
        has_news = frame.admitted or frame.finished or frame.sequence or frame.HasField("kv_events")
        if has_news or state.adapters_changed:
            return False
        self._rest_blocks = state.kv_blocks_used
        return before == state.kv_blocks_used

    def progress(self, frame: engine.StepFrame) -> None:
        """Record the duration and the prefill work of a frame's step. Its tokens follow later."""
        state = frame.state
        if not frame.steps or self.limits is None:
            return  # a heartbeat without a step
        head = next(iter(self._prefills.values()), None)
        context = 0.0 if head is None else head.prompt_tokens - head.prefill_owed
        self.speed.observe(state, context + state.step_prompt_tokens / 2)
        self.slack_s += frame.steps * (self._tpot_s - state.step_us * 1e-6)
        computed = state.step_prompt_tokens
        self.pauses = 0 if computed else self.pauses + frame.steps
        if frame.steps > 1:  # a merged frame's steps computed all prompt tokens that are not owed
            waiting = len(self.dispatches) - state.running - state.waiting
            if not waiting:
                computed = max(computed, self._book_owed - state.prefill_tokens_owed)
        for dispatch in self._prefills.values():
            if computed <= 0:
                break
            part = min(computed, dispatch.prefill_owed)
            self._owe(dispatch, dispatch.prefill_owed - part)
            computed -= part

    def observe(self, frame: engine.StepFrame, now: float) -> None:
        """Record the engine's report of its own state. Ended sequences must be removed before."""
        state = frame.state
        self.frame_at = now
        self.running = state.running
        surplus = state.running + state.waiting - len(self.dispatches)
        self.foreign = max(0, surplus)
        self.foreign_blocks = max(0, state.kv_blocks_used - self.kv_booked) if surplus > 0 else 0
        self._kv_told = state.kv_blocks_used + self._not_admitted_blocks()
        if not frame.steps and state.running:
            return  # the frame is from the middle of a step
        written_at = now - self.speed.lag_s
        prompts: list[Prompt] = []
        blocked: list[Prompt] = []
        # Prompts that were sent before the last step began, but were not admitted by it, wait for
        # KV memory. If no sequence runs, memory is free, and the prompts have not arrived yet.
        began_at = written_at - state.step_us * 1e-6 if state.running else float("-inf")
        prompt_work_s = self.speed.prompt_work_s
        for dispatch in self._prefills.values():
            owed, sent_at = dispatch.prefill_owed, dispatch.dispatched_at
            work_s = prompt_work_s(owed, dispatch.prompt_tokens - owed)
            if sent_at < began_at and not dispatch.is_admitted:
                blocked.append((float("inf"), owed, work_s))
            else:
                prompts.append((sent_at, owed, work_s))
        prompts += blocked  # blocked prompts do not delay the others
        if self.foreign:
            tokens = max(0, state.prefill_tokens_owed - self._book_owed)
            prompts.insert(0, (written_at, tokens, tokens / self.tokens_s))
        decoding = state.running - state.prefilling
        self.engine_model.anchor(written_at, prompts, decoding, self.slack_s, pauses=self.pauses)

    def _not_admitted_blocks(self) -> int:
        """Return the KV blocks of the latest dispatches, which the engine has not started."""
        blocks, left = 0, len(self.dispatches) - self.running
        for dispatch in reversed(self.dispatches.values()):
            if left <= 0:
                break
            blocks += dispatch.kv_blocks
            left -= 1
        return blocks

    # --- predictions ------------------------------------------------------------------------

    def owed_tokens(self, now: float) -> float:
        """Return the uncomputed prompt tokens after the current step."""
        self.engine_model.advance(now)
        return self.engine_model.tokens

    def output_owed(self) -> int:
        """Return the output tokens that live dispatches are expected to generate from now on."""
        return max(0, self.output_booked - self.emitted)

    def backlog_s(self, now: float) -> float:
        """Return the seconds until the prefill of a prompt that is sent now would begin."""
        engine_model = self.engine_model
        boundary_at = engine_model.boundary_at
        if boundary_at == IDLE:
            return 0.0
        if boundary_at <= now:
            engine_model.advance(now)
            boundary_at = engine_model.boundary_at
        work_s = engine_model.work_s
        if work_s:
            work_s += engine_model.tokens / engine_model.budget * self.speed.decode_step_s
        left_s = boundary_at - now
        return work_s + left_s if left_s > 0.0 else work_s

    def cached_in(self, prompt_tokens: int, blocks: int) -> int:
        """Return the prompt tokens in `blocks` leading blocks, at most all but the last token."""
        limits = self.limits
        if not blocks or limits is None:
            return 0
        return min(blocks * limits.block_tokens, prompt_tokens - 1)

    def prefill_s(self, uncached: int, cached: int) -> float:
        """Return the seconds of a prompt's own prefill on this replica, without a queue."""
        return self.speed.prefill_s(uncached, cached)

    def opens_at(self, now: float) -> float:
        """Return the time at which the replica may be sent more work.

        At that time its next step is not full, and the pause after a "busy" reply is over.
        """
        engine_model = self.engine_model
        if engine_model.boundary_at <= now:
            engine_model.advance(now)
        at = engine_model.boundary_at if engine_model.next_is_full() else now
        return max(at, self.busy_until)

    def refresh(self, *, is_healthy: bool) -> None:
        """Recompute `tokens_s` and `may_take` after a change of the replica."""
        limits = self.limits
        if limits is not None:
            budget = max(limits.step_tokens_max // 8, limits.step_tokens_max - self.running)
            self.tokens_s = budget / self.speed.full_step_s()
        self.recount(is_healthy=is_healthy)

    def recount(self, *, is_healthy: bool) -> None:
        """Recompute `may_take`, for example after a dispatch."""
        limits = self.limits
        self.may_take = (
            limits is not None
            and is_healthy
            and not self.is_draining
            and not self.is_broken
            and len(self.dispatches) + self.foreign < limits.sequences_max
        )

    def check(self) -> None:
        """Assert that all running sums equal the sums over the dispatches."""
        dispatches = self.dispatches.values()
        assert self._book_owed == sum(dispatch.prefill_owed for dispatch in dispatches)
        assert self.output_booked == sum(dispatch.output_booked for dispatch in dispatches)
        assert self.emitted == sum(dispatch.emitted for dispatch in dispatches)
        assert self.kv_booked == sum(dispatch.kv_blocks for dispatch in dispatches)
        assert list(self._prefills) == [
            key for key, dispatch in self.dispatches.items() if not dispatch.emitted
        ]
        self.engine_model.check(dispatch.slack_s for dispatch in dispatches if dispatch.emitted)
