"""CPU of the gateway for a turn of a long chain, from Valkey's bytes to a prompt for the router.

One operation: a turn of 1,200 new tokens behind stored turns. `read_us`: these are made items and
messages of; `encoded_us`: rendered, tokenized, hashed and packed with the new ones. `turn_2`
continues one turn, `turn_50` forty-nine. The worker has answered the turn before, so segments and
spans of it are known; `known_us` is what hashing and packing all of it would have added. Not
measured: limits, the router, the stream. Read the medians of the rounds.
Run: `python -m benchmarks.micro.chains`.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from benchmarks.results import write_result
from gateway.bases.assets import BaseAssets, load_base
from gateway.bodies.messages import Message
from gateway.bodies.response_items import (
    InputItem,
    InputItems,
    MessageItem,
    messages_of,
    stored_items,
)
from gateway.text.packed_prompt import packed_ids
from sluice.hashing import chained_hashes
from sluice.wire.state.v1 import state_pb2 as wire
from tests.support.random_models import write_random_model

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(InputItems)
_ROUNDS, _TURNS, _REPEATS = 9, (2, 50), 40
_ROOT = b"r" * 16
_WORDS = " tell me of the river"


def _turn(number: int) -> bytes:
    """Return a stored turn."""
    said = MessageItem(role="user", content=f"question {number}:" + _WORDS * _REPEATS)
    part = {"type": "output_text", "text": f"answer {number}:" + _WORDS * _REPEATS}
    answer = {"type": "message", "role": "assistant", "content": [part], "id": f"msg_{number}"}
    return wire.StoredResponse(
        id=f"resp_{number}",
        input_items=orjson.dumps(stored_items([said], f"{number}")),
        response=orjson.dumps({"output": [answer]}),
    ).SerializeToString()


def _messages(chain: list[bytes], turn: int) -> list[Message]:
    before = list[Any]()
    for data in chain:
        stored = wire.StoredResponse.FromString(data)
        before += _ITEMS.validate_python(orjson.loads(stored.input_items))
        before += _ITEMS.validate_python(orjson.loads(stored.response)["output"])
    own = MessageItem(role="user", content=f"now {turn}:" + _WORDS * 2 * _REPEATS)
    return messages_of([own], before)


def _us_since(started_ns: int) -> float:
    return (time.process_time_ns() - started_ns) / 1e3


async def _measured(assets: BaseAssets, turns: int) -> dict[str, float]:
    chain = [_turn(number) for number in range(turns - 1)]
    found: dict[str, list[float]] = {"read_us": [], "encoded_us": [], "known_us": []}
    await assets.encode_chat(_messages(chain, 0), (), _ROOT)
    tokens = 0
    for turn in range(1, _ROUNDS + 1):
        started_ns = time.process_time_ns()
        messages = _messages(chain, turn)
        found["read_us"].append(_us_since(started_ns))
        started_ns = time.process_time_ns()
        prompt = await assets.encode_chat(messages, (), _ROOT)
        found["encoded_us"].append(_us_since(started_ns))
        started_ns, tokens = time.process_time_ns(), len(prompt.ids)
        chained_hashes(prompt.ids, _ROOT)
        packed_ids(prompt.ids)
        found["known_us"].append(_us_since(started_ns))
    figures = {name: round(statistics.median(it)) for name, it in found.items()}
    total_us = figures["read_us"] + figures["encoded_us"]
    return {"prompt_tokens": tokens, **figures, "total_us": total_us}


async def _run() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder) / "base")
        assets = load_base(Path(folder) / "base")
    return {f"turn_{turns}": await _measured(assets, turns) for turns in _TURNS}


def main() -> None:
    """Run both and write `benchmarks/results/chains.json`."""
    figures = asyncio.run(_run())
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    print(write_result("chains", operation, {"rounds": _ROUNDS, **figures}).read_text())


if __name__ == "__main__":
    main()
