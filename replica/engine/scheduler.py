"""Continuous batching: which tokens of which sequences the next step computes.

Each step: first one token for every decoding sequence, then prompt chunks of admitted sequences in
order, then new admissions, all within `step_tokens_max`. A sequence is admitted when its whole
prompt fits into the pool above a watermark. When decoding sequences need a block and none is left,
the least important sequence (lowest priority, then newest) is preempted: it gives its blocks back,
waits at its old place, and is computed again from its prompt and the tokens it has emitted; most of
that is usually still cached. The most important sequence always moves, so nothing stands still.
"""

from heapq import heappop, heappush

from replica.engine.blocks import BlockPool
from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.types import (
    AdmittedEvent,
    EngineLoad,
    Finish,
    FinishedEvent,
    Limits,
    SequenceRequest,
    StepEvents,
)
from replica.engine.validation import check_request
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS, block_hashes

# Prompts move by this much even when decoding sequences take up the whole step.
_PREFILL_TOKENS_MIN = 16


class Scheduler:
    """Owns the living sequences and the pool; knows nothing of models and clocks."""

    def __init__(
        self,
        limits: Limits,
        *,
        root: bytes,
        eos_ids: frozenset[int],
        prefix_cache: bool = True,
        watermark_ratio: float = 0.01,
    ) -> None:
        """Make an idle scheduler.

        Args:
            limits: Constant from here on.
            root: Hash chain root of sequences that name none.
            eos_ids: The model's own end-of-sequence ids.
            prefix_cache: Off: every prompt is computed in full.
            watermark_ratio: Share of the pool that admissions leave to sequences that run.
        """
        self.limits = limits
        self.pool = BlockPool(limits.kv_blocks)
        self.preemptions = 0
        self._root = root
        self._eos_ids = eos_ids
        self._prefix_cache = prefix_cache
        self._watermark = max(1, int(limits.kv_blocks * watermark_ratio))
        self._living: dict[int, ScheduledSequence] = {}
        self._waiting: list[tuple[tuple[int, int], ScheduledSequence]] = []  # heap; may hold ended
        self._waiting_count = self._waiting_tokens = 0
        self._prefilling: list[ScheduledSequence] = []
        self._decoding: list[ScheduledSequence] = []
        self._arrivals = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._events = StepEvents()

    @property
    def has_work(self) -> bool:
        """Whether any sequence lives or any event was not taken."""
        return bool(self._living or self._events.finished)

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence; RefusedError when it is not valid here."""
        check_request(request, self.limits)
        assert request.key not in self._living, request.key
        stop_ids = request.stop_token_ids
        if request.ignore_eos:
            stop_ids = frozenset()
        elif not self._eos_ids <= stop_ids:
            stop_ids = stop_ids | self._eos_ids
        self._arrivals += 1
        root = request.cache_root or self._root
        sequence = ScheduledSequence(request, self._arrivals, root, stop_ids)
        self._living[request.key] = sequence
        self._wait(sequence)

    def cancel(self, key: int) -> None:
        """End a sequence now; its event comes with the next step."""
        sequence = self._living.get(key)
        if sequence is not None:
            self._remove(sequence)
            self._finish(sequence, Finish.CANCELLED)

    def load(self, step_s: float) -> EngineLoad:
        """Return the present state."""
        return EngineLoad(
            running=len(self._prefilling) + len(self._decoding),
            waiting=self._waiting_count,
            kv_blocks_used=self.pool.used,
            prefill_tokens_owed=self._waiting_tokens
            + sum(len(s.tokens) - s.computed for s in self._prefilling),
            step_s=step_s,
            preemptions=self.preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def plan(self, now_s: float) -> StepPlan:
        """Choose the next step; empty when nothing runs."""
        preempted_before = self.preemptions
        self._grow()
        self._admit_urgent(now_s)
        left = max(_PREFILL_TOKENS_MIN, self.limits.step_tokens_max - len(self._decoding))
        prefill: list[tuple[ScheduledSequence, int]] = []
        for sequence in self._prefilling:
            count = min(len(sequence.tokens) - sequence.computed, left)
            if count <= 0:
                break
            prefill.append((sequence, count))
            left -= count
        # Who has just been preempted would be the first to come back, and to be preempted again.
        while left > 0 and self.preemptions == preempted_before:
            sequence = self._admit_next(now_s)
            if sequence is None:
                break
            count = min(len(sequence.tokens) - sequence.computed, left)
            prefill.append((sequence, count))
            left -= count
        return StepPlan(self._decoding, prefill)

    def commit(self, plan: StepPlan, tokens: list[int], now_s: float) -> None:
        """Record that a planned step was computed; `tokens[i]` belongs to `plan.sampled[i]`."""
        for sequence in plan.decode:
            sequence.computed = computed = sequence.computed + 1
            if computed % BLOCK_TOKENS == 0:
                self._publish(sequence, computed - 1)
        for sequence, count in plan.prefill:
            before = sequence.computed
            sequence.computed += count
            self._publish(sequence, before)
        if plan.prefill:
            begun = [s for s in self._prefilling if s.computed == len(s.tokens)]
            for sequence in begun:
                if sequence.first_token_at_s is None:
                    sequence.first_token_at_s = now_s
            self._prefilling = [s for s in self._prefilling if s.computed < len(s.tokens)]
            self._decoding = self._decoding + begun
        self._emit(plan.sampled, tokens)

    def fail(self, plan: StepPlan, message: str) -> None:
        """End the sequences of a step that could not be computed; they may be retried elsewhere."""
        for sequence in plan.decode + [s for s, _ in plan.prefill]:
            self._remove(sequence)
            self._finish(sequence, Finish.FAILED, ErrorCode.ENGINE_FAILED, message)

    def take_events(self) -> StepEvents:
        """Return what happened since the last call."""
        events, self._events = self._events, StepEvents()
        events.kv = self.pool.drain_events()
        return events

    def _emit(self, sampled: list[ScheduledSequence], tokens: list[int]) -> None:
        """Append the new tokens; the hot loop of an engine with many sequences."""
        assert len(sampled) == len(tokens), (len(sampled), len(tokens))
        events = self._events
        events.keys += [sequence.request.key for sequence in sampled]
        events.tokens += tokens
        ended: list[tuple[ScheduledSequence, Finish]] = []
        for sequence, token in zip(sampled, tokens, strict=True):
            own = sequence.tokens
            own.append(token)
            if token in sequence.stop_ids:
                ended.append((sequence, Finish.STOP))
            elif len(own) >= sequence.tokens_max:
                ended.append((sequence, Finish.LENGTH))
        for sequence, reason in ended:
            self._release(sequence)
            self._finish(sequence, reason)
        if ended:
            self._decoding = [s for s in self._decoding if not s.ended]

    def _wait(self, sequence: ScheduledSequence) -> None:
        heappush(self._waiting, (sequence.rank(), sequence))
        self._waiting_count += 1
        self._waiting_tokens += len(sequence.tokens)

    def _next_waiting(self) -> ScheduledSequence | None:
        while self._waiting and self._waiting[0][1].ended:
            heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _admit_next(self, now_s: float) -> ScheduledSequence | None:
        """Admit the first of the queue; None when there is none or it does not fit yet."""
        running = len(self._prefilling) + len(self._decoding)
        sequence = self._next_waiting()
        if sequence is None or running >= self.limits.sequences_max:
            return None
        hits, spare = self._room_for(sequence)
        if spare < (self._watermark if running else 0):
            assert running, "validation lets no sequence in that the empty pool cannot hold"
            return None
        self._admit(sequence, hits, now_s)
        self._prefilling.append(sequence)
        return sequence

    def _admit_urgent(self, now_s: float) -> None:
        """Admit probes at once, beyond `sequences_max` and at the cost of others' blocks.

        A probe that waited for its turn would find a busy engine dead.
        """
        while (sequence := self._next_waiting()) and sequence.is_urgent:
            hits, spare = self._room_for(sequence)
            running = self._prefilling + self._decoding
            if spare >= 0:
                self._admit(sequence, hits, now_s)
                self._prefilling.insert(0, sequence)
                continue
            victim = max(running, key=ScheduledSequence.rank)
            if victim.is_urgent:
                return
            self._preempt(victim)

    def _room_for(self, sequence: ScheduledSequence) -> tuple[int, int]:
        """Return (cached blocks of a waiting sequence, blocks to spare if it is admitted)."""
        # At least one token must be computed, to have logits.
        full = (len(sequence.tokens) - 1) // BLOCK_TOKENS if self._prefix_cache else 0
        if len(sequence.hashes) < full:
            sequence.hashes = block_hashes(sequence.tokens, sequence.root, full, sequence.hashes)
        hits, idle = self.pool.find(sequence.hashes[:full])
        needed = -(-len(sequence.tokens) // BLOCK_TOKENS) - hits
        return hits, self.pool.available - idle - needed

    def _admit(self, sequence: ScheduledSequence, hits: int, now_s: float) -> None:
        """Give the first of the queue its blocks, of which `hits` are cached."""
        heappop(self._waiting)
        self._waiting_count -= 1
        self._waiting_tokens -= len(sequence.tokens)
        sequence.blocks = [self.pool.share(key) for key in sequence.hashes[:hits]]
        while len(sequence.blocks) * BLOCK_TOKENS < len(sequence.tokens):
            taken = self._take(sequence)
            assert taken, "the room was counted before"
        sequence.capacity = len(sequence.blocks) * BLOCK_TOKENS
        sequence.computed = hits * BLOCK_TOKENS
        if sequence.admitted_at_s is None:
            sequence.admitted_at_s = now_s
            queue_s = max(0.0, now_s - sequence.request.submitted_at_s)
            self._prompt_tokens += sequence.prompt_tokens
            self._cached_tokens += sequence.computed
            self._events.admitted.append(
                AdmittedEvent(sequence.request.key, queue_s, sequence.computed)
            )

    def _take(self, sequence: ScheduledSequence) -> bool:
        block = self.pool.take()
        if block is None:
            return False
        sequence.blocks.append(block)
        return True

    def _grow(self) -> None:
        """Give every decoding sequence room for its next token, preempting where there is none."""
        short = [s for s in self._decoding if s.computed >= s.capacity]
        if len(short) > 1:
            short.sort(key=ScheduledSequence.rank)
        for sequence in short:
            while sequence.blocks and not self._take(sequence):
                victim = max(self._prefilling + self._decoding, key=ScheduledSequence.rank)
                self._preempt(victim)
            if sequence.blocks:
                sequence.capacity += BLOCK_TOKENS

    def _preempt(self, victim: ScheduledSequence) -> None:
        """Take a running sequence's blocks; leaves `blocks` empty, which tells `_grow`."""
        self.preemptions += 1
        self._remove(victim)
        victim.computed = 0
        self._wait(victim)

    def _remove(self, sequence: ScheduledSequence) -> None:
        """Take a sequence out of wherever it is."""
        if sequence.blocks:
            self._prefilling = [s for s in self._prefilling if s is not sequence]
            self._decoding = [s for s in self._decoding if s is not sequence]
            self._release(sequence)
        else:
            self._waiting_count -= 1  # it stays in the heap, marked as ended
            self._waiting_tokens -= len(sequence.tokens)

    def _release(self, sequence: ScheduledSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.capacity = 0

    def _publish(self, sequence: ScheduledSequence, before: int) -> None:
        """Make the blocks findable that became full since `before` tokens were computed."""
        if not self._prefix_cache:
            return
        for index in range(before // BLOCK_TOKENS, sequence.computed // BLOCK_TOKENS):
            hashes = sequence.hashes
            if len(hashes) == index:
                ids = sequence.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                hashes += block_hashes(ids, hashes[-1] if hashes else sequence.root, 1)
            self.pool.publish(sequence.blocks[index], hashes[index])

    def _finish(
        self, sequence: ScheduledSequence, reason: Finish, code: str = "", message: str = ""
    ) -> None:
        sequence.ended = True
        del self._living[sequence.request.key]
        begun, first = sequence.admitted_at_s, sequence.first_token_at_s
        self._events.finished.append(
            FinishedEvent(
                key=sequence.request.key,
                reason=reason,
                code=code,
                message=message,
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=len(sequence.tokens) - sequence.prompt_tokens,
                prefill_s=0.0 if begun is None or first is None else first - begun,
            )
        )
