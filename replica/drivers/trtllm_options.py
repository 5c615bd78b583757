"""Translates options of the driver `trtllm` into arguments of TensorRT-LLM's `LLM`.

The names are from the 1.2 line of NVIDIA/TensorRT-LLM. The arguments of `LLM` are in
references_committed/llm.yaml @e00a1866 and references/llm.yaml @ea35fd67 of
tests/unittest/api_stability. The classes are in tensorrt_llm/llmapi/__init__.py @5ca85aff. Comments
name changes in newer lines that matter here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from replica.drivers.options import OptionsError
from replica.drivers.trtllm_api import TrtllmApi
from sluice.adapter_ranks import adapter_room
from sluice.hashing import BLOCK_TOKENS

_ROOM = adapter_room("trtllm")

# Kind of speculation -> names of its class. The first that exists in the installed version is used.
_SPECULATION: Mapping[str, tuple[str, ...]] = {
    "NGram": ("NGramDecodingConfig",),
    "Eagle3": ("Eagle3DecodingConfig", "EagleDecodingConfig"),  # split into two classes after 1.2
    "MTP": ("MTPDecodingConfig",),
    "DraftTarget": ("DraftTargetDecodingConfig",),
}
# Places in a batch for probes only. Without one, a probe would wait for the sequences before it.
PROBE_PLACES = 1
_GRAMMAR_ENGINES = ("llguidance", "")


@dataclass(frozen=True, slots=True)
class TrtllmOptions:
    """Options of the driver `trtllm`, set by SLUICE_ENGINE_OPTIONS.

    Quantized checkpoints need no option, because TensorRT-LLM reads their method from their files.

    Attributes:
        tensor_parallel: Number of GPUs that share each layer.
        pipeline_parallel: Number of GPUs between which the layers are divided.
        expert_parallel: Number of GPUs that share the experts of a mixture, or 0 for TensorRT-LLM's
            choice.
        dtype: Number format of the computation, or auto for that of the checkpoint.
        sequences_max: Largest number of sequences in one batch. `max_batch_size` is one more, so
            that a probe always has a place.
        step_tokens_max: Largest number of tokens per iteration (`max_num_tokens`). Longer prompts
            are chunked.
        context_tokens_max: Largest number of tokens of a sequence, or 0 for the base's own limit.
        kv_memory_share: Share of the GPU memory that remains after loading, for the KV cache.
        kv_tokens_max: Upper bound of the cache in tokens, or 0 for no bound except memory.
        kv_dtype: Number format of the cache, by TensorRT-LLM's names: auto, fp8, ...
        kv_host_bytes: Bytes of host memory to which blocks move when the GPU's memory is full.
        kv_events_max: Largest number of cache events between two reads. 0 means that routers
            receive no reports of the cache.
        stream_interval: Number of tokens per sequence and message. Larger numbers save CPU time but
            delay tokens.
        grammars: Compiler of grammars, llguidance or empty for none. xgrammar is not supported,
            because its EBNF differs from Lark's.
        grammars_unchecked: Whether grammars are served even if the installed llguidance is too old
            for the check. Without the check, a hostile grammar can end the process.
        adapter_slots: Number of LoRA adapters in one batch, or 0 if none are served.
        adapter_rank: Largest rank of an adapter.
        adapter_modules: Target modules of adapters by TensorRT-LLM's names, separated by commas.
        adapter_memory_bytes: Largest number of bytes of all adapters in host memory.
        adapters_cached_max: Number of adapters that TensorRT-LLM itself stores in host memory
            (`max_cpu_loras`).
        speculation: JSON object with decoding_type (NGram, Eagle3, MTP, DraftTarget, ...) and the
            fields of its class, or empty for none.
        load_s_max: Longest time until the engine is loaded and has generated a token, in seconds.
        silence_s_max: Seconds without any token, while sequences run, after which the engine counts
            as dead.
        trust_remote_code: Whether the checkpoint's own Python code may run.
        extra: JSON object of further `LLM` arguments, for example moe_config. Arguments that other
            options set are refused.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 0
    dtype: str = "auto"
    sequences_max: int = 256
    step_tokens_max: int = 8192
    context_tokens_max: int = 0
    prefix_cache: bool = True
    kv_memory_share: float = 0.9
    kv_tokens_max: int = 0
    kv_dtype: str = "auto"
    kv_host_bytes: int = 0
    kv_events_max: int = 65_536
    stream_interval: int = 1
    grammars: str = "llguidance"
    grammars_unchecked: bool = False
    adapter_slots: int = _ROOM.slots
    adapter_rank: int = _ROOM.rank
    adapter_modules: str = "attn_q,attn_k,attn_v,attn_dense,mlp_h_to_4h,mlp_4h_to_h,mlp_gate"
    adapter_memory_bytes: int = 4 << 30
    adapters_cached_max: int = 64
    speculation: str = ""
    load_s_max: float = 1800.0
    silence_s_max: float = 60.0
    trust_remote_code: bool = False
    extra: str = ""


def check_options(options: TrtllmOptions) -> None:
    """Raise OptionsError for invalid values. Tests run this check without TensorRT-LLM."""
    positive = {
        "tensor_parallel": options.tensor_parallel,
        "pipeline_parallel": options.pipeline_parallel,
        "sequences_max": options.sequences_max,
        "step_tokens_max": options.step_tokens_max,
        "stream_interval": options.stream_interval,
        "load_s_max": options.load_s_max,
        "silence_s_max": options.silence_s_max,
    }
    for name, value in positive.items():
        if not value > 0:
            raise OptionsError(f"engine option {name} is {value}; it must be above 0")
    if not 0 < options.kv_memory_share < 1:
        raise OptionsError(
            f"engine option kv_memory_share is {options.kv_memory_share}, not in 0..1"
        )
    if options.grammars not in _GRAMMAR_ENGINES:
        raise OptionsError(f"engine option grammars is {options.grammars!r}; llguidance or empty")
    if options.adapter_slots and not options.adapter_modules:
        raise OptionsError("engine option adapter_modules is empty; adapters need modules")
    speculation = _json_object("speculation", options.speculation)
    if speculation and speculation.get("decoding_type") not in _SPECULATION:
        raise OptionsError(
            f"engine option speculation: decoding_type is {speculation.get('decoding_type')!r};"
            f" known are {', '.join(_SPECULATION)}"
        )
    _json_object("extra", options.extra)


def llm_arguments(
    api: TrtllmApi, directory: Path, options: TrtllmOptions, context_tokens_max: int
) -> dict[str, Any]:
    """Return the arguments of `LLM`. Raises OptionsError if the installed version lacks one."""
    cache: dict[str, Any] = {
        "enable_block_reuse": options.prefix_cache,
        "free_gpu_memory_fraction": options.kv_memory_share,
        "dtype": options.kv_dtype,
        "tokens_per_block": BLOCK_TOKENS,
    }
    if options.prefix_cache:
        cache["event_buffer_max_size"] = options.kv_events_max
    if options.kv_tokens_max:
        cache["max_tokens"] = options.kv_tokens_max
    if options.kv_host_bytes:
        cache["host_cache_size"] = options.kv_host_bytes
    arguments: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": not options.grammars,  # a grammar needs the texts of tokens
        "trust_remote_code": options.trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
        "dtype": options.dtype,
        "max_batch_size": options.sequences_max + PROBE_PLACES,
        "max_num_tokens": options.step_tokens_max,
        "max_seq_len": context_tokens_max,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "stream_interval": options.stream_interval,
        "kv_cache_config": api.make("KvCacheConfig", **cache),
    }
    if options.expert_parallel:
        arguments["moe_expert_parallel_size"] = options.expert_parallel
    if options.grammars:
        arguments["guided_decoding_backend"] = options.grammars
    if options.adapter_slots:
        arguments["lora_config"] = api.lora_config(
            lora_target_modules=options.adapter_modules.split(","),
            max_lora_rank=options.adapter_rank,
            max_loras=options.adapter_slots,
            max_cpu_loras=max(options.adapters_cached_max, options.adapter_slots),
        )
    speculation = _json_object("speculation", options.speculation)
    if speculation:
        arguments["speculative_config"] = api.make(
            *_SPECULATION[speculation.pop("decoding_type")], **speculation
        )
    extra = _json_object("extra", options.extra)
    for name in extra:
        if name in arguments:
            raise OptionsError(f"engine option extra names {name}, which another option sets")
    return arguments | extra


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text or "{}")
    except ValueError as error:
        raise OptionsError(f"engine option {name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise OptionsError(f"engine option {name} is not a JSON object")
    return cast("dict[str, Any]", document)
