"""Implements the driver `trtllm` over an engine that `replica.drivers.trtllm` has loaded.

TensorRT-LLM serves requests in the order of their submission. So that priorities still count,
requests wait in this driver. At most `sequences_max` requests are in the engine at a time. They are
the most important ones whose adapters fit into its slots. `step()` submits requests and collects
results. Its wait for results is short, so that the host can add new requests between steps.

TensorRT-LLM does not report some facts, so the driver infers them. A sequence counts as admitted
when it is submitted. The adapters that were used last count as resident. docs/engines.md lists the
missing features.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replica.drivers.trtllm_adapters import DirectoryAdapter, adapter_number, read_directory_adapter
from replica.drivers.trtllm_api import TrtllmApi, classify, guide
from replica.drivers.trtllm_client import (
    RequestEnd,
    RequestTokens,
    Statistics,
    TrtllmClient,
)
from replica.drivers.trtllm_events import BlockTranslator
from replica.drivers.trtllm_options import TrtllmOptions
from replica.engine.adapter_table import AdapterTable
from replica.engine.artifact import BaseFacts
from replica.engine.plan import ScheduledSequence
from replica.engine.types import (
    AdapterState,
    AdmittedEvent,
    Capabilities,
    EngineLoad,
    Finish,
    FinishedEvent,
    Grammar,
    KvBlocks,
    Limits,
    RefusedError,
    SequenceRequest,
    StepEvents,
    TokenLogprobs,
)
from replica.engine.validation import check_request
from replica.engine.waiting import WaitingQueue
from sluice.errors import ErrorCode

log = logging.getLogger(__name__)

# Longest time that a step waits for results, in seconds. A new request waits no longer than this.
_WAIT_S = 0.002
_LOGPROBS_MAX = 20  # alternatives per token, the limit of OpenAI's API
_REASONS = {"stop": Finish.STOP, "length": Finish.LENGTH}


class TrtllmDriver:
    """The `Driver` over a loaded TensorRT-LLM engine."""

    name = "trtllm"

    def __init__(
        self,
        api: TrtllmApi,
        client: TrtllmClient,
        facts: BaseFacts,
        limits: Limits,
        options: TrtllmOptions,
        *,
        root: bytes,
        check_grammar: Callable[[Grammar], None] | None,
        clock: Callable[[], float],
    ) -> None:
        """Wrap a loaded engine.

        Args:
            api: API by which the engine was loaded.
            client: Client of the loaded engine.
            facts: Facts of the base.
            limits: Limits of the engine, which never change.
            options: Options with which the engine was loaded.
            root: Root of the hash chain for sequences that name no root.
            check_grammar: Function that raises RefusedError for a grammar that cannot be served.
                None means that grammars are not checked.
            clock: Clock in seconds.
        """
        self._api = api
        self._client = client
        self._facts = facts
        self._limits = limits
        self._options = options
        self._root = root
        self._check_grammar = check_grammar
        self._clock = clock
        self._capabilities = Capabilities(
            adapter_slots=options.adapter_slots,
            adapter_rank_max=options.adapter_rank if options.adapter_slots else 0,
            logprobs_max=_LOGPROBS_MAX,
            rereads_adapters=True,
            has_grammars=bool(options.grammars)
            and (check_grammar is not None or options.grammars_unchecked),
        )
        self._adapters = AdapterTable(options.adapter_slots, options.adapter_memory_bytes)
        self._directories: dict[str, DirectoryAdapter] = {}
        self._blocks = BlockTranslator()
        self._cached: dict[bytes, None] = {}
        self._living: dict[int, ScheduledSequence] = {}  # sequences by key
        self._sent: dict[int, ScheduledSequence] = {}  # submitted sequences by handle (`scratch`)
        self._waiting = WaitingQueue(self._adapters)
        self._prefilling = 0  # number of submitted sequences that have no token yet
        self._following = 0  # number of forks that wait for their leaders
        self._owed = 0
        self._handles, self._arrivals = itertools.count(1), itertools.count(1)
        self._events = StepEvents()
        self._statistics: Mapping[str, Any] = {}
        self._prompt_tokens = self._cached_tokens = 0
        self._drafted = self._accepted = 0
        self._step_prompt_tokens = 0  # prompt tokens that the iterations of the last step computed
        self._heard_at_s = clock()
        self._failure = ""

    @property
    def limits(self) -> Limits:
        """The limits of the engine, constant after loading."""
        return self._limits

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine, constant after loading."""
        return self._capabilities

    @property
    def has_work(self) -> bool:
        """Whether the next `step()` would compute tokens or report events."""
        return bool(self._living or self._events.finished or self._client.has_messages)

    def add(self, request: SequenceRequest) -> None:
        """Accept a sequence and its forks, or raise RefusedError if this engine cannot do so."""
        self._check(request)
        stop_ids = frozenset[int]()
        if not request.ignore_eos:
            stop_ids = request.stop_token_ids | self._facts.eos_ids
        leader = self._enter(request, stop_ids)
        for fork in request.forks:
            # A fork is submitted after its leader's prompt is computed, so that it finds the prompt
            # in the cache.
            sampling = replace(request.sampling, seed=fork.seed)
            own = replace(request, key=fork.key, sampling=sampling, forks=())
            sibling = self._enter(own, stop_ids)
            sibling.leader = leader
            leader.forks.append(sibling)
        self._following += len(leader.forks)
        self._waiting.push(leader)

    def check_grammar(self, request: SequenceRequest) -> None:
        """Check a request's grammar. The check may be slow, so any thread may call this."""
        grammar = request.sampling.grammar
        if grammar is None or not self._capabilities.has_grammars:
            return
        if request.resumed_tokens:
            raise RefusedError(
                ErrorCode.UNSUPPORTED_PARAMETER,
                f"a grammar cannot go on behind {request.resumed_tokens} emitted tokens here;"
                " generate the answer anew",
                param="grammar",
            )
        if self._check_grammar is not None:
            self._check_grammar(grammar)
        try:
            guide(grammar)
        except ValueError as error:
            text = f"the grammar: {error}"
            raise RefusedError(ErrorCode.INVALID_REQUEST, text, param="grammar") from None

    def cancel(self, key: int) -> None:
        """End a sequence at once. The next step reports the end."""
        sequence = self._living.get(key)
        if sequence is not None:
            if sequence.scratch:
                self._client.abort(sequence.scratch)
            self._finish(sequence, Finish.CANCELLED)

    def step(self) -> StepEvents:
        """Submit requests, wait briefly for results, and return the results."""
        self._hand_over()
        self._step_prompt_tokens = 0
        has_news = self._events.finished or not self._living
        for message in self._client.take(0.0 if has_news else _WAIT_S):
            if isinstance(message, RequestTokens):
                self._progress(message)
            elif isinstance(message, RequestEnd):
                self._ended(message)
            elif isinstance(message, Statistics):
                self._heard_at_s = self._clock()
                self._count(message.values)
            else:
                self._events.kv.update(self._blocks.apply(message.events))
        self._watch()
        events, self._events = self._events, StepEvents()
        for key, is_cached in events.kv.items():
            if is_cached:
                self._cached[key] = None
            else:
                self._cached.pop(key, None)
        return events

    def load(self) -> EngineLoad:
        """Return the load of the engine as of its last statistics."""
        cache = self._statistics.get("kvCacheStats") or {}
        return EngineLoad(
            running=len(self._sent),
            prefilling=self._prefilling,
            waiting=self._waiting.count + self._following,
            # An idle engine reports no statistics, so without requests the last figure is outdated.
            kv_blocks_used=int(cache.get("usedNumBlocks") or 0) if self._sent else 0,
            prefill_tokens_owed=self._owed,
            step_prompt_tokens=self._step_prompt_tokens,
            step_s=float(self._statistics.get("iterLatencyMS") or 0.0) / 1e3,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            draft_tokens=self._drafted,
            accepted_tokens=self._accepted,
            adapters_resident=self._adapters.resident,
        )

    def cached_blocks(self) -> list[bytes]:
        """Return the hashes of all cached blocks that the engine has reported."""
        return list(self._cached)

    def read_adapter(self, digest: str, directory: Path) -> DirectoryAdapter:
        """Check an adapter. Its directory must stay, because TensorRT-LLM reads it later."""
        return read_directory_adapter(digest, directory, self._options.adapter_rank)

    def put_adapter(self, digest: str, adapter: Any) -> None:
        """Register an adapter for sequences, or raise RefusedError if there is no memory for it."""
        self._adapters.put(digest, adapter)
        self._directories[digest] = adapter
        held = {state.digest for state in self._adapters.states({})}
        self._directories = {it: self._directories[it] for it in held}

    def drop_adapter(self, digest: str) -> None:
        """Drop an adapter as soon as its last sequence has ended."""
        self._adapters.drop(digest)

    def has_adapter(self, digest: str) -> bool:
        """Whether new sequences may use this adapter at present."""
        return self._adapters.has(digest)

    def adapters(self) -> list[AdapterState]:
        """Return the adapters. The most recently used ones count as in slots."""
        emitted: dict[str, int] = {}
        for sequence in self._living.values():
            digest = sequence.request.adapter_digest
            emitted[digest] = emitted.get(digest, 0) + _output_tokens(sequence)
        return self._adapters.states(emitted)

    def export_blocks(self, hashes: Sequence[bytes]) -> KvBlocks:
        """Raise RefusedError, because TensorRT-LLM's LLM API cannot export blocks."""
        raise _no_transfer(f"{len(hashes)} KV blocks cannot be exported")

    def import_blocks(self, blocks: KvBlocks) -> int:
        """Raise RefusedError, because TensorRT-LLM's LLM API cannot import blocks."""
        raise _no_transfer(f"{len(blocks.hashes)} KV blocks cannot be imported")

    def close(self) -> None:
        """Shut the engine down."""
        self._client.close(10.0)

    def _check(self, request: SequenceRequest) -> None:
        check_request(request, self._limits, self._capabilities)
        digest = request.adapter_digest
        if digest and not self._adapters.has(digest):
            raise RefusedError(
                ErrorCode.ADAPTER_NOT_FOUND,
                f"adapter {digest[:12]} is not in this engine; load it before its sequences",
                param="adapter_digest",
            )
        self.check_grammar(request)

    def _enter(self, request: SequenceRequest, stop_ids: frozenset[int]) -> ScheduledSequence:
        assert request.key not in self._living, request.key
        root = request.cache_root or self._root
        sequence = ScheduledSequence(request, next(self._arrivals), root, stop_ids)
        self._living[request.key] = sequence
        self._owed += sequence.prompt_tokens
        if request.adapter_digest:
            self._adapters.join(request.adapter_digest)
        return sequence

    def _hand_over(self) -> None:
        """Submit waiting requests, the most important first, while the engine has room."""
        while (sequence := self._waiting.first()) is not None:
            if self._failure:
                self._finish(sequence, Finish.FAILED, ErrorCode.ENGINE_FAILED, self._failure)
            elif sequence.is_urgent or len(self._sent) < self._limits.sequences_max:
                self._send(sequence)
            else:
                return

    def _send(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        try:
            lora = self._lora(request.adapter_digest)
            sampling = self._api.sampling(request, sequence.stop_ids)
        except FileNotFoundError as error:
            self._finish(sequence, Finish.FAILED, ErrorCode.ADAPTER_NOT_FOUND, str(error))
            return
        except (TypeError, ValueError) as error:
            reason, code, text = classify(error, self._api.request_error)
            self._finish(sequence, reason, code, text)
            return
        self._waiting.pop(sequence)
        if request.adapter_digest:
            self._adapters.acquire(request.adapter_digest)
            # TensorRT-LLM loads adapters, so the table's own list of loads is dropped
            self._adapters.take_loads()
        sequence.admitted_at_s = now_s = self._clock()
        if not self._sent:
            self._heard_at_s = now_s
        sequence.scratch = handle = next(self._handles)
        self._sent[handle] = sequence
        self._prefilling += 1
        self._blocks.expect(request.prompt, sequence.root)
        self._client.submit(
            handle,
            sequence.tokens.tolist(),
            sampling,
            lora=lora,
            # The root depends on base, adapter and tenant. As a salt, it prevents that requests
            # with different roots share blocks.
            cache_salt=request.cache_root.hex() if request.cache_root else None,
            trace=request.trace,
        )

    def _lora(self, digest: str) -> Any:
        """Return the reference to an adapter for a request, or None for the base."""
        if not digest:
            return None
        directory = self._directories[digest].directory
        if not directory.is_dir():
            raise FileNotFoundError(f"adapter {digest[:12]}: {directory} is gone; load it again")
        return self._api.lora_request(digest, adapter_number(digest), str(directory))

    def _progress(self, message: RequestTokens) -> None:
        self._heard_at_s = now_s = self._clock()
        sequence = self._sent.get(message.handle)
        if sequence is None:
            return  # the sequence was cancelled, so its tokens are dropped
        request = sequence.request
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now_s
            self._prefilling -= 1
            self._owed -= sequence.prompt_tokens
            self._admit(sequence, message.cached_tokens)
        sequence.tokens.extend(message.tokens)
        events = self._events
        events.has_runs = True
        events.keys += [request.key] * len(message.tokens)
        events.tokens += message.tokens
        wanted = request.sampling.logprobs
        if wanted >= 0:
            for token, found in zip(message.tokens, message.logprobs, strict=True):
                events.logprobs.append(_logprobs(request.key, token, found, wanted))

    def _admit(self, sequence: ScheduledSequence, cached_tokens: int) -> None:
        request = sequence.request
        assert sequence.admitted_at_s is not None, request.key
        queue_s = max(0.0, sequence.admitted_at_s - request.submitted_at_s)
        self._events.admitted.append(AdmittedEvent(request.key, queue_s, cached_tokens))
        self._prompt_tokens += sequence.prompt_tokens
        self._cached_tokens += cached_tokens
        if request.adapter_digest:
            self._adapters.count_prompt(request.adapter_digest, sequence.prompt_tokens)
        self._release_forks(sequence)

    def _release_forks(self, leader: ScheduledSequence) -> None:
        for sibling in leader.forks:
            sibling.leader = None
            self._waiting.push(sibling)
        self._following -= len(leader.forks)
        leader.forks = []

    def _ended(self, message: RequestEnd) -> None:
        self._heard_at_s = self._clock()
        sequence = self._sent.get(message.handle)
        if message.error is not None and not self._is_own(message.error):
            self._fail_all(f"TensorRT-LLM stopped: {message.error!r}")
        elif sequence is None:
            return
        elif message.error is not None:
            reason, code, text = classify(message.error, self._api.request_error)
            self._finish(sequence, reason, code, text)
        elif message.reason in _REASONS:
            self._finish(sequence, _REASONS[message.reason])
        else:
            text = f"TensorRT-LLM ended the request: {message.reason}"
            self._finish(sequence, Finish.FAILED, ErrorCode.ENGINE_FAILED, text)

    def _is_own(self, error: Exception) -> bool:
        """Whether an error concerns only its request, so that the engine can continue."""
        return isinstance(error, self._api.request_error | ValueError | TypeError)

    def _fail_all(self, message: str) -> None:
        """End all sequences and refuse all later ones. Only a new process can serve again."""
        log.error("trtllm_failed: %s", message)
        self._failure = message
        for sequence in list(self._living.values()):
            self._finish(sequence, Finish.FAILED, ErrorCode.ENGINE_FAILED, message)

    def _watch(self) -> None:
        """Declare the engine failed if it has requests, but has sent no token for too long."""
        silent_s = self._clock() - self._heard_at_s
        if self._sent and silent_s > self._options.silence_s_max:
            self._fail_all(f"TensorRT-LLM has said nothing for {silent_s:.0f} s")

    def _finish(
        self, sequence: ScheduledSequence, reason: Finish, code: str = "", message: str = ""
    ) -> None:
        request = sequence.request
        del self._living[request.key]
        begun, first = sequence.admitted_at_s, sequence.first_token_at_s
        if first is None:
            self._owed -= sequence.prompt_tokens
        if sequence.scratch:
            del self._sent[sequence.scratch]
            self._prefilling -= first is None
        elif sequence.leader is not None:
            sequence.leader.forks.remove(sequence)
            self._following -= 1
        else:
            self._waiting.discard(sequence)
        self._release_forks(sequence)
        output_tokens = _output_tokens(sequence)
        if request.adapter_digest:
            if sequence.scratch:
                self._adapters.release(request.adapter_digest)
            self._adapters.leave(request.adapter_digest, output_tokens)
        self._events.finished.append(
            FinishedEvent(
                key=request.key,
                reason=reason,
                code=code,
                message=message,
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=output_tokens,
                prefill_s=0.0 if begun is None or first is None else first - begun,
            )
        )

    def _count(self, values: Mapping[str, Any]) -> None:
        self._statistics = values
        batch = values.get("inflightBatchingStats") or {}
        self._step_prompt_tokens += int(batch.get("numCtxTokens") or 0)
        drafts = values.get("specDecodingStats") or {}
        self._drafted += int(drafts.get("numDraftTokens") or 0)
        self._accepted += int(drafts.get("numAcceptedTokens") or 0)


def _output_tokens(sequence: ScheduledSequence) -> int:
    return len(sequence.tokens) - sequence.prompt_tokens


def _logprobs(key: int, token: int, found: Mapping[int, Any], wanted: int) -> TokenLogprobs:
    """Return the logprobs of one token.

    If the sampled token is not among the most probable tokens, version 1.2 leaves out its logprob.
    The logprob of the least probable of these tokens is then returned as an upper bound.
    """
    ranked = sorted(found.items(), key=lambda item: -item[1].logprob)
    own = found[token] if token in found else ranked[-1][1]
    top = tuple((int(other), float(value.logprob)) for other, value in ranked[:wanted])
    return TokenLogprobs(key, float(own.logprob), top)


def _no_transfer(what: str) -> RefusedError:
    return RefusedError(
        ErrorCode.UNSUPPORTED_PARAMETER, f"{what}: TensorRT-LLM's LLM API has no way to do it"
    )
