"""The beginning of a prompt that is to stay in the caches of engines."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.bases.assets import load_base
from gateway.bodies.parsing import parse
from gateway.endpoints.chat_task import ChatTask
from gateway.resolved import ResolvedModel
from sluice.hashing import BLOCK_TOKENS
from sluice.wire.control.v1 import control_pb2 as control

ASSETS = load_base(Path(__file__).resolve().parents[3] / "model_repo" / "default")
WARM = "You are the keeper of a gate by a river. " * 20
RESOLVED = ResolvedModel(
    name="m",
    model=control.Model(id="m"),
    context_tokens_max=40_960,
    tenant_id="t",
    cache_root=b"r" * 16,
    generates_text=True,
    warm_prompts=control.WarmPrompts(id="m", prompts=[WARM]),
)
TOOL = {"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}


def encoded(messages: list[tuple[str, str]], resolved: ResolvedModel = RESOLVED, **fields):
    listed = [{"role": role, "content": content} for role, content in messages]
    task = parse(ChatTask, json.dumps({"model": "m", "messages": listed, **fields}).encode())
    (prompt,) = asyncio.run(task.encoded(ASSETS, resolved))
    return prompt


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
def test_all_conversations_that_begin_with_it_pin_the_same_blocks(fields: dict) -> None:
    one = encoded([("system", WARM), ("user", "Who is there?" * 40)], **fields)
    other = encoded([("system", WARM), ("user", "x"), ("assistant", "y"), ("user", "z")], **fields)
    assert one.pinned_blocks == other.pinned_blocks > 0
    assert (
        one.block_hashes[: 16 * one.pinned_blocks] == other.block_hashes[: 16 * one.pinned_blocks]
    )
    tokens = len(ASSETS.tokenizer.encode(WARM).ids)
    assert tokens - BLOCK_TOKENS < one.pinned_blocks * BLOCK_TOKENS


@pytest.mark.parametrize("first", [("system", WARM + "!"), ("user", "a"), ("system", WARM[:-1])])
def test_another_beginning_pins_nothing(first: tuple[str, str]) -> None:
    assert encoded([first, ("user", "Who is there?")]).pinned_blocks == 0


def test_a_model_without_warm_prompts_pins_nothing() -> None:
    cold = replace(RESOLVED, warm_prompts=None)
    messages = [("system", WARM), ("user", "Who is there?")]
    assert encoded(messages, cold).pinned_blocks == 0
    assert encoded(messages, cold).ids == encoded(messages).ids
