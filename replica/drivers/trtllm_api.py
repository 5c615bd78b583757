"""Wraps TensorRT-LLM's LLM API for the driver. Only this module uses names of that API.

Differences between versions are determined once, when the engine loads, by the version number and
by the names that exist. The list below has the names, and where each was read in
NVIDIA/TensorRT-LLM (1.2 line unless stated otherwise):

* `LLM(...)`, `generate_async(inputs, sampling_params, lora_request, streaming, cache_salt)`,
  `get_stats_async`, `get_kv_cache_events_async`, `shutdown`: tensorrt_llm/llmapi/llm.py @4c05a748
  and tests/unittest/api_stability/references/llm.yaml @ea35fd67.
* `SamplingParams`, `GuidedDecodingParams`: tensorrt_llm/sampling_params.py @a98a9061. A result ends
  at `end_id`, or at a stop word. The stop word is cut off unless `include_stop_str_in_output`. So
  the driver passes every end as a stop word, and `end_id` is -1.
* `RequestOutput`: iteration, `abort`, `finished`, `cached_tokens`, `outputs[0].token_ids` (all so
  far), `.logprobs` (a dict of `Logprob` per token), `.finish_reason` (stop, length, cancelled,
  timeout): tensorrt_llm/executor/result.py @a678b91a. Iterating raises `RequestError` for an error
  of this request only, and another error when the engine is lost: tensorrt_llm/executor/executor.py
  @ed53795b.
* `LoRARequest(lora_name, lora_int_id, lora_path)`: tensorrt_llm/executor/request.py @4ce835a5.
  `LoraConfig`: tensorrt_llm/lora_helper.py, as the 1.2 examples import it.
* Events: class `KVCacheEventSerializer` of tensorrt_llm/_utils.py. Statistics: `iterLatencyMS`,
  `kvCacheStats` (`maxNumBlocks`, `usedNumBlocks`), `specDecodingStats` of the executor's JSON.

* `trace_headers` of `generate_async` belongs to its OpenTelemetry traces. They are newer than the
  code of the 1.2 line that was read. The argument is passed if the signature has it.

The driver does not use three features. The sampler of 1.2 has one seed for all requests, because
pull request 17172 (seeds per request) is newer. `prompt_logprobs` of 1.2 has the most probable
tokens, but not the prompt's own token. The default sampler of 1.2 has no penalties.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from replica.drivers.options import OptionsError
from replica.engine.types import Finish, Grammar, GrammarKind, SequenceRequest
from sluice.errors import ErrorCode

IMAGE = "nvidia/tritonserver:26.07-trtllm-python-py3"
_OLDEST = (1, 2)
# Number of characters of an engine's error that are stored. A stack trace follows them.
_MESSAGE_MAX = 500

# TensorRT-LLM's errors differ only in their text. These texts mean that one request exceeds a limit
# or is invalid. They come from C++ and Python of the 1.2 line, and from the grammar compiler.
_REFUSED = (
    "should not exceed",
    "exceeds the",
    "lora_path",
    "LoRA",
    "matcher error",
    "Unsupported guide type",
    "require 0 <=",
)
# These texts mean that the engine has no room for a request now.
_BUSY = ("Maximum queue size", "Exceeds maximum queue size", "Cache is full")
# Special characters of Rust's regular expressions. The grammar compiler is written in Rust.
_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")

Importer = Callable[[str], Any]


class TrtllmApi:
    """The installed version of TensorRT-LLM.

    Attributes:
        version: Version that the library reports.
        takes_trace: Whether requests may contain a W3C trace context. With `otlp_traces_endpoint`
            among the engine's options, TensorRT-LLM then adds its own spans.
    """

    def __init__(self, importer: Importer = importlib.import_module) -> None:
        """Import TensorRT-LLM. The import is slow and initialises the GPUs.

        Raises:
            ValueError: TensorRT-LLM is absent or too old. The message names an image that contains
                it.
        """
        try:
            package = importer("tensorrt_llm")
        except ImportError as error:
            raise ValueError(
                f"the engine trtllm needs TensorRT-LLM, which is not installed ({error}); run it in"
                f" an image built by deploy/images/engine.Dockerfile from {IMAGE}"
            ) from None
        self.version = str(package.__version__)
        found = re.match(r"(\d+)\.(\d+)", self.version)
        if found is None or (int(found[1]), int(found[2])) < _OLDEST:
            raise ValueError(
                f"TensorRT-LLM {self.version} is older than 1.2; use an image built from {IMAGE}"
            )
        self._llm = package.LLM
        self._api = importer("tensorrt_llm.llmapi")
        self._import = importer
        accepted = inspect.signature(self._llm.generate_async).parameters
        self.takes_trace = "trace_headers" in accepted
        for name in ("sampling_params", "lora_request", "streaming", "cache_salt"):
            if name not in accepted and "kwargs" not in accepted:
                raise ValueError(
                    f"TensorRT-LLM {self.version}: generate_async does not take {name}; the driver"
                    f" knows the 1.2 and 1.3 lines, e.g. {IMAGE}"
                )

    @property
    def request_error(self) -> type[Exception]:
        """The class of errors that concern a single request."""
        return self._api.RequestError

    def make(self, *names: str, **arguments: Any) -> Any:
        """Return an object of the first of these classes that exists in this version."""
        for name in names:
            cls = getattr(self._api, name, None)
            if cls is not None:
                return cls(**arguments)
        raise OptionsError(f"TensorRT-LLM {self.version} has no {' or '.join(names)}")

    def lora_config(self, **arguments: Any) -> Any:
        """Return a `LoraConfig` with these arguments."""
        return self._import("tensorrt_llm.lora_helper").LoraConfig(**arguments)

    def start(self, arguments: dict[str, Any]) -> Any:
        """Return an `LLM` that was loaded with these arguments."""
        return self._llm(**arguments)

    def poll_s(self, llm: Any) -> float:
        """Return the seconds for which an iterator over statistics or events should wait.

        The executor of 1.2 has one iterator. Once exhausted, it yields nothing until another
        request is submitted, so it should wait long. The executor over RPC, an option in 1.2 and
        later the default, queries the engine at each call. Its iterator then waits once more, so it
        should wait briefly (tensorrt_llm/executor/rpc_proxy.py).
        """
        return 0.1 if "Rpc" in type(getattr(llm, "_executor", None)).__name__ else 2.0

    def lora_request(self, digest: str, number: int, path: str) -> Any:
        """Return the reference to an adapter in a directory of this machine."""
        return self._api.LoRARequest(digest, number, path)

    def sampling(self, request: SequenceRequest, stop_ids: frozenset[int]) -> Any:
        """Return the `SamplingParams` of a request."""
        wanted = request.sampling
        arguments: dict[str, Any] = {
            "max_tokens": request.output_tokens_max,
            "end_id": -1,
            "pad_id": 0,
            "stop_token_ids": sorted(stop_ids) or None,
            "include_stop_str_in_output": True,
            "detokenize": False,
            "add_special_tokens": False,
        }
        if wanted.temperature == 0:
            arguments["top_k"] = 1  # greedy in every version, whereas a temperature of 0 is not
        else:
            arguments["temperature"] = wanted.temperature
            arguments["seed"] = wanted.seed
            if wanted.top_p < 1:
                arguments["top_p"] = wanted.top_p
            if wanted.top_k:
                arguments["top_k"] = wanted.top_k
        if wanted.logprobs >= 0:
            # for 1.2, 0 means no logprobs at all
            arguments["logprobs"] = max(1, wanted.logprobs)
        if wanted.grammar is not None:
            arguments["guided_decoding"] = self._api.GuidedDecodingParams(**guide(wanted.grammar))
        return self._api.SamplingParams(**arguments)


def guide(grammar: Grammar) -> dict[str, Any]:
    """Return the arguments of `GuidedDecodingParams` for a grammar.

    Raises:
        ValueError: The choices are not a JSON array of texts.
    """
    if grammar.kind is GrammarKind.JSON:
        return {"json_object": True}
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return {"json": grammar.text}
    if grammar.kind is GrammarKind.REGEX:
        return {"regex": grammar.text}
    if grammar.kind is GrammarKind.CHOICE:
        return {"regex": choice_regex(grammar.text)}
    return {"grammar": grammar.text}


def choice_regex(text: str) -> str:
    """Return a regular expression that matches exactly the texts in a JSON array."""
    choices = json.loads(text)
    if type(choices) is not list or not choices or any(type(it) is not str for it in choices):
        raise ValueError("a choice is a JSON array of at least one string")
    return "|".join(_REGEX_META.sub(r"\\\g<0>", choice) for choice in choices)


def classify(error: Exception, request_error: type[Exception]) -> tuple[Finish, ErrorCode, str]:
    """Return finish reason, code and message for a sequence that this error ends."""
    text = str(error).partition("\nStack trace")[0].strip()[:_MESSAGE_MAX] or repr(error)
    if any(part in text for part in _BUSY):
        return Finish.BUSY, ErrorCode.ENGINE_BUSY, text
    is_input = isinstance(error, ValueError | TypeError)
    if is_input or (isinstance(error, request_error) and any(part in text for part in _REFUSED)):
        return Finish.REFUSED, ErrorCode.ENGINE_REFUSED, text
    return Finish.FAILED, ErrorCode.ENGINE_FAILED, text
