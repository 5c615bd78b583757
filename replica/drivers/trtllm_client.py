"""Collects TensorRT-LLM's results as messages in one queue, for the driver `trtllm`.

TensorRT-LLM accepts requests and returns results on an event loop. One thread runs that loop, with
one task per request that reads the request's results. All results go into one outbox, which the
driver's thread empties. The outbox has at most the output of the running requests, so it has no
other bound.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from replica.drivers.trtllm_api import TrtllmApi

log = logging.getLogger(__name__)

_IDLE_S = 0.05  # seconds between two reads of the engine's events
# Seconds to wait after the first token of an engine iteration. The iteration's other tokens arrive
# one by one, and all are sent in one frame.
_GATHER_S = 0.0005


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """New tokens of a request.

    Attributes:
        handle: Handle of the request.
        tokens: New tokens, in order.
        logprobs: Logprobs of each token, as a map from ids to objects with `logprob` and `rank`.
            Empty if not requested.
        cached_tokens: Prompt tokens that were in the prefix cache.
    """

    handle: int
    tokens: list[int]
    logprobs: list[Mapping[int, Any]]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request, with TensorRT-LLM's `finish_reason` or with an error."""

    handle: int
    reason: str = ""
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one iteration of the engine."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Events of the KV cache, in order."""

    events: list[Mapping[str, Any]]


Message = RequestTokens | RequestEnd | Statistics | CacheEvents


@dataclass(slots=True)
class _Outbox:
    messages: deque[Message] = field(default_factory=deque[Message])
    arrived: threading.Event = field(default_factory=threading.Event)

    def put(self, message: Message) -> None:
        self.messages.append(message)
        self.arrived.set()

    def take(self, wait_s: float) -> list[Message]:
        if not self.messages and wait_s > 0 and self.arrived.wait(wait_s):
            time.sleep(_GATHER_S)
        self.arrived.clear()
        return [self.messages.popleft() for _ in range(len(self.messages))]


class TrtllmClient:
    """A loaded `LLM`, and the thread that runs the `LLM`'s event loop."""

    def __init__(
        self, api: TrtllmApi, arguments: dict[str, Any], *, has_cache_events: bool
    ) -> None:
        """Load the engine, which takes minutes, and start the thread."""
        self._llm = api.start(arguments)
        self._poll_s = api.poll_s(self._llm)
        self._takes_trace = api.takes_trace
        self._outbox = _Outbox()
        self._results: dict[int, Any] = {}  # handle -> result, used by the loop's thread only
        self._has_cache_events = has_cache_events
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trtllm", daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def has_messages(self) -> bool:
        """Whether `take` would return messages at once."""
        return bool(self._outbox.messages)

    def submit(
        self,
        handle: int,
        prompt: list[int],
        sampling: Any,
        *,
        lora: Any,
        cache_salt: str | None,
        trace: Mapping[str, str] | None = None,
    ) -> None:
        """Send a request. Its last message is a `RequestEnd`."""
        arguments: dict[str, Any] = {
            "inputs": prompt,
            "sampling_params": sampling,
            "lora_request": lora,
            "streaming": True,
            "cache_salt": cache_salt,
        }
        if trace and self._takes_trace:
            arguments["trace_headers"] = dict(trace)
        self._loop.call_soon_threadsafe(self._begin, handle, arguments)

    def abort(self, handle: int) -> None:
        """End a request. Has no effect if the request has ended."""
        self._loop.call_soon_threadsafe(self._abort, handle)

    def take(self, wait_s: float) -> list[Message]:
        """Return all messages. If there are none, wait up to `wait_s` for the first one."""
        return self._outbox.take(wait_s)

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the thread to end, and then shut the engine down."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout_s)
        self._llm.shutdown()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        # One event per running `_poll`. Every submission of a request sets all of these events.
        self._wakes: list[asyncio.Event] = []
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._poll(self._llm.get_stats_async, _stats))
            if self._has_cache_events:
                events = self._llm.get_kv_cache_events_async
                self._tasks.create_task(self._poll(events, _cache_events))
            self._started.set()
            await self._closing.wait()
            for task in list(asyncio.all_tasks()):
                if task is not asyncio.current_task():
                    task.cancel()

    def _begin(self, handle: int, arguments: dict[str, Any]) -> None:
        try:
            # The result's queue belongs to the event loop that is running during this call.
            result = self._llm.generate_async(**arguments)
        except Exception as error:  # noqa: BLE001 - any error ends only this request
            self._outbox.put(RequestEnd(handle, error=error))
            return
        self._results[handle] = result
        for wake in self._wakes:
            wake.set()
        self._tasks.create_task(self._follow(handle, result))

    def _abort(self, handle: int) -> None:
        result = self._results.get(handle)
        if result is not None and not result.finished:
            result.abort()

    async def _follow(self, handle: int, result: Any) -> None:
        """Turn a result into messages until the request ends."""
        seen = seen_logprobs = 0
        try:
            async for _ in result:
                output = result.outputs[0]
                tokens = output.token_ids[seen:]
                logprobs = (output.logprobs or ())[seen_logprobs : seen + len(tokens)]
                seen += len(tokens)
                seen_logprobs += len(logprobs)
                if tokens:
                    cached = int(getattr(result, "cached_tokens", 0) or 0)
                    self._outbox.put(RequestTokens(handle, list(tokens), list(logprobs), cached))
            self._outbox.put(RequestEnd(handle, reason=str(result.outputs[0].finish_reason)))
        except Exception as error:  # noqa: BLE001 - the driver decides whether the engine failed
            self._outbox.put(RequestEnd(handle, error=error))
        finally:
            self._results.pop(handle, None)

    async def _poll(
        self,
        iterate: Callable[[float], AsyncIterable[Any]],
        convert: Callable[[Any], Message | None],
    ) -> None:
        """Read one of the engine's own streams until cancelled, as `TrtllmApi.poll_s` requires."""
        wake = asyncio.Event()
        self._wakes.append(wake)
        while True:
            await wake.wait()
            if not self._results:
                wake.clear()  # after an idle pause, one more read collects the last results
            try:
                # The call blocks over RPC until there are events, so it runs in a thread.
                async for item in await asyncio.to_thread(iterate, self._poll_s):
                    message = convert(item)
                    if message is not None:
                        self._outbox.put(message)
            except Exception:
                log.exception("trtllm_poll_failed")  # requests are served without this stream, too
                return
            await asyncio.sleep(_IDLE_S)


def _stats(item: Any) -> Message | None:
    return Statistics(item) if isinstance(item, dict) else None


def _cache_events(item: Any) -> Message | None:
    events = item if isinstance(item, list) else [item]
    return CacheEvents([event for event in events if event])
