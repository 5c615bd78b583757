"""A base that came after the gateway was set up: its small files are fetched, its rollout waits."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from gateway.bases.shelf import BaseShelf
from gateway.bases.source import BaseFetchError, fetch_base
from sluice.artifacts import digest_directory
from sluice.split import SHARE_MAX
from sluice.wire.control.v1 import control_pb2 as control
from tests.support.random_models import write_random_model
from tests.support.scripted_router import BaseFiles, serve

pytestmark = pytest.mark.real

WAIT_S = 60
HELLO = {"prompt": "hello", "max_tokens": 2}
_FETCH = """
import asyncio, sys
from pathlib import Path
from gateway.bases.fetcher import BaseFetcher
from gateway.bases.shelf import BaseShelf
from gateway.bases.source import fetch_base
from sluice import shared_secret

shared_secret.use()

async def main(address, root, digest):
    came = asyncio.Event()
    fetcher = BaseFetcher(
        None, BaseShelf(Path(root), 1 << 30), lambda it: fetch_base(address, it),
        on_arrival=lambda _: came.set(), count=lambda _: None,
    )
    task = asyncio.ensure_future(fetcher.run())
    fetcher.want(digest)
    print("wanted", flush=True)
    await came.wait()
    task.cancel()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def new_base(tmp_path: Path) -> tuple[str, Path]:
    directory = tmp_path / "new"
    write_random_model(directory, seed=1)
    return digest_directory(directory), directory


def rolled_out(world, digest: str, share: int) -> control.Objects:
    """The world, with a rollout of the model `tiny` to a base."""
    objects = control.Objects()
    objects.CopyFrom(world.feed.objects)
    objects.bases.add(digest=digest, context_tokens_max=256)
    for name, base in (("1", world.digest), ("2", digest)):
        objects.releases.add(id=f"tiny@{name}", model_id="tiny", base_digest=base, pool_id="pool")
    names = {"id": "tiny", "control": "1", "canary": "2", "salt": "s", "rollout_id": "r"}
    objects.splits.add(share=share, **names)
    return objects


async def ask(http, model: str = "tiny"):
    return await http.post("/v1/completions", json=HELLO | {"model": model})


async def count(http, name: str) -> float:
    page = (await http.get("/metrics")).text
    return sum(float(it.split()[-1]) for it in page.splitlines() if it.startswith(name))


async def test_a_rollout_stays_with_control_until_the_new_bases_files_are_here(
    world, new_base, eventually
) -> None:
    digest, directory = new_base
    async with world() as w, w.http() as http:
        w.base_files.directories[digest] = directory
        w.base_files.is_open.clear()
        w.feed.replace(rolled_out(w, digest, SHARE_MAX))
        await eventually(lambda: w.base_files.asked)
        answers = [await ask(http) for _ in range(3)]
        assert [it.status_code for it in answers] == [200] * 3, answers[0].text
        assert not any("x-sluice-release" in it.headers for it in answers), "nothing chose it"
        assert await count(http, 'gateway_rollout_requests_total{arm="unready"}') == 3
        assert await count(http, 'gateway_rollout_requests_total{arm="control"}') == 0
        assert await count(http, "gateway_bases_missing") == 1
        assert list(w.feed.confirmed[-1].missing_bases) == [digest], "the rollout waits for it"
        refused = await ask(http, "tiny@2")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        w.base_files.is_open.set()
        await eventually(lambda: w.gateway.assets.has(digest))
        assert (await ask(http)).headers["x-sluice-release"] == "2"
        assert await count(http, "gateway_bases_missing") == 0
        await eventually(lambda: not w.feed.confirmed[-1].missing_bases)
    assert "model.safetensors" not in w.base_files.asked
    kept = w.settings.state_dir / "bases" / digest
    assert not list(kept.glob("*.safetensors"))
    assert (kept / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


async def test_a_gateway_without_artifacts_serves_and_starts_again_without_the_control_plane(
    world, artifacts, eventually
) -> None:
    root, digest, _ = artifacts
    async with world(artifacts_dir=None) as w, w.http() as http:
        w.base_files.directories[digest] = root / digest
        async with asyncio.timeout(WAIT_S):
            while (answer := await ask(http)).status_code != 200:
                assert answer.json()["error"]["code"] == "unavailable"
                await asyncio.sleep(0.05)
        asked = len(w.base_files.asked)
    async with world(artifacts_dir=None) as w, w.http() as http:  # has no files to give
        await eventually(lambda: w.gateway.assets.has(digest))
        assert (await ask(http)).status_code == 200
        assert asked
        assert w.base_files.asked == []


async def test_fetched_files_match_the_digest(new_base) -> None:
    digest, directory = new_base
    files = BaseFiles()
    async with serve(files) as address:
        with pytest.raises(BaseFetchError, match="no artifact"):
            await fetch_base(address, digest)
        files.directories[digest] = directory
        files.spoiled = 1
        with pytest.raises(BaseFetchError, match="another SHA-256"):
            await fetch_base(address, digest)
        found = await fetch_base(address, digest)
        assert found == {name: (directory / name).read_bytes() for name in found}
        assert {"tokenizer.json", "config.json"} <= found.keys()
        files.directories["0" * 64] = directory
        with pytest.raises(BaseFetchError, match="another manifest"):
            await fetch_base(address, "0" * 64)
    with pytest.raises(BaseFetchError):
        await fetch_base(address, digest)  # nobody listens any more


async def test_workers_that_are_killed_leave_a_shelf_that_the_next_one_fills(
    new_base, tmp_path, eventually
) -> None:
    digest, directory = new_base
    files, root = BaseFiles(), tmp_path / "bases"
    files.directories[digest] = directory
    files.is_open.clear()

    async def start(address: str) -> asyncio.subprocess.Process:
        command = [sys.executable, "-c", _FETCH, address, str(root), digest]
        made = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        started.append(made)
        assert made.stdout is not None
        await made.stdout.readline()
        return made

    started: list[asyncio.subprocess.Process] = []
    try:
        async with serve(files) as address, asyncio.timeout(4 * WAIT_S):
            killed = await start(address)
            await eventually(lambda: files.asked)  # it has the lock, and waits for the first file
            others = [await start(address) for _ in range(2)]
            killed.send_signal(signal.SIGKILL)
            await killed.wait()
            await eventually(lambda: len(files.asked) > 1)  # another one goes on
            files.is_open.set()
            assert [await it.wait() for it in others] == [0, 0]
    finally:
        for it in started:
            if it.returncode is None:
                it.kill()
                await it.wait()
    assert len([it for it in files.asked if it == "tokenizer.json"]) == 2, "two fetched at once"
    assert BaseShelf(root, 1 << 30).find(digest)
    assert sorted(path.name for path in root.iterdir()) == [".lock", digest]
