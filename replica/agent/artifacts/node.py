"""Connects a node's parts for artifacts: exchange with the control plane, fetch, and service."""

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import structlog

from replica.agent.artifacts.exchange import (
    ArtifactExchange,
    ArtifactNews,
    NodeIdentity,
    fetch_manifest,
)
from replica.agent.artifacts.fetcher import Fetcher
from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.peer_keys import PeerKeys
from replica.agent.artifacts.peers import serve_peers
from replica.agent.artifacts.sources import Sources
from sluice.addresses import host_and_port
from sluice.errors import ErrorCode, PlatformError
from sluice.lifecycle import run_every

log = structlog.get_logger(__name__)

_LOOK_S = 0.5
_STARTING_LOOK_S = 0.05
_RESTART_PAUSE_S = 5.0
_LOOKUP_PAUSE_S = 5.0  # seconds between two requests to the control plane for an unknown base


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a node for fetching and serving artifacts.

    Attributes:
        node_id: Id of the node.
        region: Region of the node.
        rack: Rack of the node, unique within its region.
        control_address: host:port of the control plane's gRPC.
        directory: Directory of artifacts.
        store_url: URL of the chunk store.
        keys_file: File of the keys that verify other nodes' tickets.
        peer_address: host:port on which other nodes are served, where port 0 selects a free port.
        peer_advertised: host:port at which other nodes reach this node, where port 0 means the
            bound port. Empty means the bound address, if other machines can reach it.
        downloads_max: Largest number of concurrent downloads.
        uploads_max: Largest number of concurrent uploads.
        download_bytes_per_s: Largest rate of all downloads together, or 0 for no limit.
        upload_bytes_per_s: Largest rate of all uploads together, or 0 for no limit.
    """

    node_id: str
    region: str
    rack: str
    control_address: str
    directory: Path
    store_url: str
    keys_file: Path
    peer_address: str = "127.0.0.1:0"
    peer_advertised: str = ""
    downloads_max: int = 8
    uploads_max: int = 8
    download_bytes_per_s: float = 0.0
    upload_bytes_per_s: float = 0.0


def advertised(bound: str, told: str, control_address: str) -> str:
    """Return the address that other nodes should use, or empty if they cannot reach this node.

    Args:
        bound: host:port of the listener.
        told: host:port that the operator configured, or empty. Port 0 stands for the bound port.
        control_address: Address of the control plane. If it is on this machine, all nodes are on
            this machine.
    """
    port = bound.rpartition(":")[2]
    if told:
        host, _, told_port = told.rpartition(":")
        return f"{host}:{port}" if int(told_port) == 0 else told
    is_local = _is_local(bound) or _is_any(bound)
    return "" if is_local and not _is_local(control_address) else bound


def _ip_of(address: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host_and_port(address)[0])
    except ValueError:
        return None  # the address is a host name


def _is_local(address: str) -> bool:
    ip = _ip_of(address)
    return ip.is_loopback if ip else address.rpartition(":")[0] == "localhost"


def _is_any(address: str) -> bool:
    ip = _ip_of(address)
    return ip is not None and ip.is_unspecified


class ArtifactCache:
    """Fetches the wanted artifacts, and serves the present artifacts to other nodes."""

    def __init__(self, options: NodeOptions, library: Library) -> None:
        """Store the options. Only `run` starts to fetch and to serve."""
        self._options = options
        self._library = library
        self._fetcher: Fetcher | None = None
        self._sources: Sources | None = None
        # bytes received by sources that were closed since the agent's start, by kind of source
        self._before: Mapping[str, int] = {}
        self._is_up = asyncio.Event()
        self._trouble = ""  # reason why no artifact can be fetched now, or empty
        self._bases: frozenset[str] = frozenset()
        self._warming: set[str] = set()
        # digest of an unknown base -> time of the next request to the control plane for this base
        self._unknown: dict[str, float] = {}
        self.uploaded_bytes = 0

    async def run(self) -> None:
        """Fetch and serve until cancelled.

        While the folder is unusable, engines run without new artifacts, and this method retries.
        Without an address for other nodes, the node fetches artifacts but serves none.
        """
        while True:
            try:
                await self._run()
            except* OSError as errors:
                self._trouble = "; ".join(str(error) for error in errors.exceptions)
                log.warning("artifacts_not_fetched", error=self._trouble)
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _run(self) -> None:
        options, news = self._options, ArtifactNews()
        async with AsyncExitStack() as stack:
            holdings = Holdings(options.directory, self._library)
            stack.callback(holdings.close)
            await holdings.start()
            sources = await stack.enter_async_context(
                Sources.open(options.store_url, options.download_bytes_per_s)
            )
            fetcher = Fetcher(
                holdings,
                sources,
                partial(fetch_manifest, options.control_address),
                node_id=options.node_id,
                downloads_max=options.downloads_max,
                on_news=news.note,
            )
            identity = NodeIdentity(options.node_id, options.region, options.rack)
            keys = await asyncio.to_thread(PeerKeys, options.keys_file)
            exchange = ArtifactExchange(
                options.control_address, identity, fetcher, keys, news, options.directory
            )
            self._before = self.downloaded_bytes
            self._fetcher, self._sources = fetcher, sources
            stack.callback(self._is_up.clear)
            self._is_up.set()
            is_serving_tried = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(fetcher.run())
                group.create_task(self._serve(holdings, keys, exchange, is_serving_tried))
                await is_serving_tried.wait()  # the first report must contain this node's address
                group.create_task(exchange.run())
                await self._warm(group)

    async def _serve(
        self,
        holdings: Holdings,
        keys: PeerKeys,
        exchange: ArtifactExchange,
        is_tried: asyncio.Event,
    ) -> None:
        """Serve other nodes, and retry while the address is in use."""
        options = self._options
        while True:
            try:
                async with serve_peers(
                    options.peer_address,
                    holdings,
                    keys,
                    uploads_max=options.uploads_max,
                    bytes_per_s=options.upload_bytes_per_s,
                    count=self._count_upload,
                ) as bound:
                    told = advertised(bound, options.peer_advertised, options.control_address)
                    exchange.serve_at(told)
                    log.info("artifacts_served", address=bound, advertised=told or "to nobody")
                    is_tried.set()
                    await asyncio.Event().wait()  # until cancelled
            except OSError as error:
                log.warning("artifacts_not_served", address=options.peer_address, error=str(error))
            is_tried.set()
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def ensure(self, digest: str, *, needed: bool) -> None:
        """Wait until an artifact is complete in the library, or raise as `Fetcher.ensure` does."""
        while not self._is_up.is_set():
            if needed and self._trouble:
                text = f"the node cannot fetch artifacts: {self._trouble}"
                raise PlatformError(ErrorCode.UNAVAILABLE, text, retry_after_s=_RESTART_PAUSE_S)
            await asyncio.sleep(_STARTING_LOOK_S)
        assert self._fetcher is not None
        await self._fetcher.ensure(digest, needed=needed)

    def desire(self, bases: Collection[str]) -> None:
        """Set the bases of desired replicas. They are fetched even without a control plane."""
        self._bases = frozenset(bases)

    def why_waiting(self, base_digest: str) -> str:
        """Return why a replica of a base has to wait, or empty if it may start.

        A replica of an unknown base may also start. Its failure then reports the unknown base.
        """
        if self._library.has(base_digest) or base_digest in self._unknown:
            return ""
        progress = self._fetcher.progress(base_digest) if self._fetcher else "not begun"
        return f"fetching base: {progress}"

    @property
    def downloaded_bytes(self) -> dict[str, int]:
        """Number of received bytes of chunks, by source (peer or store)."""
        come = self._sources.bytes_from if self._sources else {"peer": 0, "store": 0}
        return {name: count + self._before.get(name, 0) for name, count in come.items()}

    def _count_upload(self, size_bytes: int) -> None:
        self.uploaded_bytes += size_bytes

    async def _warm(self, group: asyncio.TaskGroup) -> None:
        """Wait for each missing base. A base with a wait is fetched even without an order."""

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
            self._unknown[digest] = time.monotonic() + _LOOKUP_PAUSE_S
        finally:
            self._warming.discard(digest)
