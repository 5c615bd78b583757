"""Loads the driver `trtllm`, which runs TensorRT-LLM in this process through its LLM API.

The loaded engine generates one token before it is returned, which proves that it works.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replica.drivers.options import parse_options
from replica.drivers.trtllm_api import TrtllmApi
from replica.drivers.trtllm_client import RequestEnd, Statistics, TrtllmClient
from replica.drivers.trtllm_driver import TrtllmDriver
from replica.drivers.trtllm_options import TrtllmOptions, check_options, llm_arguments
from replica.engine.artifact import BaseFacts, read_base_facts
from replica.engine.types import Grammar, Limits, SequenceRequest
from sluice.hashing import cache_root

log = logging.getLogger(__name__)

_STATISTICS_S = 10.0  # longest wait for the statistics of the first request, in seconds


def load_trtllm(
    directory: Path,
    base_digest: str,
    options: Mapping[str, Any],
    *,
    make_api: Callable[[], TrtllmApi] = TrtllmApi,
    clock: Callable[[], float] = time.monotonic,
) -> TrtllmDriver:
    """Return the engine for the checkpoint in `directory`, after it has generated a first token.

    Raises:
        OptionsError: An option is unknown, of the wrong type, or impossible.
        ArtifactError: config.json is missing or incomplete.
        ValueError: TensorRT-LLM is absent or too old, or cannot load or run the model.
    """
    chosen = parse_options(TrtllmOptions, options)
    check_options(chosen)
    facts = read_base_facts(directory)
    context = min(chosen.context_tokens_max or facts.context_tokens, facts.context_tokens)
    api = make_api()
    arguments = llm_arguments(api, directory, chosen, context)
    has_cache_events = chosen.prefix_cache and chosen.kv_events_max > 0
    client = TrtllmClient(api, arguments, has_cache_events=has_cache_events)
    try:
        statistics = _first_token(api, client, facts, chosen.load_s_max)
    except ValueError:
        client.close(10.0)
        raise
    cache = statistics.get("kvCacheStats") or {}
    limits = Limits(
        context_tokens_max=context,
        sequences_max=chosen.sequences_max,
        step_tokens_max=max(chosen.step_tokens_max, chosen.sequences_max),
        kv_blocks=int(cache.get("maxNumBlocks") or 0),
        vocabulary=facts.vocabulary,
    )
    root = cache_root(base_digest, "", b"")
    return TrtllmDriver(
        api,
        client,
        facts,
        limits,
        chosen,
        root=root,
        check_grammar=_grammar_check(directory, facts),
        clock=clock,
    )


def _grammar_check(directory: Path, facts: BaseFacts) -> Callable[[Grammar], None] | None:
    """Return the platform's check of grammars, or None if the installed llguidance is too old.

    TensorRT-LLM 1.2 pins a version of llguidance (0.7) that may lack a required function.
    """
    try:
        from replica.engine.grammar import GrammarCompiler
    except ImportError as error:
        log.warning("grammars_unchecked: %s", error)
        return None
    return GrammarCompiler(directory / "tokenizer.json", facts.vocabulary, facts.eos_ids).check


def _first_token(
    api: TrtllmApi, client: TrtllmClient, facts: BaseFacts, timeout_s: float
) -> Mapping[str, Any]:
    """Generate one token, which proves that the engine works, and return its statistics."""
    request = SequenceRequest(0, [facts.vocabulary // 2], 1)
    client.submit(
        0, list(request.prompt), api.sampling(request, frozenset()), lora=None, cache_salt=None
    )
    ends_at_s = time.monotonic() + timeout_s
    has_ended = False
    while (now_s := time.monotonic()) < ends_at_s:
        for message in client.take(min(1.0, ends_at_s - now_s)):
            if isinstance(message, RequestEnd):
                if message.error is not None:
                    raise ValueError(f"TensorRT-LLM cannot run the model: {message.error!r}")
                has_ended = True
                ends_at_s = min(ends_at_s, now_s + _STATISTICS_S)
            elif isinstance(message, Statistics) and "kvCacheStats" in message.values:
                return message.values
    if not has_ended:
        raise ValueError(f"TensorRT-LLM gave no token within {timeout_s:g} s (load_s_max)")
    raise ValueError(
        f"TensorRT-LLM {api.version} reports no kvCacheStats; the driver needs their maxNumBlocks"
    )
