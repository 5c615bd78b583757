"""Turns the logits of a step into new tokens, in the order of `replica.engine.sampling`.

Rows without penalties, masks or logprobs are sampled together in one call. A row after a draft
token assumes that the draft is right, so its history is known before the graph has run. If the
draft is wrong, the row is ignored. So the penalties and grammar masks of all rows are computed
together while the graph runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from replica.engine.grammar import GrammarCompiler, Matcher, bit_mask
from replica.engine.logprobs import score_tokens, token_logprobs
from replica.engine.penalties import Changes, PenaltyCounts, has_penalties
from replica.engine.plan import ScheduledSequence, StepOutput, StepPlan
from replica.engine.sampling import NO_TOKEN, sample
from replica.engine.types import PromptLogprobs, RefusedError, SequenceRequest
from sluice.errors import ErrorCode

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int32]
_NOT_FINITE = "the model's logits are not finite; the base, the adapter or the precision is broken"
_DEAD_END = "the grammar allows no token of this model's vocabulary here"
# Byte of a bit mask -> the values to add to eight logits, each 0 or minus infinity.
_BYTE_TO_LOGITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


class _State:
    """The sampler's state of one sequence.

    The state depends only on the request and the tokens. So a sequence that is preempted and
    computed again continues with the same state.
    """

    __slots__ = (
        "banned",
        "bias",
        "counts",
        "is_changed",
        "is_plain",
        "matcher",
        "output_start",
        "seen",
        "stop_mask",
    )

    def __init__(
        self,
        sequence: ScheduledSequence,
        eos_ids: frozenset[int],
        vocabulary: int,
        grammars: GrammarCompiler | None,
        leader: "_State | None",
    ) -> None:
        sampling = sequence.request.sampling
        stop_ids = np.array(sorted(eos_ids | sequence.request.stop_token_ids), np.intp)
        stop_ids = stop_ids[stop_ids < vocabulary]
        self.output_start = sequence.prompt_tokens - sequence.request.resumed_tokens
        # A leader's state includes the tokens of the prompt and of an earlier attempt, but not yet
        # the leader's new tokens.
        self.seen = self.output_start if leader is None else leader.seen
        self.counts: PenaltyCounts | None = None
        if leader is not None:
            self.counts = leader.counts and leader.counts.copy()
        elif has_penalties(sampling):
            prompt = sequence.tokens[: self.output_start]
            self.counts = PenaltyCounts(prompt if sampling.repetition_penalty != 1 else [])
        self.bias: tuple[npt.NDArray[np.intp], Floats] | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.bias = np.array(ids, np.intp), np.array(values, np.float32)
        self.banned = stop_ids if sampling.tokens_min else None
        self.matcher: Matcher | None = None
        self.stop_mask = np.zeros(0, np.int32)
        if sampling.grammar is not None:
            assert grammars is not None, "refused by check()"
            known = None if leader is None else leader.matcher
            self.matcher = grammars.matcher(sampling.grammar) if known is None else known.copy()
            self.stop_mask = bit_mask(stop_ids, vocabulary)
        parts = (self.counts, self.bias, self.banned, self.matcher)
        self.is_changed = any(part is not None for part in parts)
        self.is_plain = not self.is_changed and sampling.logprobs < 0

    def emitted(self, sequence: ScheduledSequence) -> int:
        """Return the number of output tokens so far, where tokens of an earlier attempt count."""
        return len(sequence.tokens) - self.output_start

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Update penalties and grammar with the tokens emitted since the last call."""
        if self.seen < len(tokens):
            new = tokens[self.seen :]
            self.seen = len(tokens)
            if self.counts is not None:
                self.counts.add(new)
            if self.matcher is not None:
                self.matcher.advance(new)


@dataclass(slots=True)
class _Prepared:
    """The part of a step's sampling that needs no logits.

    A pick is a token to sample. A step has one pick per sampled sequence, followed by one pick per
    token of its draft. `changes` and `masked` refer to rows by their picks.

    Attributes:
        owners: Pick -> index into `plan.sampled`.
        rows: Pick -> row of the logits.
        offsets: Pick -> number of draft tokens before the pick.
        changes: Changes of the logits by penalties, bias and bans.
        masked: Picks whose sequence has a grammar.
        masks: Masks of the grammars, one per entry of `masked`.
        refused: Index into `plan.sampled` -> reason why the sequence's grammar cannot continue.
    """

    plan: StepPlan
    owners: list[int]
    rows: list[int]
    offsets: list[int]
    is_changed: bool = False
    has_logprobs: bool = False
    changes: Changes = field(default_factory=Changes)
    masked: list[int] = field(default_factory=list[int])
    masks: Words = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    refused: dict[int, str] = field(default_factory=dict[int, str])

    def apply(self, logits: Floats) -> None:
        """Apply the changes and masks to the logits of the picks, in place."""
        self.changes.apply(logits)
        vocabulary = logits.shape[1]
        for pick, mask in zip(self.masked, self.masks, strict=True):
            logits[pick] += _BYTE_TO_LOGITS[mask.view(np.uint8)].ravel()[:vocabulary]


class Sampler:
    """Samples the tokens of one engine in one thread. Any thread may call `check`."""

    def __init__(
        self,
        vocabulary: int,
        eos_ids: frozenset[int],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Create a sampler for logits of `vocabulary` columns. Grammars need a compiler.

        The state of each sequence is in `ScheduledSequence.sampler`.
        """
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._grammars = grammars
        self._prepared: _Prepared | None = None

    def check(self, request: SequenceRequest) -> None:
        """Raise RefusedError if the request's grammar is not usable. Any thread may call this.

        This method compiles a new grammar, usually in 1 to 2 ms, and caches it for the sequence. A
        cached grammar costs no time. `replica.engine.grammar_source` describes the worst case.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return
        if self._grammars is None:
            raise RefusedError(
                ErrorCode.UNSUPPORTED_PARAMETER,
                f"a grammar ({grammar.kind.value}): this engine cannot constrain answers",
                param="grammar",
            )
        self._grammars.check(grammar)

    def prepare(self, plan: StepPlan) -> None:
        """Compute everything that needs no logits, while the graph computes the logits."""
        self._prepared = self._prepare(plan)

    def sample(self, logits: Floats, plan: StepPlan) -> StepOutput:
        """Return the new tokens of a step.

        Args:
            logits: Logits of shape (rows, vocabulary), in the order of `replica.engine.plan`. They
                are not changed.
            plan: The computed plan. If `prepare` was not called with it, this method calls it.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.plan is not plan:
            prepared = self._prepare(plan)
        own = logits[: len(prepared.rows)] if not plan.fork_of else logits[prepared.rows]
        values = own
        if prepared.is_changed:
            values = own.copy()
            prepared.apply(values)
        rows = [(sequence.request.sampling, len(sequence.tokens)) for sequence in plan.sampled]
        if plan.drafts:
            picks = zip(prepared.owners, prepared.offsets, strict=True)
            rows = [(rows[owner][0], rows[owner][1] + offset) for owner, offset in picks]
        chosen = sample(values, rows)
        output = StepOutput(
            failed=prepared.refused, refused=dict.fromkeys(prepared.refused, "grammar")
        )
        kept = _keep(prepared, chosen, output)
        if prepared.has_logprobs:
            _add_logprobs(prepared, own, kept, chosen, output)
        output.prompt_logprobs = _prompt_logprobs(logits, plan)
        return output

    def _prepare(self, plan: StepPlan) -> _Prepared:
        prepared = _lay_out(plan)
        changed: list[tuple[int, _State]] = []
        for index, sequence in enumerate(plan.sampled):
            state = sequence.sampler
            if state is None:
                leader = plan.fork_of.get(index)
                try:
                    state = self._begin(
                        sequence, None if leader is None else plan.sampled[leader].sampler
                    )
                except RefusedError as error:
                    prepared.refused[index] = error.message
                    continue
            if state.is_plain:
                continue
            prepared.has_logprobs |= sequence.request.sampling.logprobs >= 0
            if state.is_changed:
                state.catch_up(sequence.tokens)
                changed.append((index, state))
        if changed:
            prepared.is_changed = True
            self._collect(prepared, dict(changed))
        return prepared

    def _begin(self, sequence: ScheduledSequence, leader: _State | None) -> _State:
        """Create and return the state of a sequence before its first token."""
        state = _State(sequence, self._eos_ids, self._vocabulary, self._grammars, leader)
        sequence.sampler = state
        return state

    def _collect(self, prepared: _Prepared, states: dict[int, _State]) -> None:
        """Add the changes and masks of sequences. `states` has their states by index."""
        plan = prepared.plan
        masked: list[tuple[Matcher, int, list[int]]] = []
        for pick, (index, offset) in enumerate(zip(prepared.owners, prepared.offsets, strict=True)):
            state = states.get(index)
            if state is None:
                continue
            sequence = plan.sampled[index]
            sampling = sequence.request.sampling
            if state.counts is not None:
                draft = plan.drafts.get(index, [])
                prepared.changes.penalize(pick, sampling, state.counts.view(draft[:offset]))
            if state.bias is not None:
                prepared.changes.bias(pick, *state.bias)
            if state.matcher is not None:
                if offset == 0:
                    entry = (state.matcher, len(prepared.masked), plan.drafts.get(index, []))
                    masked.append(entry)
                prepared.masked.append(pick)
            elif (
                state.banned is not None and state.emitted(sequence) + offset < sampling.tokens_min
            ):
                prepared.changes.ban(pick, state.banned)
        if masked:
            self._fill_masks(prepared, states, masked)

    def _fill_masks(
        self,
        prepared: _Prepared,
        states: dict[int, _State],
        entries: list[tuple[Matcher, int, list[int]]],
    ) -> None:
        assert self._grammars is not None
        masks = self._grammars.fill(entries, len(prepared.masked))
        is_complete = (masks & self._grammars.eos_mask).any(axis=1)
        for row, pick in enumerate(prepared.masked):
            index = prepared.owners[pick]
            sequence, state = prepared.plan.sampled[index], states[index]
            assert state.matcher is not None
            masks[row] &= state.matcher.text_mask & ~state.stop_mask
            emitted = state.emitted(sequence) + prepared.offsets[pick]
            # The sequence may not be permitted to end yet. Then end tokens are permitted only where
            # the grammar permits no other token.
            is_early = emitted < sequence.request.sampling.tokens_min or not sequence.stop_ids
            if is_complete[row] and not (is_early and masks[row].any()):
                masks[row] |= state.stop_mask if sequence.stop_ids else self._grammars.eos_mask
            if error := state.matcher.error:
                prepared.refused[index] = f"the grammar cannot go on: {error}"
            elif not prepared.offsets[pick] and not masks[row].any():
                prepared.refused[index] = _DEAD_END
        prepared.masks = masks


def _lay_out(plan: StepPlan) -> _Prepared:
    count = len(plan.sampled)
    if not plan.drafts and not plan.fork_of:
        return _Prepared(plan, list(range(count)), list(range(count)), [0] * count)
    prepared = _Prepared(plan, [], [], [])
    rows_of: dict[int, int] = {}
    row = 0
    for index in range(count):
        leader = plan.fork_of.get(index)
        length = 1 + len(plan.drafts.get(index, ()))
        rows_of[index] = first = row if leader is None else rows_of[leader]
        prepared.owners += [index] * length
        prepared.rows += range(first, first + length)
        prepared.offsets += range(length)
        row += length if leader is None else 0
    return prepared


def _keep(prepared: _Prepared, chosen: list[int], output: StepOutput) -> list[int]:
    """Add the valid tokens of all picks to the output, and return the picks of these tokens."""
    plan = prepared.plan
    if NO_TOKEN in chosen:
        for pick, token in enumerate(chosen):
            if token == NO_TOKEN and not prepared.offsets[pick]:
                output.failed.setdefault(prepared.owners[pick], _NOT_FINITE)
    if not plan.drafts:
        output.tokens = chosen
        return prepared.owners
    kept: list[int] = []
    at = 0
    for index, sequence in enumerate(plan.sampled):
        draft = plan.drafts.get(index, [])
        run = _verified(chosen[at : at + 1 + len(draft)], draft, sequence)
        output.tokens.append(run[0])
        if len(run) > 1:
            output.more[index] = run[1:]
        kept += range(at, at + len(run))
        at += 1 + len(draft)
    return kept


def _verified(chosen: list[int], draft: list[int], sequence: ScheduledSequence) -> list[int]:
    """Return the valid tokens, up to a stop token or the first that differs from the draft.

    If a row cannot be sampled, the valid tokens end before that row. The next step computes the row
    again as its first.
    """
    count = 1
    for token, tried in zip(chosen, draft, strict=False):
        if token != tried or token in sequence.stop_ids or chosen[count] == NO_TOKEN:
            break
        count += 1
    return chosen[:count]


def _add_logprobs(
    prepared: _Prepared, logits: Floats, kept: list[int], chosen: list[int], output: StepOutput
) -> None:
    """Add the logprobs of the valid tokens to the output, for sequences that requested any."""
    requests = [sequence.request for sequence in prepared.plan.sampled]
    owners = prepared.owners
    picks = [
        pick
        for pick in kept
        if requests[owners[pick]].sampling.logprobs >= 0 and owners[pick] not in output.failed
    ]
    if not picks:
        return
    entries = token_logprobs(
        logits[picks],
        [chosen[pick] for pick in picks],
        [requests[owners[pick]].sampling.logprobs for pick in picks],
        [requests[owners[pick]].key for pick in picks],
    )
    for pick, entry in zip(picks, entries, strict=True):
        output.logprobs.setdefault(owners[pick], []).append(entry)


def _prompt_logprobs(logits: Floats, plan: StepPlan) -> list[PromptLogprobs]:
    """Return the logprobs of prompt tokens. The row of a position predicts the next token."""
    parts: list[PromptLogprobs] = []
    row = len(logits)
    for sequence, count in reversed(plan.prefill):
        request = sequence.request
        if request.prompt_logprobs < 0:
            continue
        told = sequence.logprob_rows(count)
        row -= len(told)
        # Emitted tokens that are computed again do not belong to the prompt. A position that was
        # reported is not reported again.
        first = max(sequence.computed + 1, sequence.scored)
        end = min(sequence.computed + count + 1, sequence.prompt_tokens)
        if first >= end:
            continue
        begin = row + first - sequence.computed - 1 - told.start
        rows, ids = logits[begin : begin + end - first], sequence.tokens[first:end]
        if request.scored_tokens:
            tokens = score_tokens(rows, ids, request.key)
        else:
            tops, keys = [request.prompt_logprobs] * len(ids), [request.key] * len(ids)
            tokens = token_logprobs(rows, ids, tops, keys)
        parts.append(PromptLogprobs(request.key, first, tuple(tokens)))
    parts.reverse()
    return parts
