"""What the router knows about one replica: what it sent, what came back, how fast it is.

The backlog is a shadow of the engine: what it still owed when it wrote its last frame, plus what
was sent since, minus what it has computed since at its learned speed.
"""

from router.core.model import EngineLimits, Role, Slot
from router.core.speed import Speed
from sluice.wire.engine.v1 import engine_pb2 as engine

_OUTGROWN_PART = 4  # an answer longer than booked is expected to grow by one in so many


class ReplicaBook:
    """One replica's slots and predicted backlog; `refresh` after every change.

    Attributes:
        limits: None while it is not attached.
        is_leaving: No longer planned for this cell.
        is_broken: Its stream is gone, it may be back in a moment.
        may_take: Attached, not draining, healthy, with a sequence to spare: the rest is time.
        opens_at: When its predicted backlog falls below the window.
        sent_at: Last dispatch.
        gathers_until: Until then its memory was full, and what it frees is left for a group of
            those that are late anyway.
    """

    __slots__ = (
        *("_book_owed", "_owed", "_owed_at", "_unlisted", "busy_until", "cell_id", "epoch"),
        *("frame_at", "is_broken", "is_draining", "is_leaving", "kv_booked", "limits"),
        *("may_take", "opens_at", "replica_id", "role", "slots", "speed", "tokens_s", "emitted"),
        *("output_booked", "window_tokens", "running", "foreign", "foreign_blocks"),
        *("sent_at", "gathers_until", "_kv_told"),
    )

    def __init__(self, replica_id: str, cell_id: str) -> None:
        self.replica_id = replica_id
        self.cell_id = cell_id
        self.is_draining = False
        self.is_leaving = False
        self.role = Role.BOTH
        self.epoch = 0
        self.limits: EngineLimits | None = None
        self.speed = Speed(1)
        self.tokens_s = 1.0  # prompt tokens computed per second in full steps
        self.window_tokens = 0.0
        self._reset()

    def _reset(self) -> None:
        self.slots: dict[int, Slot] = {}  # by sequence, in the order of dispatch
        self.kv_booked = 0
        self.running = 0  # by the engine's last word
        self.foreign = 0  # sequences of others: of the cell's last owner, or of an operator
        self.foreign_blocks = 0  # KV blocks that they hold
        self._kv_told = 0  # blocks in use by the engine's account, and of what it lacks
        self.sent_at = self.gathers_until = 0.0
        self.busy_until = 0.0
        self.frame_at = 0.0
        self.is_broken = False
        self.may_take = False
        self.opens_at = 0.0
        self.output_booked = 0
        self.emitted = 0  # of live slots
        self._book_owed = 0  # prompt tokens of slots without a first token
        self._owed = 0.0  # prompt tokens owed ...
        self._owed_at = 0.0  # ... at this time
        self._unlisted: set[int] = set()

    # --- attachment -------------------------------------------------------------------------

    def attach(self, epoch: int, limits: EngineLimits, now: float) -> None:
        """Begin an attachment with an empty engine."""
        assert not self.slots, "the slots of an older attachment were not given up"
        self._reset()
        if self.limits is None or self.limits.step_tokens_max != limits.step_tokens_max:
            self.speed = Speed(limits.step_tokens_max)
        self.epoch = epoch
        self.limits = limits
        self.frame_at = self._owed_at = now

    def detach(self) -> list[Slot]:
        """End the attachment; return the slots that were alive, in the order of dispatch."""
        slots = list(self.slots.values())
        self._reset()
        self.limits = None
        return slots

    def resume(self, epoch: int, listed: set[int], now: float) -> None:
        """Go on under a new epoch; what is not `listed` was ended, or never arrived."""
        self.epoch = epoch
        self.frame_at = now
        self.is_broken = False
        self._unlisted = set(self.slots) - listed

    def take_unlisted(self) -> list[Slot]:
        """Return, after the first frame of a resumed attachment, what the engine does not know."""
        gone = [self.slots[key] for key in sorted(self._unlisted) if key in self.slots]
        self._unlisted = set()
        return gone

    # --- slots ------------------------------------------------------------------------------

    def blocks(self, tokens: int) -> int:
        """Return how many KV blocks `tokens` need."""
        assert self.limits is not None
        return -(-tokens // self.limits.block_tokens)

    def kv_free_blocks(self) -> int:
        """Return how many KV blocks are free by the books and by the engine's own account."""
        if self.limits is None:
            return 0
        return self.limits.kv_blocks - max(self.kv_booked + self.foreign_blocks, self._kv_told)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether the KV cache has room; one sequence alone always goes."""
        limits = self.limits
        assert limits is not None
        if prompt_tokens > limits.prompt_tokens_max:
            return False
        return self.blocks(prompt_tokens + output_tokens) <= self.kv_free_blocks() or not self.slots

    def add(self, slot: Slot, output_tokens: int, cached_tokens: int, now: float) -> None:
        """Book a dispatch with the cached tokens and the output that it is expected to have."""
        limits = self.limits
        assert limits is not None
        assert len(self.slots) < limits.sequences_max, "a replica was sent more than it holds"
        slot.output_booked = output_tokens
        slot.cached_tokens = cached_tokens
        slot.prefill_owed = slot.prompt_tokens - cached_tokens
        room = limits.context_tokens_max - slot.prompt_tokens
        prior = slot.prompt_tokens - slot.request.prompt_tokens  # emitted before a preemption
        slot.output_max = min(slot.request.output_max - prior, room)
        slot.kv_blocks = self.blocks(slot.prompt_tokens + output_tokens)
        self._owed = self.owed_tokens(now) + slot.prefill_owed
        self._owed_at = now
        self.slots[slot.sequence] = slot
        self.sent_at = now
        self.kv_booked += slot.kv_blocks
        self._kv_told += slot.kv_blocks
        self._book_owed += slot.prefill_owed
        self.output_booked += output_tokens

    def admitted(self, slot: Slot, cached_tokens: int) -> None:
        """Take over how much of a prompt the engine really found in its cache."""
        if slot.first_at:
            return
        owed = slot.prompt_tokens - min(cached_tokens, slot.prompt_tokens - 1)
        self._book_owed += owed - slot.prefill_owed
        slot.prefill_owed = owed
        slot.cached_tokens = cached_tokens

    def prefilled(self, slot: Slot) -> None:
        """Note a first token: nothing of the prompt is owed any more."""
        self._book_owed -= slot.prefill_owed
        slot.prefill_owed = 0

    def outgrow(self, slot: Slot) -> None:
        """Book more for an answer that is longer than was expected, and may get longer yet."""
        output = min(slot.output_max, slot.emitted + max(1, slot.emitted // _OUTGROWN_PART))
        self.output_booked += output - slot.output_booked
        slot.output_booked = output
        blocks = self.blocks(slot.prompt_tokens + slot.output_booked)
        self.kv_booked += blocks - slot.kv_blocks
        slot.kv_blocks = blocks

    def finish(self, slot: Slot) -> None:
        """Take a sequence that the engine has ended out of the books."""
        del self.slots[slot.sequence]
        self.kv_booked -= slot.kv_blocks
        self._book_owed -= slot.prefill_owed
        self.output_booked -= slot.output_booked
        self.emitted -= slot.emitted

    # --- the shadow -------------------------------------------------------------------------

    def observe(self, frame: engine.StepFrame, now: float) -> None:
        """Take over what the engine says of itself, after the frame's ends were booked.

        Sequences that were sent but that the engine had not seen when it wrote the frame are those
        that its counts lack; it sees them in the order of dispatch.
        """
        limits = self.limits
        assert limits is not None
        state = frame.state
        self.speed.observe(state, limits.step_tokens_max)
        self.frame_at = now
        self.running = state.running
        written_at = now - self.speed.lag_s
        owed: float = state.prefill_tokens_owed
        unseen = len(self.slots) - state.running - state.waiting
        self.foreign = max(0, -unseen)
        self.foreign_blocks = max(0, state.kv_blocks_used - self.kv_booked) if unseen < 0 else 0
        if unseen > 0:
            first_at = now
            for slot in reversed(self.slots.values()):
                owed += slot.prefill_owed
                first_at = slot.dispatched_at
                unseen -= 1
                if not unseen:
                    break
            if not state.prefill_tokens_owed:
                written_at = max(written_at, first_at)
        self._kv_told = state.kv_blocks_used + self._not_admitted_blocks()
        # Of what waits there, the engine does not know yet how much is cached; the books may.
        self._owed = owed if self.foreign else min(owed, self._book_owed)
        self._owed_at = min(written_at, now)

    def _not_admitted_blocks(self) -> int:
        """Return the blocks of the youngest sequences, which the engine does not run yet."""
        blocks, left = 0, len(self.slots) - self.running
        for slot in reversed(self.slots.values()):
            if left <= 0:
                break
            blocks += slot.kv_blocks
            left -= 1
        return blocks

    def owed_tokens(self, now: float) -> float:
        """Return the prompt tokens that the engine still has to compute, predicted for now."""
        left = self._owed - (now - self._owed_at) * self.tokens_s
        return max(0.0, left)

    def output_owed(self) -> int:
        """Return the output tokens that are still expected of live slots."""
        return max(0, self.output_booked - self.emitted)

    def backlog_s(self, now: float) -> float:
        """Return the seconds of prefill that the engine still owes, predicted for now."""
        left_s = self._owed / self.tokens_s - (now - self._owed_at)
        return max(0.0, left_s)

    def prefill_s(self, uncached: int, cached: int) -> float:
        """Return the time that a prompt would take here, after what is owed already."""
        assert self.limits is not None
        return self.speed.prefill_s(uncached, cached, self.limits.step_tokens_max)

    def refresh(self, window_tokens: float, *, is_healthy: bool) -> None:
        """Predict anew when the replica may be sent more.

        Args:
            window_tokens: Prompt tokens owed below which it is sent more; see `core.window`.
            is_healthy: Nothing speaks against it.
        """
        limits = self.limits
        if limits is None:
            self.may_take = False
            return
        budget = limits.step_tokens_max
        prompt_budget = max(budget // 8, budget - self.running)
        self.tokens_s = prompt_budget / self.speed.full_step_s(prompt_budget)
        self.window_tokens = window_tokens
        self.may_take = (
            is_healthy
            and not self.is_draining
            and not self.is_broken
            and len(self.slots) + self.foreign < limits.sequences_max
        )
        over = self._owed - window_tokens
        self.opens_at = self._owed_at + over / self.tokens_s if over >= 0.0 else 0.0
        self.opens_at = max(self.opens_at, self.busy_until)

    def check(self) -> None:
        """Assert that the running sums are those of the slots."""
        slots = self.slots.values()
        assert self._book_owed == sum(slot.prefill_owed for slot in slots)
        assert self.output_booked == sum(slot.output_booked for slot in slots)
        assert self.emitted == sum(slot.emitted for slot in slots)
        assert self.kv_booked == sum(slot.kv_blocks for slot in slots)
