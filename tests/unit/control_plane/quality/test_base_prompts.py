"""Bases are asked in words of their own, as soon as their tokenizer can be read."""

from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from control_plane.quality.askings import DEFAULT_TEXTS
from control_plane.quality.base_prompts import BasePrompts
from control_plane.quality.tokenizing import TokenizingError, token_ids_apart
from sluice.errors import ErrorCode, PlatformError
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

FILE = Path(__file__).parents[4] / "model_repo/default/tokenizer.json"
A, B = "aa" * 32, "bb" * 32


def feed_of(*bases: str) -> Any:
    state = ControlState()
    for number, base in enumerate(bases):
        name = f"p{number}"
        state.pools[name] = wire.Pool(id=name, base_digest=base, engine="sim")
    return SimpleNamespace(state=state)


async def test_ids_come_from_the_tokenizer_of_the_base() -> None:
    async def read(digest: str, name: str) -> AsyncGenerator[bytes]:
        assert name == "tokenizer.json"
        if digest == B:
            raise PlatformError(ErrorCode.NOT_FOUND, "no artifact")
        content = FILE.read_bytes()
        yield content[:1000]
        yield content[1000:]

    written: dict[str, tuple[int, ...]] = {}

    async def write(base: str, ids: tuple[int, ...]) -> None:
        if not written:
            written[base] = ()
            raise PlatformError(ErrorCode.UNAVAILABLE, "the database is away")
        written[base] = ids

    feed = feed_of(A, B)
    feed.state.bases |= {it: wire.Base(digest=it) for it in (A, B)}
    prompts = BasePrompts(feed, read, write)
    for _ in range(2):
        await prompts.step()
    assert written == {A: prompts.token_ids[A][0]}, "the canary of routers, written at last"
    feed.state.bases[A].canary_token_ids.extend(written.pop(A))
    await prompts.step()
    assert not written, "once"
    tokenizer = Tokenizer.from_file(str(FILE))
    right = [tokenizer.encode(text, add_special_tokens=False).ids for text in DEFAULT_TEXTS]
    assert list(map(list, prompts.token_ids.pop(A))) == right
    assert prompts.token_ids == {}, "B is asked by ids that every vocabulary has"
    feed.state = feed_of(B).state
    await prompts.step()
    assert prompts.token_ids == {}


async def test_a_malformed_tokenizer_is_reported() -> None:
    with pytest.raises(TokenizingError):
        await token_ids_apart(b"{}", ["a"])
