"""What the router knows about one replica: what it sent, what came back, how fast it is."""

from router.core.model import CoreConfig, EngineLimits, Slot
from sluice.wire.engine.v1 import engine_pb2 as engine

_SMOOTHING = 0.1  # weight of a new sample of a step time or a frame gap
_FULL_STEP_S = 0.02  # prior; the first full step replaces it
_DECODE_TOKEN_S = 0.001  # prior
_FRAME_GAP_MAX_S = 0.25  # an idle host's pace of frames says nothing about a busy one's


class Speed:
    """Step times learned from frames."""

    __slots__ = ("_full_steps", "decode_token_s", "frame_gap_s", "full_step_s")

    def __init__(self) -> None:
        self.full_step_s = _FULL_STEP_S  # a step whose token budget was used up
        self.decode_token_s = _DECODE_TOKEN_S  # per token of a step without prefill
        self._full_steps = 0  # seen so far
        self.frame_gap_s = 0.0  # age of what is known, while the engine works

    def observe(self, state: engine.EngineState, *, owed_before: int, budget: int) -> None:
        """Learn from the last step; `owed_before` tells whether it was full."""
        step_s = state.step_us * 1e-6
        if not step_s:
            return
        if owed_before >= budget:
            self._full_steps += 1
            weight = max(_SMOOTHING, 1 / self._full_steps)
            self.full_step_s += weight * (step_s - self.full_step_s)
        elif not owed_before and not state.prefill_tokens_owed and state.running:
            sample_s = step_s / state.running
            self.decode_token_s += _SMOOTHING * (sample_s - self.decode_token_s)

    def observe_gap(self, gap_s: float) -> None:
        """Learn how old the knowledge about a busy engine is."""
        self.frame_gap_s += _SMOOTHING * (min(gap_s, _FRAME_GAP_MAX_S) - self.frame_gap_s)


class ReplicaBook:
    """One replica's slots and predicted backlog.

    `refresh` after every change keeps `load_s` and `is_available`, which placement reads.
    """

    __slots__ = (
        "_book_owed",
        "_emitted",
        "_output_booked",
        "_reported_owed",
        "_sent_since",
        "busy_until",
        "cell_id",
        "epoch",
        "frame_at",
        "is_available",
        "is_draining",
        "is_leaving",
        "kv_booked",
        "limits",
        "load_s",
        "replica_id",
        "slots",
        "speed",
        "token_s",
    )

    def __init__(self, replica_id: str, cell_id: str) -> None:
        self.replica_id = replica_id
        self.cell_id = cell_id
        self.is_draining = False
        self.is_leaving = False  # no longer planned for this cell
        self.speed = Speed()
        self.epoch = 0
        self.limits: EngineLimits | None = None  # None: not attached
        self.load_s = 0.0
        self.token_s = 0.0
        self.is_available = False
        self._reset()

    def _reset(self) -> None:
        self.slots: dict[int, Slot] = {}  # by sequence, in the order of dispatch
        self.kv_booked = 0
        self.busy_until = 0.0
        self.frame_at = 0.0
        self._book_owed = 0  # prompt tokens of slots without a first token
        self._reported_owed = 0  # the engine's own count, with what it had not seen then
        self._sent_since = 0
        self._output_booked = 0
        self._emitted = 0  # of live slots

    def attach(self, epoch: int, limits: EngineLimits, now: float) -> None:
        """Begin an attachment with an empty engine."""
        assert not self.slots, "the slots of an older attachment were not given up"
        self._reset()
        self.epoch = epoch
        self.limits = limits
        self.frame_at = now

    def detach(self) -> list[Slot]:
        """End the attachment; return the slots that were alive, in the order of dispatch."""
        slots = list(self.slots.values())
        self._reset()
        self.limits = None
        self.is_available = False
        return slots

    def blocks(self, tokens: int) -> int:
        """Return how many KV blocks `tokens` need."""
        assert self.limits is not None
        return -(-tokens // self.limits.block_tokens)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether the KV cache has room; one sequence alone always goes."""
        limits = self.limits
        assert limits is not None
        if prompt_tokens > limits.prompt_tokens_max:
            return False
        booked = self.kv_booked + self.blocks(prompt_tokens + output_tokens)
        return booked <= limits.kv_blocks or not self.slots

    def add(self, slot: Slot, output_tokens: int) -> None:
        """Book a dispatch with the output it is expected to have."""
        limits = self.limits
        assert limits is not None
        assert len(self.slots) < limits.sequences_max, "a replica was sent more than it holds"
        slot.output_booked = output_tokens
        room = limits.context_tokens_max - slot.prompt_tokens
        slot.output_max = min(slot.request.output_max, room)
        slot.kv_blocks = self.blocks(slot.prompt_tokens + output_tokens)
        self.slots[slot.sequence] = slot
        self.kv_booked += slot.kv_blocks
        self._book_owed += slot.prefill_owed
        self._sent_since += slot.prefill_owed
        self._output_booked += output_tokens

    def admitted(self, slot: Slot, cached_tokens: int) -> None:
        """Take cached prompt tokens off what is owed."""
        cached = min(cached_tokens, slot.prefill_owed)
        slot.prefill_owed -= cached
        self._book_owed -= cached

    def prefilled(self, slot: Slot) -> None:
        """Note a first token: nothing of the prompt is owed any more."""
        self._book_owed -= slot.prefill_owed
        slot.prefill_owed = 0

    def finish(self, slot: Slot) -> None:
        """Take a sequence that the engine has ended out of the books."""
        del self.slots[slot.sequence]
        self.kv_booked -= slot.kv_blocks
        self._book_owed -= slot.prefill_owed
        self._output_booked -= slot.output_booked
        self._emitted -= slot.emitted

    def emit(self, tokens: int) -> None:
        """Book output tokens of live slots."""
        self._emitted += tokens

    def observe(self, frame: engine.StepFrame, now: float) -> None:
        """Take over what the engine says of itself, after the frame's ends were booked.

        Sequences that were sent but that the engine had not seen when it wrote the frame are those
        that its counts lack; it sees them in the order of dispatch.
        """
        assert self.limits is not None
        state = frame.state
        budget = self.limits.step_tokens_max
        self.speed.observe(state, owed_before=self._reported_owed, budget=budget)
        if state.running:
            self.speed.observe_gap(now - self.frame_at)
        self.frame_at = now
        unseen = len(self.slots) - state.running - state.waiting
        owed = state.prefill_tokens_owed
        if unseen > 0:
            for slot in reversed(self.slots.values()):
                owed += slot.prefill_owed
                unseen -= 1
                if not unseen:
                    break
        self._reported_owed = owed
        self._sent_since = 0

    def owed_tokens(self) -> int:
        """Return prompt and expected output tokens that the engine still has to compute."""
        return self._prefill_owed() + max(0, self._output_booked - self._emitted)

    def _prefill_owed(self) -> int:
        return min(self._book_owed, self._reported_owed + self._sent_since)

    def refresh(self, config: CoreConfig, now: float) -> None:
        """Predict the backlog anew and whether the replica may be sent more.

        The window covers the step that runs while a frame and our answer travel, the one after it,
        which the answer is to fill, and the age of what is known. So an engine does not run dry
        between two frames, and hardly more waits there instead of here.
        """
        limits = self.limits
        if limits is None:
            self.is_available = False
            return
        speed = self.speed
        budget = max(limits.step_tokens_max // 8, limits.step_tokens_max - len(self.slots))
        self.token_s = speed.full_step_s / budget
        backlog_s = self._prefill_owed() * self.token_s
        self.load_s = backlog_s + max(0, self._output_booked - self._emitted) * speed.decode_token_s
        window_s = max(config.window_min_s, 2 * speed.full_step_s + speed.frame_gap_s)
        self.is_available = (
            backlog_s < window_s
            and len(self.slots) < limits.sequences_max
            and not self.is_draining
            and now >= self.busy_until
        )

    def check(self) -> None:
        """Assert that the running sums are those of the slots."""
        slots = self.slots.values()
        assert self._book_owed == sum(slot.prefill_owed for slot in slots)
        assert self._output_booked == sum(slot.output_booked for slot in slots)
        assert self._emitted == sum(slot.emitted for slot in slots)
