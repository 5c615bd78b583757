"""Greedy decoding on the platform's own engine, as it serves: the figure that users get.

Uses the `openvino` driver with its default options (on CPUs with bfloat16 that is bf16 and an
8-bit KV cache). Needs the `replica` extra, not torch.
"""

from collections.abc import Sequence
from pathlib import Path

from replica.drivers.openvino import load_openvino
from replica.engine.types import SequenceRequest
from sluice.hashing import cache_root
from training.evaluate import Decode
from training.tokenizer import TURN_END_ID

_BASE_NAME = "evaluation"


def decoder(path: Path, adapter: Path | None = None) -> Decode:
    """Return a decoder for the model of the directory `path`, with an adapter or without."""
    driver = load_openvino(path, _BASE_NAME, {})
    adapter_name = adapter.name if adapter else ""
    if adapter:
        driver.put_adapter(adapter_name, driver.read_adapter(adapter_name, adapter))
    root = cache_root(_BASE_NAME, adapter_name, b"")

    def decode(prompts: Sequence[Sequence[int]], tokens_max: int) -> list[list[int]]:
        written: list[list[int]] = [[] for _ in prompts]
        for index, prompt in enumerate(prompts):
            request = SequenceRequest(
                index, prompt, tokens_max, cache_root=root, adapter_digest=adapter_name
            )
            driver.add(request)
        while driver.has_work:
            events = driver.step()
            for index, token in zip(events.keys, events.tokens, strict=True):
                if token != TURN_END_ID:
                    written[index].append(token)
        return written

    return decode
