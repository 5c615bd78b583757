"""The server for other nodes: chunks that are there, and nothing else of the machine."""

import aiohttp
import pytest

from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.peers import serve_peers
from sluice.manifests import manifest_of_directory


async def test_chunks_and_nothing_else(tmp_path) -> None:
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
    sent: list[int] = []
    options = {"uploads_max": 2, "bytes_per_s": 0.0, "count": sent.append}
    async with (
        serve_peers("127.0.0.1:0", holdings, **options) as address,
        aiohttp.ClientSession() as client,
    ):

        async def get(path: str) -> tuple[int, bytes]:
            async with client.get(f"http://{address}{path}") as answer:
                return answer.status, await answer.read()

        chunks = f"/v1/artifacts/{manifest.digest}/chunks"
        assert await get(f"{chunks}/0") == (200, b"chunk")
        assert sent == [5]
        for path in (
            f"{chunks}/1",
            f"{chunks}/-1",
            f"{chunks}/99999",
            f"{chunks}/0/",
            f"{chunks}/%30/../../secret",
            f"/v1/artifacts/{'a' * 64}/chunks/0",
            "/v1/artifacts/../chunks/0",
            "/v1/artifacts/%2e%2e%2fsecret/chunks/0",
            "/secret",
            "/",
        ):
            assert (await get(path))[0] == 404, path
        with pytest.raises(OSError, match="address already in use"):
            async with serve_peers(address, holdings, **options):
                pass
