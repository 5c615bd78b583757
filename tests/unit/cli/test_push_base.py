"""The base of a stack is uploaded once, and a start does not wait for it for long."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli.api import ApiClient, ApiError
from cli.stack.base import push_base

NOWHERE = "http://127.0.0.1:1"


class Plane(ApiClient):
    """Takes an upload; when told so it never checks it, or refuses it."""

    is_there = is_stuck = False
    reasons: tuple[str, ...] = ()
    calls: list[str]
    sent: list[bytes]

    async def call(self, method, path, body=None, query=None) -> dict[str, Any]:
        self.calls.append(f"{method} {path.rpartition('/')[2]}")
        if path == "/v1/artifacts/uploads":
            assert body["kind"] == "base"
            hashes = [sha for file in body["manifest"]["files"] for sha in file["chunks"]]
            return {"id": "u", "missing": [{"sha256": sha, "size_bytes": 3} for sha in hashes]}
        if "/uploads/" not in path:
            if not self.is_there:
                raise ApiError("there is no such artifact", 404)
            return {"digest": path}
        state = "checking" if self.is_stuck else "refused" if self.reasons else "ready"
        return {"id": "u", "state": state, "reasons": self.reasons}

    async def send_bytes(self, path: str, content: bytes) -> None:
        self.sent.append(content)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / ("a" * 64)
    directory.mkdir()
    (directory / "weights").write_bytes(b"abc")
    return directory


@pytest.fixture
async def plane():
    async with Plane(NOWHERE, "key") as api:
        api.calls, api.sent = [], []
        yield api


async def test_missing_chunks_are_uploaded(plane, base) -> None:
    assert await push_base(plane, base) == ""
    assert plane.sent == [b"abc"]
    assert plane.calls == [f"GET {'a' * 64}", "POST uploads", "POST complete"]


async def test_stored_chunks_are_not_even_read(plane, base) -> None:
    plane.is_there = True
    (base / "weights").unlink()
    assert await push_base(plane, base) == ""
    assert plane.calls == [f"GET {'a' * 64}"]


async def test_an_upload_without_an_end_is_given_up(plane, base) -> None:
    plane.is_stuck = True
    async with asyncio.timeout(60):
        assert "took more than 0.2 s" in await push_base(plane, base, 0.2)


async def test_failures_are_reported_in_words(plane, base) -> None:
    plane.reasons = ("no tokenizer",)
    assert "no tokenizer" in await push_base(plane, base)
    (base / "link").symlink_to("weights")
    assert "symbolic link" in await push_base(plane, base)
    assert await push_base(plane, base.parent / ("b" * 64))
    async with ApiClient(NOWHERE, "key") as nobody:
        assert "does not answer" in await push_base(nobody, base)
