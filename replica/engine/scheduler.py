"""Chooses which tokens of which sequences a step computes (continuous batching).

A step has at most `step_tokens_max` tokens. They are assigned in this order: one token for every
decoding sequence, prompt chunks of admitted sequences, new admissions, drafts. A sequence is
admitted when its whole prompt fits and leaves the watermark free. When a decoding sequence needs
a block and none is left, the least important sequence (lowest priority, then newest) is preempted.
It releases its blocks, and waits at its old position. Later its prompt and emitted tokens are
computed again, but most of them are usually still cached. The most important sequence always
advances, if necessary after an eviction of pinned blocks. So the engine always makes progress.

The first of several siblings (n > 1) is their leader, for whose prompt the others wait. They start
in the step that computes the prompt's end. There they share its full blocks and copy the unfinished
block. Siblings that do not fit, or whose leader ends early, are queued again with a new leader.
"""

from dataclasses import replace

from replica.engine.adapter_table import AdapterTable
from replica.engine.blocks import PIN_S, BlockPool
from replica.engine.emission import emit, report_prompts
from replica.engine.plan import NO_SLOT, ScheduledSequence, StepOutput, StepPlan
from replica.engine.types import (
    AdapterState,
    AdmittedEvent,
    EngineLoad,
    Finish,
    FinishedEvent,
    Limits,
    SequenceRequest,
    StepEvents,
)
from replica.engine.waiting import WaitingQueue
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS, block_hashes

# Tokens per step that are reserved for prompts, even if decoding sequences fill the step.
_PREFILL_TOKENS_MIN = 16


class EngineScheduler:
    """Owns the living sequences and the block pool, without a model and a clock."""

    def __init__(
        self,
        limits: Limits,
        *,
        root: bytes,
        eos_ids: frozenset[int],
        prefix_cache: bool = True,
        watermark_ratio: float = 0.01,
        adapters: AdapterTable | None = None,
    ) -> None:
        """Create an idle scheduler.

        Args:
            limits: Limits of the engine, which never change.
            root: Root of the hash chain for sequences that name no root.
            eos_ids: The model's own end-of-sequence ids.
            prefix_cache: Whether prefixes are cached. If not, whole prompts are computed.
            watermark_ratio: Share of the pool that admissions must leave free for running
                sequences.
            adapters: Table of adapters, or None for an engine without adapters.
        """
        self.limits = limits
        self.pool = BlockPool(limits.kv_blocks)
        self.adapters = adapters or AdapterTable(0, 0)
        self.has_prefix_cache = prefix_cache
        self.preemptions = self._arrivals = 0
        self._root = root
        self._eos_ids = eos_ids
        self._watermark = max(1, int(limits.kv_blocks * watermark_ratio))
        self._living: dict[int, ScheduledSequence] = {}
        self._waiting = WaitingQueue(self.adapters)
        self._following = 0  # number of siblings that wait for their leaders
        self._prefilling: list[ScheduledSequence] = []
        self._joining: list[ScheduledSequence] = []  # siblings that start in this step
        self._decoding: list[ScheduledSequence] = []
        self._drafting = 0  # number of living sequences with a drafter
        self._prompt_tokens = self._cached_tokens = 0
        self._draft_tokens = self._accepted_tokens = 0
        self._events = StepEvents()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is living, or any event was not returned yet."""
        return bool(self._living or self._events.finished or self.pool.has_events)

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence and its siblings. The request is valid, and its adapter is loaded."""
        stop_ids = request.stop_token_ids
        if request.ignore_eos:
            stop_ids = frozenset()
        elif not self._eos_ids <= stop_ids:
            stop_ids = stop_ids | self._eos_ids
        leader = self._enter(request, stop_ids, None)
        for fork in request.forks:
            own = replace(
                request,
                key=fork.key,
                sampling=replace(request.sampling, seed=fork.seed),
                forks=(),
                prompt_logprobs=-1,  # only the leader reports the prompt's logprobs
            )
            self._enter(own, stop_ids, leader)
        self._waiting.push(leader)

    def cancel(self, key: int) -> None:
        """End a sequence at once. The next step reports the end."""
        sequence = self._living.get(key)
        if sequence is not None:
            self._remove(sequence)
            self._finish(sequence, Finish.CANCELLED)

    def load(self, step_s: float, step_prompt_tokens: int) -> EngineLoad:
        """Return the present load. The caller passes the figures of the last step."""
        return EngineLoad(
            running=self._running,
            waiting=self._waiting.count + self._following,
            kv_blocks_used=self.pool.used,
            prefill_tokens_owed=self._waiting.tokens
            + sum(len(s.tokens) - s.computed for s in self._prefilling),
            step_s=step_s,
            preemptions=self.preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            kv_blocks_pinned=self.pool.pinned,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            adapters_resident=self.adapters.resident,
            prefilling=len(self._prefilling),
            step_prompt_tokens=step_prompt_tokens,
        )

    def adapter_states(self) -> list[AdapterState]:
        """Return the states and counters of all adapters."""
        emitted: dict[str, int] = {}
        for sequence in self._living.values():
            digest = sequence.request.adapter_digest
            emitted[digest] = emitted.get(digest, 0) + sequence.output_tokens
        return self.adapters.states(emitted)

    def plan(self, now_s: float) -> StepPlan:
        """Return the plan of the next step, which is empty if no sequence can run."""
        preempted_before = self.preemptions
        self.pool.expire_pins(now_s)
        self._grow()
        self._admit_urgent(now_s)
        plan = StepPlan(self._decoding, [], self._decoding.copy())
        # After a preemption nothing is admitted, because the victim would be preempted again.
        self._fill(plan, now_s, admits=self.preemptions == preempted_before)
        if plan:
            plan.loads = self.adapters.take_loads()
        if self._drafting:
            self._draft(plan)
        return plan

    def commit(self, plan: StepPlan, output: StepOutput, now_s: float) -> None:
        """Apply the output of a computed step to the sequences and the pool."""
        self._advance(plan, now_s)
        if output.prompt_logprobs:
            report_prompts(output.prompt_logprobs, self._living, self._events)
        for index, draft in plan.drafts.items():
            self._learn(plan.decode[index], len(draft), len(output.more.get(index, ())))
        ended, runs = emit(plan.sampled, output, self._events)
        for sequence, count in runs:
            before = sequence.computed
            sequence.computed += count
            self._publish(sequence, before)
        for index, message in output.failed.items():
            self._release(plan.sampled[index])
            reason, code = Finish.FAILED, ErrorCode.ENGINE_FAILED
            if param := output.refused.get(index, ""):
                reason, code = Finish.REFUSED, ErrorCode.INVALID_REQUEST
            self._finish(plan.sampled[index], reason, code, message, param)
        for sequence, reason in ended:
            self._release(sequence)
            self._finish(sequence, reason)
        if ended or output.failed:
            self._decoding = [s for s in self._decoding if not s.ended]

    def fail(self, plan: StepPlan, message: str) -> None:
        """End all sequences of a failed step. Another engine may retry these sequences."""
        self._decoding = self._decoding + self._joining
        joined, self._joining = self._joining, []
        for sequence in plan.decode + [s for s, _ in plan.prefill] + joined:
            self._remove(sequence)
            self._finish(sequence, Finish.FAILED, ErrorCode.ENGINE_FAILED, message)
        self.adapters.redo_loads(plan.loads)

    def take_events(self) -> StepEvents:
        """Return the events since the previous call of this method."""
        events, self._events = self._events, StepEvents()
        events.kv = self.pool.drain_events()
        return events

    @property
    def _running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._joining)

    def _enter(
        self,
        request: SequenceRequest,
        stop_ids: frozenset[int],
        leader: ScheduledSequence | None,
    ) -> ScheduledSequence:
        """Register a new sequence. A sequence with a leader waits for the leader's prompt."""
        assert request.key not in self._living, request.key
        self._arrivals += 1
        root = request.cache_root or self._root
        sequence = ScheduledSequence(request, self._arrivals, root, stop_ids, leader)
        self._living[request.key] = sequence
        if request.adapter_digest:
            self.adapters.join(request.adapter_digest)
        self._drafting += sequence.drafter is not None
        if leader is not None:
            self._follow(sequence, leader)
        return sequence

    def _follow(self, sequence: ScheduledSequence, leader: ScheduledSequence) -> None:
        sequence.leader = leader
        sequence.tokens = leader.tokens
        leader.forks.append(sequence)
        self._following += 1

    def _unfollow(self, sequence: ScheduledSequence) -> None:
        assert sequence.leader is not None, sequence.request.key
        sequence.leader.forks.remove(sequence)
        sequence.leader = None
        self._following -= 1

    def _hand_over(self, leader: ScheduledSequence) -> ScheduledSequence:
        """Queue the first of a leader's waiting siblings. It becomes the leader of the others."""
        heir, *others = leader.forks
        self._unfollow(heir)
        heir.tokens = leader.tokens[:]
        for sibling in others:
            self._unfollow(sibling)
            self._follow(sibling, heir)
        self._waiting.push(heir)
        return heir

    def _fill(self, plan: StepPlan, now_s: float, *, admits: bool) -> None:
        """Add prompt chunks to a plan: first of admitted sequences, then of new admissions."""
        left = max(_PREFILL_TOKENS_MIN, self.limits.step_tokens_max - len(plan.decode))
        begun = iter(self._prefilling.copy())
        while left > 0:
            sequence = next(begun, None)
            if sequence is None and admits:
                sequence = self._admit_next(now_s)
            if sequence is None:
                return
            count = min(len(sequence.tokens) - sequence.computed, left)
            left -= count
            plan.prefill.append((sequence, count))
            if sequence.computed + count == len(sequence.tokens):
                plan.sampled.append(sequence)
                if sequence.forks:
                    self._fork(plan, sequence, now_s)

    def _fork(self, plan: StepPlan, leader: ScheduledSequence, now_s: float) -> None:
        """Start the siblings that fit, after their leader's prompt was added to the plan last."""
        row = len(plan.sampled) - 1
        full, unfinished = divmod(leader.prompt_tokens, BLOCK_TOKENS)
        while leader.forks:
            has_room = not unfinished or self.pool.available > self._watermark
            if self._running >= self.limits.sequences_max or not has_room:
                self._hand_over(leader)
                return
            sibling = leader.forks[0]
            self._unfollow(sibling)
            sibling.tokens = leader.tokens[:]
            sibling.blocks = leader.blocks[:full]
            sibling.capacity = full * BLOCK_TOKENS
            self.pool.share(sibling.blocks)
            if unfinished:
                self._take(sibling)
                plan.copies.append((leader.blocks[full], sibling.blocks[full]))
            self._begin(sibling, sibling.prompt_tokens, now_s)
            self._joining.append(sibling)
            plan.fork_of[len(plan.sampled)] = row
            plan.sampled.append(sibling)

    def _advance(self, plan: StepPlan, now_s: float) -> None:
        """Record the computed tokens. A sequence whose prompt is complete begins to decode."""
        for sequence in plan.decode:
            sequence.computed = computed = sequence.computed + 1
            if computed % BLOCK_TOKENS == 0:
                self._publish(sequence, computed - 1)
        if not plan.prefill:
            return
        for sequence, count in plan.prefill:
            before = sequence.computed
            sequence.computed += count
            self._publish(sequence, before)
        for index, leader_index in plan.fork_of.items():
            fork, leader = plan.sampled[index], plan.sampled[leader_index]
            fork.computed = leader.computed
            fork.hashes = leader.hashes.copy()
        begun = plan.sampled[len(plan.decode) :]
        for one in begun:
            if one.first_token_at_s is None:
                one.first_token_at_s = now_s
                self.pool.pin(one.hashes[: one.request.pinned_blocks], now_s + PIN_S, now_s)
        self._prefilling = [s for s in self._prefilling if s.computed < len(s.tokens)]
        self._decoding = self._decoding + begun
        self._joining = []

    def _draft(self, plan: StepPlan) -> None:
        """Fill the free tokens of the step with drafts, in blocks that no other sequence needs."""
        left = self.limits.step_tokens_max - plan.tokens
        for index, sequence in enumerate(plan.decode):
            if left <= 0:
                return
            if sequence.drafter is None:
                continue
            wanted = min(left, sequence.tokens_max - len(sequence.tokens) - 1)
            draft = sequence.drafter.propose(sequence.tokens, wanted)
            while sequence.capacity <= sequence.computed + len(draft):
                if self.pool.available <= self._watermark or not self._take(sequence):
                    del draft[sequence.capacity - sequence.computed - 1 :]
            if draft:
                plan.drafts[index] = draft
                left -= len(draft)

    def _learn(self, sequence: ScheduledSequence, tried: int, right: int) -> None:
        assert sequence.drafter is not None
        sequence.drafter.observe(tried, right)
        self._draft_tokens += tried
        self._accepted_tokens += right

    def _admit_next(self, now_s: float) -> ScheduledSequence | None:
        """Admit the first sequence of the queue. Returns None if it does not fit or none waits."""
        if self._running >= self.limits.sequences_max:
            return None
        sequence = self._waiting.first()
        if sequence is None:
            return None
        cached, spare = self._room_for(sequence)
        if spare < 0 and not self._running:
            self.pool.drop_pins()
            cached, spare = self._room_for(sequence)
            assert spare >= 0, "validation lets no sequence in that the empty pool cannot hold"
        if spare < (self._watermark if self._running else 0):
            return None
        self._admit(sequence, cached, now_s)
        self._prefilling.append(sequence)
        return sequence

    def _admit_urgent(self, now_s: float) -> None:
        """Admit probes at once, even beyond `sequences_max`, and preempt sequences if necessary.

        If a probe had to wait, a busy engine would appear dead.
        """
        while (sequence := self._waiting.first()) and sequence.is_urgent:
            cached, spare = self._room_for(sequence)
            if spare >= 0:
                self._admit(sequence, cached, now_s)
                self._prefilling.insert(0, sequence)
                continue
            victim = max(
                self._prefilling + self._decoding, key=ScheduledSequence.rank, default=None
            )
            if victim is None:
                self.pool.drop_pins()
            elif victim.is_urgent:
                return
            else:
                self._preempt(victim)

    def _room_for(self, sequence: ScheduledSequence) -> tuple[list[int], int]:
        """Return a sequence's cached blocks, and the number of blocks left if admitted."""
        # The last token must be computed in any case, because sampling needs its logits.
        full = (len(sequence.tokens) - 1) // BLOCK_TOKENS if self.has_prefix_cache else 0
        if len(sequence.hashes) < full:
            tokens, root, known = sequence.tokens, sequence.root, sequence.hashes
            sequence.hashes = block_hashes(tokens, root, full, known)
        if sequence.request.prompt_logprobs >= 0 and sequence.scored < sequence.prompt_tokens:
            # The first logprob to report is computed at the token before it.
            full = min(full, (sequence.scored - 1) // BLOCK_TOKENS)
        cached = self.pool.find(sequence.hashes[:full])
        needed = -(-len(sequence.tokens) // BLOCK_TOKENS) - len(cached)
        return cached, self.pool.available - self.pool.idle_in(cached) - needed

    def _admit(self, sequence: ScheduledSequence, cached: list[int], now_s: float) -> None:
        """Allocate all blocks of the queue's first sequence, of which the first are cached."""
        self._waiting.pop(sequence)
        self.pool.share(cached)
        sequence.blocks = cached
        sequence.computed = sequence.capacity = len(cached) * BLOCK_TOKENS
        while sequence.capacity < len(sequence.tokens):
            taken = self._take(sequence)
            assert taken, "the room was counted before"
        self._begin(sequence, sequence.computed, now_s)

    def _begin(self, sequence: ScheduledSequence, cached_tokens: int, now_s: float) -> None:
        """Assign an adapter slot to a sequence that has its blocks, and report its admission."""
        request = sequence.request
        if request.adapter_digest:
            sequence.slot = self.adapters.acquire(request.adapter_digest)
        if sequence.admitted_at_s is None:
            sequence.admitted_at_s = now_s
            queue_s = max(0.0, now_s - request.submitted_at_s)
            self._prompt_tokens += sequence.prompt_tokens
            self._cached_tokens += cached_tokens
            self._events.admitted.append(AdmittedEvent(request.key, queue_s, cached_tokens))
            if request.adapter_digest:
                self.adapters.count_prompt(request.adapter_digest, sequence.prompt_tokens)

    def _take(self, sequence: ScheduledSequence) -> bool:
        block = self.pool.take()
        if block is None:
            return False
        sequence.blocks.append(block)
        sequence.capacity += BLOCK_TOKENS
        return True

    def _grow(self) -> None:
        """Allocate a block to every decoding sequence that needs one, and preempt if necessary."""
        short = [s for s in self._decoding if s.computed >= s.capacity]
        if len(short) > 1:
            short.sort(key=ScheduledSequence.rank)
        for sequence in short:
            while sequence.blocks and not self._take(sequence):
                if self._running == 1:
                    assert self.pool.pinned, "validation lets in nothing that the pool cannot hold"
                    self.pool.drop_pins()
                else:
                    running = self._prefilling + self._decoding
                    self._preempt(max(running, key=ScheduledSequence.rank))

    def _preempt(self, victim: ScheduledSequence) -> None:
        """Release a sequence's blocks and queue the sequence. Its `blocks` are then empty."""
        self.preemptions += 1
        self._remove(victim)
        victim.computed = 0
        self._waiting.push(victim)

    def _remove(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence from the batch, from its leader's siblings, or from the queue."""
        if sequence.blocks:
            self._prefilling = [s for s in self._prefilling if s is not sequence]
            self._decoding = [s for s in self._decoding if s is not sequence]
            self._release(sequence)
        elif sequence.leader is not None:
            self._unfollow(sequence)
        else:
            self._waiting.discard(sequence)

    def _release(self, sequence: ScheduledSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.capacity = 0
        if sequence.slot != NO_SLOT:
            self.adapters.release(sequence.request.adapter_digest)
            sequence.slot = NO_SLOT

    def _publish(self, sequence: ScheduledSequence, before: int) -> None:
        """Add the blocks that became full after the first `before` tokens to the prefix cache."""
        if not self.has_prefix_cache:
            return
        first, stop = before // BLOCK_TOKENS, sequence.computed // BLOCK_TOKENS
        known = sequence.hashes
        if len(known) < stop:
            ids = sequence.tokens[len(known) * BLOCK_TOKENS : stop * BLOCK_TOKENS]
            known += block_hashes(ids, known[-1] if known else sequence.root, stop - len(known))
        self.pool.publish(sequence.blocks, known, first, stop)

    def _finish(
        self,
        sequence: ScheduledSequence,
        reason: Finish,
        code: str = "",
        message: str = "",
        param: str = "",
    ) -> None:
        sequence.ended = True
        request = sequence.request
        del self._living[request.key]
        self._drafting -= sequence.drafter is not None
        if request.adapter_digest:
            self.adapters.leave(request.adapter_digest, sequence.output_tokens)
        if sequence.forks:
            # The leader has not reported the prompt's logprobs, so the new leader reports them.
            heir = self._hand_over(sequence)
            heir.request = replace(heir.request, prompt_logprobs=request.prompt_logprobs)
        self._events.finished.append(
            FinishedEvent(
                key=request.key,
                reason=reason,
                code=code,
                message=message,
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=sequence.output_tokens,
                prefill_s=sequence.prefill_s,
                param=param,
                drafts=sequence.drafts,
                score=sequence.final_score,
            )
        )
