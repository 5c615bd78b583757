"""Tests that an agent executes orders, verifies chunks, and reports sources of bad chunks."""

import asyncio
import errno
import hashlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from replica.agent.artifacts import fetcher as module
from replica.agent.artifacts.fetcher import Fetcher, UnknownArtifactError
from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.partial import Partial
from replica.agent.artifacts.sources import SourceRefusedError
from sluice.errors import ErrorCode, PlatformError
from sluice.manifests import manifest_of_directory
from sluice.wire.distribution.v1 import distribution_pb2 as wire

CONTENTS = [b"first", b"second", b"third"]
PEER = "127.0.0.1:7000"


@dataclass
class Source:
    """A source that has all chunks. A test can make a peer answer wrongly."""

    contents: dict[str, bytes]
    bad: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    tickets: list[str] = field(default_factory=list)

    async def get(self, address, digest, number, piece, ticket="") -> bytes:
        self.asked.append((address, number))
        self.tickets.append(ticket)
        match self.bad.get(address):
            case "refuses":
                raise SourceRefusedError("not here")
            case "fails":
                raise KeyError("a fault of ours")
            case "hangs":
                await asyncio.sleep(3600)
            case "lies":
                return b"x" * piece.size_bytes
        return self.contents[piece.sha256]


class Site:
    def __init__(self, root, source_dir, *, max_bytes: int = 0) -> None:
        self.manifest = manifest_of_directory(source_dir)
        self.digest = self.manifest.digest
        self.source = Source({hashlib.sha256(c).hexdigest(): c for c in CONTENTS})
        self.library = Library(root, max_bytes=max_bytes, reserve_bytes=0)
        self.holdings = Holdings(root, self.library)
        self.known = {self.digest: self.manifest}
        self.fetcher = Fetcher(
            self.holdings,
            self.source,
            self.ask,
            node_id="node",
            downloads_max=2,
            on_news=lambda: None,
        )
        self.failures = []

    async def ask(self, digest):
        if digest not in self.known:
            raise UnknownArtifactError("nobody knows it")
        return self.known[digest]

    def order(self, source_node_id: str = "", stop: int = 3) -> None:
        address = PEER if source_node_id else ""
        order = wire.Order(
            digest=self.digest,
            stop=stop,
            source_node_id=source_node_id,
            source_address=address,
            ticket=f"for {source_node_id}" if source_node_id else "",
            priority=wire.PRIORITY_WARMING,
        )
        self.fetcher.take(wire.DistributionAnswer(orders=[order]))

    async def report(self, condition) -> wire.DistributionReport:
        """Return the first report that meets a condition."""
        async with asyncio.timeout(20):
            while True:
                report = self.fetcher.report(is_full=True)
                self.failures += report.failures
                if condition(report):
                    return report
                await asyncio.sleep(0.01)


@pytest.fixture
def source_dir(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    for number, content in enumerate(CONTENTS):
        (directory / f"{number}.bin").write_bytes(content)
    return directory


@asynccontextmanager
async def running(site):
    await site.holdings.start()
    site.fetcher.connected(is_connected=True)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(site.fetcher.run())
        try:
            yield site
        finally:
            task.cancel()
    site.holdings.close()


def is_complete(report) -> bool:
    return [held.is_complete for held in report.held] == [True]


async def test_ordered_chunks_become_the_artifact(tmp_path, source_dir) -> None:
    async with running(Site(tmp_path / "node", source_dir)) as site:
        site.order("peer", stop=2)
        report = await site.report(lambda report: any(h.chunks == b"\x03" for h in report.held))
        assert not report.held[0].is_complete
        assert site.fetcher.progress(site.digest) == "2 of 3 chunks"
        site.order()
        await site.report(is_complete)
        assert sorted(site.source.asked) == [("", 2), (PEER, 0), (PEER, 1)]
        assert site.fetcher.progress(site.digest) == ""
        assert not site.failures


@pytest.mark.parametrize(
    ("how", "trouble"),
    [
        ("lies", wire.TROUBLE_CORRUPT),
        ("refuses", wire.TROUBLE_REFUSED),
        ("fails", wire.TROUBLE_REFUSED),
    ],
)
async def test_a_bad_source_is_told_and_nothing_of_it_is_kept(
    tmp_path, source_dir, monkeypatch, how, trouble
) -> None:
    monkeypatch.setattr(module, "_DISK_PAUSE_S", 0.1)
    async with running(Site(tmp_path / "node", source_dir)) as site:
        site.source.bad[PEER] = how
        site.order("peer")
        await site.report(lambda _: len(site.failures) >= 3)
        assert {(f.source_node_id, f.trouble) for f in site.failures} == {("peer", trouble)}
        assert all(not held.chunks for held in site.fetcher.report(is_full=True).held)
        site.order()
        await site.report(is_complete)


async def test_a_withdrawn_order_is_given_up_at_once(tmp_path, source_dir) -> None:
    async with running(Site(tmp_path / "node", source_dir)) as site:
        site.source.bad[PEER] = "hangs"
        site.order("peer")
        await site.report(lambda _: len(site.source.asked) == 2)
        site.order()
        await site.report(is_complete)
        assert not site.failures


async def test_an_answer_that_comes_when_the_time_of_a_chunk_is_over_does_no_harm(
    tmp_path, source_dir, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_S", 0.05)
    async with running(Site(tmp_path / "node", source_dir)) as site:
        expired = asyncio.Event()

        async def slow(address, digest, number, piece, ticket) -> bytes:
            if address:
                try:
                    await asyncio.sleep(3600)
                finally:  # the scope has expired, but the download is still listed as running
                    site.order()
                    expired.set()
            return site.source.contents[piece.sha256]

        monkeypatch.setattr(site.source, "get", slow)
        site.order("peer")
        async with asyncio.timeout(20):
            await expired.wait()
        await site.report(is_complete)


def test_a_control_plane_that_was_there_is_waited_for_longer_and_not_by_all_alike(
    tmp_path, monkeypatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    library = Library(tmp_path, max_bytes=0, reserve_bytes=0)
    holdings = Holdings(tmp_path, library)

    def asks_after_s(node_id: str, *, was_connected: bool) -> int:
        nonlocal now_s
        fetcher = Fetcher(
            holdings,
            Source({}),
            None,  # type: ignore[arg-type]
            node_id=node_id,
            downloads_max=1,
            on_news=lambda: None,
        )
        if was_connected:
            fetcher.connected(is_connected=True)
            fetcher.connected(is_connected=False)
        fetcher._state.waits["a" * 64] = module._Wait(now_s)
        begin_s = now_s
        while fetcher._next() is None:
            now_s += 0.25
        return now_s - begin_s

    assert asks_after_s("n", was_connected=False) < 3
    after = {asks_after_s(f"n{number}", was_connected=True) for number in range(32)}
    assert len(after) > 4
    assert min(after) >= 10
    assert max(after) <= 16


async def test_a_download_no_longer_wanted_makes_room(tmp_path, source_dir, monkeypatch) -> None:
    async with running(Site(tmp_path / "node", source_dir, max_bytes=30)) as site:
        other = tmp_path / "other"
        other.mkdir()
        (other / "weights").write_bytes(b"x" * 20)
        site.source.contents[hashlib.sha256(b"x" * 20).hexdigest()] = b"x" * 20
        manifest = manifest_of_directory(other)
        site.known[manifest.digest] = manifest
        site.order("peer", stop=1)
        await site.report(lambda report: any(h.chunks == b"\x01" for h in report.held))
        # The partial artifact is removed at once if its room is needed. Both exceed 30 bytes.
        site.fetcher.take(wire.DistributionAnswer())
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(site.fetcher.ensure(manifest.digest, needed=True))
            await site.report(lambda report: bool(report.needed))
            site.fetcher.take(
                wire.DistributionAnswer(orders=[wire.Order(digest=manifest.digest, stop=1)])
            )
        assert list(site.holdings.partials) == []
        assert not (tmp_path / "node" / ".partial" / site.digest).exists()
    # Otherwise it is removed after a while, even if an earlier agent began it.
    again = Site(tmp_path / "again", source_dir)
    await again.holdings.start()
    await again.holdings.keep(again.manifest)
    await again.holdings.begin(again.manifest)
    again.holdings.close()
    again = Site(tmp_path / "again", source_dir, max_bytes=20)
    await again.holdings.start()
    assert not await again.library.make_room(10, needed=True)  # 16 of 20 bytes are reserved
    again.fetcher.take(wire.DistributionAnswer(wanted=[wire.Wanted(digest=again.digest)]))
    assert not await again.fetcher._drop_idle(0.0)
    again.fetcher.take(wire.DistributionAnswer())
    assert not await again.fetcher._drop_idle(3600.0)
    assert await again.fetcher._drop_idle(0.0)
    assert await again.library.make_room(10, needed=True)
    assert not (tmp_path / "again" / ".partial" / again.digest).exists()
    again.holdings.close()


async def test_room_is_let_go_when_a_download_cannot_begin(
    tmp_path, source_dir, monkeypatch
) -> None:
    site = Site(tmp_path / "node", source_dir, max_bytes=20)
    await site.holdings.start()

    async def begin(_) -> None:
        raise OSError(errno.EIO, "a broken disk")

    monkeypatch.setattr(site.holdings, "begin", begin)
    await site.fetcher._prepare(site.digest)
    assert await site.library.make_room(20, needed=False)


async def test_downloads_that_cannot_be_taken_up_do_not_keep_the_node_from_others(
    tmp_path, source_dir
) -> None:
    site = Site(tmp_path / "node", source_dir)
    await site.holdings.start()
    await site.holdings.keep(site.manifest)
    partials = tmp_path / "node" / ".partial"
    (partials / site.digest).mkdir(parents=True)
    (partials / site.digest / "journal").mkdir()  # a journal must be a file
    (partials / ("a" * 64)).mkdir()  # the manifest is missing
    await site.holdings.start()
    assert site.holdings.partials == {}
    assert [path.name for path in partials.iterdir()] == [site.digest]


async def test_a_waiting_engine_gets_the_artifact_or_the_reason(tmp_path, source_dir) -> None:
    async with running(Site(tmp_path / "node", source_dir)) as site:
        with pytest.raises(PlatformError) as unknown:
            await site.fetcher.ensure("ab" * 32, needed=True)
        assert unknown.value.code is ErrorCode.ADAPTER_NOT_FOUND
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(site.fetcher.ensure(site.digest, needed=True))
            report = await site.report(lambda report: list(report.needed) == [site.digest])
            assert not report.held
            site.order()
        assert not site.fetcher.report(is_full=True).needed


async def test_without_a_control_plane_the_store_is_asked(
    tmp_path, source_dir, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_LOST_S", 0.0)
    monkeypatch.setattr(module, "_LOST_SPREAD_S", 0.0)
    async with running(Site(tmp_path / "node", source_dir)) as site:
        site.fetcher.connected(is_connected=False)
        async with asyncio.timeout(20):
            await site.fetcher.ensure(site.digest, needed=False)
        assert {address for address, _ in site.source.asked} == {""}


async def test_without_room_nothing_is_begun_and_that_is_told(tmp_path, source_dir) -> None:
    async with running(Site(tmp_path / "node", source_dir, max_bytes=10)) as site:
        site.order()
        report = await site.report(lambda report: bool(report.declined))
        assert list(report.declined) == [site.digest]
        with pytest.raises(PlatformError, match="no room") as full:
            await site.fetcher.ensure(site.digest, needed=True)
        assert full.value.code is ErrorCode.ENGINE_BUSY
        assert not site.source.asked


async def test_a_full_disk_is_said_and_tried_again(tmp_path, source_dir, monkeypatch) -> None:
    monkeypatch.setattr(module, "_DISK_PAUSE_S", 1.0)
    async with running(Site(tmp_path / "node", source_dir)) as site:
        with monkeypatch.context() as patch:

            def write(*_) -> None:
                raise OSError(errno.ENOSPC, "no space left on device")

            patch.setattr(Partial, "write", write)
            site.order()
            with pytest.raises(PlatformError, match="disk is full"):
                await site.fetcher.ensure(site.digest, needed=True)
        await site.report(is_complete)
        assert not site.failures


async def test_peers_are_shown_the_ticket_of_the_order(tmp_path, source_dir) -> None:
    async with running(Site(tmp_path / "node", source_dir)) as site:
        site.order("peer")
        await site.report(is_complete)
        assert site.source.asked == [(PEER, 0), (PEER, 1), (PEER, 2)]
        assert set(site.source.tickets) == {"for peer"}


async def test_no_peer_is_asked_with_expired_tickets(tmp_path, source_dir, monkeypatch) -> None:
    monkeypatch.setattr(module, "_ORDERS_S", -1.0)
    async with running(Site(tmp_path / "node", source_dir)) as site:
        site.order("peer")
        assert site.fetcher._next() is None
        site.order()
        await site.report(is_complete)
        assert {address for address, _ in site.source.asked} == {""}
        assert not site.failures
