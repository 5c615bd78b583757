"""Tests that the server for other nodes sends chunks for a valid ticket, and no other file."""

import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.partial import Piece
from replica.agent.artifacts.peer_keys import PeerKeys
from replica.agent.artifacts.peers import serve_peers
from replica.agent.artifacts.sources import SourceRefusedError, Sources
from sluice.manifests import manifest_of_directory
from sluice.tickets import write

KEY, NEXT_KEY = b"k" * 32, b"n" * 32
OTHER = "a" * 64


def ticket(digest: str, key_id: int = 7, key: bytes = KEY, for_s: float = 600.0) -> str:
    return write(key_id, key, digest, "node", int(time.time() + for_s))


class Site:
    """A node that serves one artifact of one chunk."""

    def __init__(self, root: Path, digest: str, keys: PeerKeys, client) -> None:
        self.root, self.digest, self.keys, self.client = root, digest, keys, client
        self.sent: list[int] = []
        self.options = {"uploads_max": 2, "bytes_per_s": 0.0, "count": self.sent.append}
        self.address = ""

    async def get(self, path: str, shown: str | None) -> tuple[int, bytes]:
        headers = {} if shown is None else {"Authorization": shown}
        async with self.client.get(f"http://{self.address}{path}", headers=headers) as answer:
            return answer.status, await answer.read()

    async def chunk(self, shown: str | None) -> tuple[int, bytes]:
        return await self.get(f"/v1/artifacts/{self.digest}/chunks/0", shown)


@asynccontextmanager
async def serving(tmp_path: Path, keys: dict[int, bytes]):
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"chunk")
    manifest = manifest_of_directory(source)
    root = tmp_path / "artifacts"
    root.mkdir()
    (root / "secret").write_bytes(b"secret")
    source.rename(root / manifest.digest)
    holdings = Holdings(root, Library(root, max_bytes=0, reserve_bytes=0))
    await holdings.start()
    await holdings.adopt(manifest.digest)
    known = PeerKeys(tmp_path / "keys.json")
    known.take(keys)
    async with aiohttp.ClientSession() as client:
        site = Site(root, manifest.digest, known, client)
        async with serve_peers("127.0.0.1:0", holdings, known, **site.options) as site.address:
            yield site
            with pytest.raises(OSError, match="address already in use"):
                async with serve_peers(site.address, holdings, known, **site.options):
                    pass
    holdings.close()


async def test_chunks_and_nothing_else(tmp_path) -> None:
    async with serving(tmp_path, {7: KEY}) as site:
        shown = f"Bearer {ticket(site.digest)}"
        assert await site.chunk(shown) == (200, b"chunk")
        assert site.sent == [5]
        chunks = f"/v1/artifacts/{site.digest}/chunks"
        for path in (
            f"{chunks}/1",
            f"{chunks}/-1",
            f"{chunks}/99999",
            f"{chunks}/0/",
            f"{chunks}/%30/../../secret",
            "/v1/artifacts/../chunks/0",
            "/v1/artifacts/%2e%2e%2fsecret/chunks/0",
            "/secret",
            "/",
        ):
            assert (await site.get(path, shown))[0] == 404, path
        elsewhere = f"/v1/artifacts/{OTHER}/chunks/0"
        assert (await site.get(elsewhere, f"Bearer {ticket(OTHER)}"))[0] == 404


async def test_without_a_ticket_no_peer_learns_the_contents(tmp_path) -> None:
    async with serving(tmp_path, {7: KEY}) as site:
        good = ticket(site.digest)
        for shown in (
            None,
            "",
            "Bearer",
            "Bearer ",
            f"Basic {good}",
            f"Bearer {good}x",
            f"Bearer {ticket(OTHER)}",
            f"Bearer {ticket(site.digest, for_s=-1.0)}",
            f"Bearer {ticket(site.digest, key=NEXT_KEY)}",
            f"Bearer {ticket(site.digest, key_id=8)}",
            "Bearer 7.99999999999.\xff.node",
        ):
            assert (await site.chunk(shown))[0] == 403, shown
            elsewhere = f"/v1/artifacts/{'b' * 64}/chunks/0"
            assert (await site.get(elsewhere, shown))[0] == 403
        assert site.sent == []
        assert await site.chunk(f"Bearer {good}") == (200, b"chunk")


async def test_keys_rotate_and_the_last_ones_outlive_the_agent(tmp_path) -> None:
    async with serving(tmp_path, {}) as site:
        old, new = ticket(site.digest), ticket(site.digest, 8, NEXT_KEY)
        assert (await site.chunk(f"Bearer {old}"))[0] == 503, "its keys are on their way"
        assert (await site.chunk(None))[0] == 403
        site.keys.take({7: KEY, 8: NEXT_KEY})
        assert (await site.chunk(f"Bearer {old}"))[0] == 200
        assert (await site.chunk(f"Bearer {new}"))[0] == 200
        site.keys.take({8: NEXT_KEY, 9: b"z" * 32})
        assert (await site.chunk(f"Bearer {old}"))[0] == 403
        # The agent starts again while no control plane can be reached.
        again = PeerKeys(tmp_path / "keys.json")
        holdings = Holdings(site.root, Library(site.root, max_bytes=0, reserve_bytes=0))
        await holdings.start()
        await holdings.adopt(site.digest)
        async with serve_peers("127.0.0.1:0", holdings, again, **site.options) as address:
            site.address, before = address, site.address
            assert (await site.chunk(f"Bearer {new}"))[0] == 200
            assert (await site.chunk(f"Bearer {old}"))[0] == 403
        site.address = before
        holdings.close()


async def test_a_node_shows_its_ticket(tmp_path) -> None:
    store = (tmp_path / "store").as_uri()
    async with serving(tmp_path, {7: KEY}) as site, Sources.open(store, 0.0) as sources:
        piece = Piece("", 5, ())
        found = await sources.get(site.address, site.digest, 0, piece, ticket(site.digest))
        assert found == b"chunk"
        with pytest.raises(SourceRefusedError, match="answered 403"):
            await sources.get(site.address, site.digest, 0, piece)
