"""Encodes `StepNews` as the bytes of a frame, with one column for the tokens of a step."""

from collections.abc import Iterable
from itertools import chain

from replica.engine.types import Capabilities, EngineLoad, Limits, PromptLogprobs, TokenLogprobs
from replica.host.news import SequenceRecord, StepNews
from sluice.hashing import BLOCK_TOKENS
from sluice.prompt_spans import PROMPT_SPANS
from sluice.wire.engine.v1 import engine_pb2 as wire

_UINT32_MAX = (1 << 32) - 1


class FrameEncoder:
    """Encodes one attachment's news, numbers its KV events, and sends changes of the adapters."""

    def __init__(self, kv_blocks: int, adapters_told: tuple[str, ...] = ()) -> None:
        """Create an encoder for a router that was already sent `adapters_told` as resident."""
        self._kv_blocks = kv_blocks
        self._kv_number = 0
        self._adapters_sent = adapters_told

    def encode(self, news: StepNews) -> bytes:
        """Return the bytes of the HostFrame for these news."""
        host_frame = wire.HostFrame()
        frame = host_frame.step
        frame.step = news.step
        frame.steps = news.steps
        if news.columns:
            _fill_columns(frame, news)
        if news.logprobs:
            fill_logprobs(frame.logprobs, news.logprobs)
        if news.prompt_logprobs:
            frame.prompt_logprobs.extend(news.prompt_logprobs)
        if news.admitted:
            frame.admitted.extend(news.admitted)
        if news.ended:
            frame.finished.extend([ended.finished for ended in news.ended])
        if news.kv or news.kv_reset:
            self._fill_kv(frame.kv_events, news)
        fill_state(frame.state, news.load, self._kv_blocks)
        resident = news.load.adapters_resident
        if resident is not self._adapters_sent:
            if resident != self._adapters_sent:
                fill_adapters(frame.state, resident)
            self._adapters_sent = resident
        return host_frame.SerializeToString()

    def _fill_kv(self, events: wire.KvEvents, news: StepNews) -> None:
        stored = [key for key, is_cached in news.kv.items() if is_cached]
        removed = [key for key, is_cached in news.kv.items() if not is_cached]
        if news.kv_reset:
            removed = []
        self._kv_number += len(stored) + len(removed)
        events.number = self._kv_number
        events.stored = b"".join(stored)
        events.removed = b"".join(removed)
        events.reset = news.kv_reset


def micros(duration_s: float) -> int:
    """Return a duration in whole microseconds, clamped to the wire's range of 0 to 71 minutes."""
    return max(0, min(int(duration_s * 1e6), _UINT32_MAX))


def fill_state(state: wire.EngineState, load: EngineLoad, kv_blocks: int) -> None:
    """Copy the engine's load into its wire message."""
    state.running = load.running
    state.waiting = load.waiting
    state.kv_blocks_used = load.kv_blocks_used
    state.kv_blocks_total = kv_blocks
    state.kv_blocks_pinned = load.kv_blocks_pinned
    state.prefill_tokens_owed = load.prefill_tokens_owed
    state.step_us = micros(load.step_s)
    state.step_prompt_tokens = load.step_prompt_tokens
    state.prefilling = load.prefilling


def fill_adapters(state: wire.EngineState, resident: tuple[str, ...]) -> None:
    """Write the complete list of the adapters in slots."""
    state.adapters_resident.extend(resident)
    state.adapters_changed = True


def encode_limits(
    engine: str, base_digest: str, limits: Limits, can: Capabilities
) -> wire.EngineLimits:
    """Return the message that describes an engine's limits and features to routers."""
    features = {
        "draft": can.has_drafts,
        "grammar": can.has_grammars,
        "kv_transfer": can.has_kv_transfer,
        "penalties": can.has_penalties,
        "prompt_ids": True,
        "prompt_logprobs": can.has_prompt_logprobs,
        PROMPT_SPANS: True,
        "scores": can.has_scores,
    }
    return wire.EngineLimits(
        context_tokens_max=limits.context_tokens_max,
        sequences_max=limits.sequences_max,
        step_tokens_max=limits.step_tokens_max,
        kv_blocks=limits.kv_blocks,
        block_tokens=BLOCK_TOKENS,
        base_digest=base_digest,
        engine=engine,
        adapter_slots=can.adapter_slots,
        adapter_rank_max=can.adapter_rank_max,
        logprobs_max=can.logprobs_max,
        features=[name for name, is_there in features.items() if is_there],
    )


def encode_resumed(sequence: int, told: SequenceRecord) -> wire.Resumed:
    """Return the message with the whole output of a sequence, for a router that resumes."""
    return wire.Resumed(
        sequence=sequence,
        output=told.output,
        logprobs=told.logprobs,
        prompt_logprobs=told.prompt_logprobs,
    )


def fill_logprobs(message: wire.Logprobs, entries: list[tuple[int, TokenLogprobs]]) -> None:
    """Add the logprobs of single tokens to a message, from pairs (sequence id, logprobs)."""
    message.sequence.extend([sequence for sequence, _ in entries])
    _fill_entries(message, [entry for _, entry in entries])


def encode_prompt_logprobs(sequence: int, part: PromptLogprobs) -> wire.PromptLogprobs:
    """Return the message with the logprobs of a part of a prompt."""
    message = wire.PromptLogprobs(sequence=sequence, first=part.first)
    _fill_entries(message, part.tokens)
    return message


def _fill_columns(frame: wire.StepFrame, news: StepNews) -> None:
    """Write each sequence once, with its tokens of all merged steps in order."""
    first = news.columns[0][0]
    if not news.has_runs and all(ids == first for ids, _ in news.columns):
        merged = len(news.columns)
        frame.sequence.extend(first)
        frame.count.extend([merged] * len(first))
        if merged == 1:
            frame.token.extend(news.columns[0][1])
        else:
            rows = zip(*[tokens for _, tokens in news.columns], strict=True)
            frame.token.extend(chain.from_iterable(rows))
        return
    grouped: dict[int, list[int]] = {}
    for ids, tokens in news.columns:
        for sequence, token in zip(ids, tokens, strict=True):
            own = grouped.get(sequence)
            if own is None:
                grouped[sequence] = [token]
            else:
                own.append(token)
    frame.sequence.extend(grouped)
    frame.count.extend(map(len, grouped.values()))
    for own in grouped.values():
        frame.token.extend(own)


def _fill_entries(
    message: wire.Logprobs | wire.PromptLogprobs, entries: Iterable[TokenLogprobs]
) -> None:
    for entry in entries:
        message.logprob.append(entry.logprob)
        message.top_count.append(len(entry.top))
        message.top_token.extend([token for token, _ in entry.top])
        message.top_logprob.extend([logprob for _, logprob in entry.top])
