"""A TensorRT-LLM without GPUs: the classes and shapes that the driver uses, as their sources have them.

Written after NVIDIA/TensorRT-LLM (1.2 line; path @ commit), in own code and only as far as the driver
can see it:

* `LLM`: tensorrt_llm/llmapi/llm.py @4c05a748. `generate_async` refuses bad input with ValueError,
  returns a result at once, and fails with RuntimeError("LLM is shutting down") after the end.
* `RequestOutput`: tensorrt_llm/executor/result.py @a678b91a. Its queue belongs to the event loop that
  runs when it is made; without one, iterating it asynchronously fails. Stop words are cut off unless
  `include_stop_str_in_output`; `logprobs` grow with the tokens; a cancelled one ends with
  finish_reason "cancelled". Errors of one request arrive as text and are raised as `RequestError`
  while iterating; errors of the engine end it: tensorrt_llm/executor/executor.py @ed53795b.
* `IterationResult`: the same file. It is one object for all, made by the first request, ends after
  `timeout` without news, and stays ended until another request is submitted.
* `SamplingParams`, `GuidedDecodingParams`: tensorrt_llm/sampling_params.py @a98a9061 (frozen sets of
  fields: others are TypeErrors). `LoRARequest`: tensorrt_llm/executor/request.py @4ce835a5.
* Events as `KVCacheEventSerializer` (tensorrt_llm/_utils.py) writes them; their hashes depend on
  adapter and salt, which the events do not carry. A sequence's blocks are stored when they are full.
* Statistics: the keys of IterationStats' JSON that the driver reads.

The "model": each token is a hash of the adapter and of all ids before it, never of the batch.
"""

import asyncio
import json
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

BLOCK = 32


class RequestError(RuntimeError):
    pass


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    detokenize: bool = True
    add_special_tokens: bool = True

    def __post_init__(self):
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self):
        if not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


@dataclass(slots=True, kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    tokens_per_block: int = 32
    dtype: str = "auto"


@dataclass(slots=True, kw_only=True)
class LoraConfig:
    lora_target_modules: list[str]
    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int


@dataclass(slots=True, kw_only=True)
class NGramDecodingConfig:
    max_draft_len: int
    max_matching_ngram_size: int = 4


@dataclass(slots=True, kw_only=True)
class EagleDecodingConfig:
    max_draft_len: int
    speculative_model_dir: str


@dataclass(slots=True)
class CompletionOutput:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


def _running_loop():
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _AsyncQueue:
    """Filled from the engine's thread, read on the loop it was made on."""

    def __init__(self):
        self.loop = _running_loop()
        self.items = asyncio.Queue() if self.loop else None

    def put(self, item):
        if self.loop is None or self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.items.put_nowait, item)

    async def get(self, timeout=None):
        assert self.items is not None, (
            "The asyncio event loop was not present during initialization"
        )
        async with asyncio.timeout(timeout):
            return await self.items.get()


class RequestOutput:
    def __init__(self, llm, prompt, params, lora, salt, streaming):
        assert streaming, "the driver streams"
        self._llm, self.prompt_token_ids, self.params = llm, prompt, params
        self.lora_id = lora.lora_int_id if lora else 0
        self.salt = salt
        self._queue = _AsyncQueue()
        self.outputs = [CompletionOutput()]
        self.cached_tokens = 0
        self._done = self._aborted = False
        # The engine's own state of it.
        self.tokens = list(prompt)
        self.computed = 0
        self.hashes = []
        self.found = 0
        self.state = self.lora_id % (1 << 32)
        for token in prompt:
            self.state = crc32(token.to_bytes(4, "little"), self.state)

    @property
    def finished(self):
        return self._done

    def abort(self):
        self._aborted = True
        self._llm._work.set()

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._done:
            raise StopAsyncIteration
        kind, value = await self._queue.get()
        if kind == "error":
            if isinstance(value, str):
                raise RequestError(value)
            self._llm.shutdown()
            raise value
        tokens, logprobs, cached, reason = value
        output = self.outputs[0]
        output.token_ids.extend(tokens)
        output.logprobs += logprobs
        self.cached_tokens = cached
        if reason:
            self._done = True
            output.finish_reason = reason
            if reason == "stop" and not self.params.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]
        return self


def _reserved(result):
    return -(-(len(result.prompt_token_ids) + result.params.max_tokens) // BLOCK)


class IterationResult:
    def __init__(self):
        self._queue = _AsyncQueue()
        self._done = False
        self._timeout = 2.0
        self.fetched = deque()  # over RPC: what the worker has and nobody asked for yet

    def mark_undone(self):
        self._done = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._done:
            raise StopAsyncIteration
        try:
            return await self._queue.get(timeout=self._timeout)
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None


class GenerationExecutorRpcProxy:
    """Marks an `LLM` whose workers are asked over RPC: tensorrt_llm/executor/rpc_proxy.py."""


class LLM:
    """Continuous batching, first come first served, over a radix cache of blocks."""

    blocks = 256
    step_s = 0.0005
    # What a test makes go wrong: {number of the request: text or exception}.
    faults: dict = {}  # noqa: RUF012 - set per test on a subclass
    is_hung = False
    # One permit per iteration, so that a test's speed decides the engine's; None: it runs freely.
    permits: threading.Semaphore | None = None
    _executor: object = None  # or a GenerationExecutorRpcProxy

    def __init__(self, model, **arguments):
        known = {"skip_tokenizer_init", "trust_remote_code", "tensor_parallel_size"}
        known |= {"pipeline_parallel_size", "moe_expert_parallel_size", "dtype", "max_batch_size"}
        known |= {"max_num_tokens", "max_seq_len", "enable_chunked_prefill", "kv_cache_config"}
        known |= {"enable_iter_perf_stats", "stream_interval", "guided_decoding_backend"}
        known |= {"lora_config", "speculative_config", "moe_config", "enable_attention_dp"}
        if arguments.keys() - known:
            raise ValueError(f"unexpected arguments {sorted(arguments.keys() - known)}")
        assert Path(model).is_dir()
        self.vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        self.arguments = arguments
        self.cache = arguments["kv_cache_config"]
        self._pending, self._running = deque(), []
        self._work = threading.Event()
        self._lock = threading.Lock()
        self._stats = self._events = None
        self._down, self._requests, self.traces = False, 0, []
        self._event_id = 0
        self._stored: OrderedDict[int, None] = OrderedDict()
        self.seen: list[RequestOutput] = []
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def generate_async(
        self,
        inputs,
        sampling_params=None,
        lora_request=None,
        prompt_adapter_request=None,
        streaming=False,
        kv_cache_retention_config=None,
        disaggregated_params=None,
        scheduling_params=None,
        cache_salt=None,
        trace_headers=None,
    ):
        if self._down:
            raise RuntimeError("LLM is shutting down")
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if not all(isinstance(token, int) for token in inputs):
            raise TypeError("The inputs must be type str or list of int")
        if lora_request and self.arguments.get("lora_config") is None:
            raise ValueError("LoRA is not enabled")
        for name in ("_stats", "_events"):
            if getattr(self, name) is None:
                setattr(self, name, IterationResult())
            getattr(self, name).mark_undone()
        result = RequestOutput(self, inputs, sampling_params, lora_request, cache_salt, streaming)
        self.traces.append(trace_headers)
        self._requests += 1
        fault = self.faults.get(self._requests)
        if isinstance(fault, ValueError):
            raise fault
        with self._lock:
            if fault is not None:
                result._queue.put(("error", fault))
            else:
                self.seen.append(result)
                self._pending.append(result)
        self._work.set()
        return result

    def get_stats_async(self, timeout=2):
        return self._iterator(self._stats, timeout)

    def get_kv_cache_events_async(self, timeout=2):
        assert self._events is not None, "KV Event IterationResult is not properly instantiated."
        return self._iterator(self._events, timeout)

    def _iterator(self, result, timeout):
        if self._executor is not None:  # over RPC: fetches first, and blocks while there is nothing
            ends_at_s = time.monotonic() + timeout
            while not result.fetched and time.monotonic() < ends_at_s:
                time.sleep(0.001)
            result.mark_undone()
            while result.fetched:
                result._queue.put(result.fetched.popleft())
        result._timeout = timeout
        return result

    def _report(self, result, item):
        if self._executor is not None:
            result.fetched.append(item)
        else:
            result._queue.put(item)

    def shutdown(self):
        self._down = True
        self._work.set()

    def _loop(self):
        while not self._down:
            if not (self._running or self._pending):
                self._work.wait(0.05)
                self._work.clear()
                continue
            if self.is_hung:
                time.sleep(0.01)
                continue
            if self.permits is not None and not self.permits.acquire(timeout=0.05):
                continue
            time.sleep(self.step_s)
            self._iterate()

    def _iterate(self):
        with self._lock:
            # As the capacity policy GUARANTEED_NO_EVICT: who runs has blocks until its end.
            while (
                self._pending
                and len(self._running) < self.arguments["max_batch_size"]
                and sum(map(_reserved, [*self._running, self._pending[0]])) <= self.blocks
            ):
                self._running.append(self._pending.popleft())
        events: list[dict] = []
        budget, context = self.arguments["max_num_tokens"], 0
        for result in list(self._running):
            if result._aborted:
                self._end(result, [], [], "cancelled")
                continue
            if not result.hashes and not result.computed:
                self._reuse(result)
            count = min(len(result.tokens) - result.computed, budget)
            if count <= 0:
                continue
            budget -= count
            context += max(0, min(count, len(result.prompt_token_ids) - result.computed))
            result.computed += count
            self._store(result, events)
            if result.computed == len(result.tokens):
                self._emit(result)
        self._event_id += 1
        if events and self.cache.event_buffer_max_size:
            self._report(self._events, events)
        used = sum(-(-len(result.tokens) // BLOCK) for result in self._running)
        if self.arguments["enable_iter_perf_stats"]:
            self._report(
                self._stats,
                {
                    "iterLatencyMS": self.step_s * 1e3,
                    "kvCacheStats": {
                        "maxNumBlocks": self.blocks,
                        "usedNumBlocks": used,
                        "tokensPerBlock": BLOCK,
                    },
                    "inflightBatchingStats": {"numCtxTokens": context},
                    "specDecodingStats": {"numDraftTokens": 0, "numAcceptedTokens": 0},
                },
            )

    def _hash(self, result, index):
        before = result.hashes[index - 1] if index else None
        block = tuple(result.tokens[index * BLOCK : (index + 1) * BLOCK])
        return hash((before, result.lora_id, result.salt, block))

    def _reuse(self, result):
        """Take what is cached, but compute at least one token."""
        if not self.cache.enable_block_reuse:
            return
        for index in range((len(result.tokens) - 1) // BLOCK):
            key = self._hash(result, index)
            if key not in self._stored:
                break
            self._stored.move_to_end(key)
            result.hashes.append(key)
        result.computed = result.found = len(result.hashes) * BLOCK

    def _store(self, result, events):
        if not self.cache.enable_block_reuse:
            return
        while len(result.hashes) < result.computed // BLOCK:
            index = len(result.hashes)
            key = self._hash(result, index)
            result.hashes.append(key)
            if key not in self._stored:
                self._stored[key] = None
                block = {
                    "type": "stored_block",
                    "block_hash": key,
                    "cache_level": 0,
                    "priority": 35,
                }
                block["tokens"] = [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in result.tokens[index * BLOCK : (index + 1) * BLOCK]
                ]
                parent = result.hashes[index - 1] if index else None
                self._event(events, {"type": "stored", "parent_hash": parent, "blocks": [block]})
        while len(self._stored) > self.blocks:
            key, _ = self._stored.popitem(last=False)
            self._event(events, {"type": "removed", "block_hashes": [key]})

    def _event(self, events, data):
        self._event_id += 1
        events.append({"event_id": self._event_id, "data": data, "window_size": 2048})

    def _emit(self, result):
        if len(result.tokens) > len(result.prompt_token_ids):
            result.state = crc32(result.tokens[-1].to_bytes(4, "little"), result.state)
        token = 3 + result.state * 0x9E3779B1 % (1 << 32) * (self.vocabulary - 3) // (1 << 32)
        result.tokens.append(token)
        logprobs = []
        if result.params.logprobs:
            # The token itself is the most probable one: the model is greedy.
            ranked = [token] + [(token + k) % self.vocabulary for k in range(1, 21)]
            logprobs = [
                {
                    other: Logprob(-0.5 - rank, rank + 1)
                    for rank, other in enumerate(ranked[: result.params.logprobs])
                }
            ]
        done = len(result.tokens) - len(result.prompt_token_ids)
        if token in (result.params.stop_token_ids or ()) or token == result.params.end_id:
            self._end(result, [token], logprobs, "stop")
        elif done >= result.params.max_tokens:
            self._end(result, [token], logprobs, "length")
        else:
            self._put(result, [token], logprobs, None)

    def _end(self, result, tokens, logprobs, reason):
        self._running.remove(result)
        self._put(result, tokens, logprobs, reason)

    def _put(self, result, tokens, logprobs, reason):
        cached = result.found
        result._queue.put(("response", (tokens, logprobs, cached, reason)))


def importer(version: str = "1.2.1", llm: type[LLM] = LLM):
    """Return what `importlib.import_module` would, were TensorRT-LLM of this version installed."""
    package = SimpleNamespace(__version__=version, LLM=llm, SamplingParams=SamplingParams)
    llmapi = SimpleNamespace(
        SamplingParams=SamplingParams,
        GuidedDecodingParams=GuidedDecodingParams,
        RequestError=RequestError,
        LoRARequest=LoRARequest,
        KvCacheConfig=KvCacheConfig,
        NGramDecodingConfig=NGramDecodingConfig,
        EagleDecodingConfig=EagleDecodingConfig,
    )
    modules = {
        "tensorrt_llm": package,
        "tensorrt_llm.llmapi": llmapi,
        "tensorrt_llm.lora_helper": SimpleNamespace(LoraConfig=LoraConfig),
    }

    def find(name: str):
        try:
            return modules[name]
        except KeyError:
            raise ModuleNotFoundError(f"No module named {name!r}") from None

    return find
