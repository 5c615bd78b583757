"""All of distribution on a node: the exchange with the control plane, downloads, and serving."""

import asyncio
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from replica.agent.artifacts.exchange import Exchange, Identity, News, ask_manifest
from replica.agent.artifacts.fetcher import Fetcher
from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.peers import serve_peers
from replica.agent.artifacts.sources import Sources
from sluice.errors import ErrorCode, PlatformError
from sluice.lifecycle import run_every

log = structlog.get_logger(__name__)

_LOOK_S = 0.5
_START_AGAIN_S = 5.0
_ASK_AGAIN_S = 5.0  # for a base that nobody knows


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a node must know to fetch and serve.

    Attributes:
        node_id: Of the node.
        region: In which the node stands.
        rack: Unique within its region.
        control_address: host:port of the control plane's gRPC.
        directory: Of artifacts.
        store_url: Where chunks lie.
        peer_address: host:port on which others are served; port 0 picks one.
        downloads_max: At once.
        uploads_max: At once.
        download_bytes_per_s: Of all downloads; 0: any.
        upload_bytes_per_s: Of all uploads; 0: any.
    """

    node_id: str
    region: str
    rack: str
    control_address: str
    directory: Path
    store_url: str
    peer_address: str = "127.0.0.1:0"
    downloads_max: int = 8
    uploads_max: int = 8
    download_bytes_per_s: float = 0.0
    upload_bytes_per_s: float = 0.0


class NodeArtifacts:
    """Gets what the node should have, and serves what it has; `run` it."""

    def __init__(self, options: NodeOptions, library: Library) -> None:
        """Take the options, and what holds whole artifacts."""
        self._options = options
        self._library = library
        self._fetcher: Fetcher | None = None
        self._sources: Sources | None = None
        self._is_up = asyncio.Event()
        self._bases: frozenset[str] = frozenset()
        self._warming: set[str] = set()
        self._unknown: dict[str, float] = {}  # bases that nobody knows: until when
        self.uploaded_bytes = 0

    async def run(self) -> None:
        """Fetch and serve until cancelled.

        While that is impossible, because the address is taken or the folder cannot be used, engines
        do without, and it is tried again.
        """
        while True:
            try:
                await self._run()
            except OSError as error:
                log.warning(
                    "artifacts_not_served", address=self._options.peer_address, error=str(error)
                )
            await asyncio.sleep(_START_AGAIN_S)

    async def _run(self) -> None:
        options, news = self._options, News()
        async with AsyncExitStack() as stack:
            holdings = Holdings(options.directory, self._library)
            stack.callback(holdings.close)
            await holdings.start()
            sources = await stack.enter_async_context(
                Sources.open(options.store_url, options.download_bytes_per_s)
            )
            address = await stack.enter_async_context(
                serve_peers(
                    options.peer_address,
                    holdings,
                    uploads_max=options.uploads_max,
                    bytes_per_s=options.upload_bytes_per_s,
                    count=self._count_upload,
                )
            )
            fetcher = Fetcher(
                holdings,
                sources,
                partial(ask_manifest, options.control_address),
                downloads_max=options.downloads_max,
                on_news=news.note,
            )
            identity = Identity(options.node_id, options.region, options.rack, address)
            exchange = Exchange(options.control_address, identity, fetcher, news, options.directory)
            self._fetcher, self._sources = fetcher, sources
            self._is_up.set()
            log.info("artifacts_served", address=address)
            async with asyncio.TaskGroup() as group:
                group.create_task(fetcher.run())
                group.create_task(exchange.run())
                await self._warm(group)

    async def ensure(self, digest: str, *, needed: bool) -> None:
        """Return when an artifact lies complete in the library; see `Fetcher.ensure`."""
        await self._is_up.wait()
        assert self._fetcher is not None
        await self._fetcher.ensure(digest, needed=needed)

    def desire(self, bases: Collection[str]) -> None:
        """Take over the bases of the desired replicas: they are fetched, whoever answers."""
        self._bases = frozenset(bases)

    def why_waiting(self, base_digest: str) -> str:
        """Return what a replica of a base waits for; empty when it may start.

        It may also start if nobody knows the base: then its start says so.
        """
        if self._library.has(base_digest) or base_digest in self._unknown:
            return ""
        progress = self._fetcher.progress(base_digest) if self._fetcher else "not begun"
        return f"fetching base: {progress}"

    @property
    def downloaded_bytes(self) -> dict[str, int]:
        """Bytes of chunks that came, by what they came from: peer or store."""
        return dict(self._sources.bytes_from) if self._sources else {"peer": 0, "store": 0}

    def _count_upload(self, size_bytes: int) -> None:
        self.uploaded_bytes += size_bytes

    async def _warm(self, group: asyncio.TaskGroup) -> None:
        """Wait for each base that is not here, so that it is fetched if need be from the store."""

        async def look() -> None:
            now_s = time.monotonic()
            self._unknown = {d: until for d, until in self._unknown.items() if until > now_s}
            for digest in self._bases - self._warming - self._unknown.keys():
                if not self._library.has(digest):
                    self._warming.add(digest)
                    group.create_task(self._wait_for(digest))

        await run_every(_LOOK_S, look, name="warm-bases", expected=(), step_timeout_s=5.0)

    async def _wait_for(self, digest: str) -> None:
        try:
            await self.ensure(digest, needed=False)
        except PlatformError as error:
            if error.code is not ErrorCode.ADAPTER_NOT_FOUND:
                raise
            self._unknown[digest] = time.monotonic() + _ASK_AGAIN_S
        finally:
            self._warming.discard(digest)
