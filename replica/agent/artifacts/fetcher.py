"""Fetches artifacts in chunks. The control plane orders chunks, else they come from the store.

Every answer of the control plane replaces all earlier orders. Several downloads run concurrently.
Each chunk is verified before it is written. Once it is on the disk, it is recorded and served to
other nodes.
"""

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import structlog

from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.partial import CorruptChunkError, Partial, Piece, members
from replica.agent.artifacts.sources import STORE, SourceRefusedError
from sluice.errors import ErrorCode, PlatformError
from sluice.manifests import Manifest
from sluice.tickets import LIFETIME_S
from sluice.wire.distribution.v1 import distribution_pb2 as wire

log = structlog.get_logger(__name__)

# seconds for one chunk, with its wait in a peer's queue, and below the control plane's deadline
_CHUNK_S = 25.0
# Seconds after which a node fetches from the store without orders. `_AWAY_S` counts without any
# control plane so far. `_LOST_S` counts after one was lost, and is longer because another one may
# soon send orders. Its spread prevents that all nodes begin at once. `_UNORDERED_S` counts for an
# artifact without an order.
_AWAY_S = 2.0
_LOST_S = 10.0
_LOST_SPREAD_S = 5.0
_UNORDERED_S = 6.0
# seconds after which orders from peers are ignored, because tickets may expire in a peer's queue
_ORDERS_S = LIFETIME_S - 30.0
_IDLE_S = 300.0  # seconds after which a partial artifact that is no longer wanted is deleted
# seconds after a failure during which the same source is not used for the same chunk
_FAILED_S = 1.0
_DISK_PAUSE_S = 5.0
_DECLINED_S = 20.0
_LOOK_S = 1.0
_FAILURES_MAX = 1024


class UnknownArtifactError(Exception):
    """The control plane does not have the artifact."""


class ChunkSource(Protocol):
    """Fetches chunks from peers and from the store."""

    async def get(
        self, address: str, digest: str, number: int, piece: Piece, ticket: str = ""
    ) -> bytes:
        """Return the unverified bytes of a chunk. Raises SourceRefusedError or TimeoutError."""
        ...


# Returns the manifest of an artifact. Raises UnknownArtifactError if there is none, and
# ConnectionError if the control plane does not answer.
AskManifest = Callable[[str], Awaitable[Manifest]]


@dataclass(slots=True)
class _Wait:
    """The callers that wait for an artifact. `needed` is the number of those with a request."""

    since_s: float
    count: int = 0
    needed: int = 0


@dataclass(slots=True)
class _Download:
    source: str
    scope: asyncio.Timeout
    is_over: bool = False  # the chunk was received and is being written
    is_given_up: bool = False


@dataclass(slots=True)
class _State:
    """The fetcher's waits, problems and downloads, each keyed by digest."""

    waits: dict[str, _Wait] = field(default_factory=dict[str, _Wait])
    problems: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    declined: dict[str, float] = field(default_factory=dict[str, float])
    preparing: set[str] = field(default_factory=set[str])
    # digest -> time since when the partial artifact has not been wanted
    idle: dict[str, float] = field(default_factory=dict[str, float])
    running: dict[tuple[str, int], _Download] = field(
        default_factory=dict[tuple[str, int], _Download]
    )
    failed: dict[tuple[str, int, str], float] = field(
        default_factory=dict[tuple[str, int, str], float]
    )


class Fetcher:
    """Executes the control plane's orders to fetch artifacts, while `run` runs."""

    def __init__(
        self,
        holdings: Holdings,
        source: ChunkSource,
        fetch_manifest: AskManifest,
        *,
        node_id: str,
        downloads_max: int,
        on_news: Callable[[], None],
    ) -> None:
        """Create an idle fetcher.

        Args:
            holdings: The node's whole and partial artifacts.
            source: Peers and store, from which chunks are fetched.
            fetch_manifest: Fetches an artifact's manifest from the control plane.
            node_id: Id of the node, which spreads the times at which nodes fetch from the store.
            downloads_max: Largest number of concurrent downloads of chunks.
            on_news: Function that is called when a report should be sent without delay.
        """
        self._holdings = holdings
        self._library = holdings.library
        self._source = source
        self._ask_manifest = fetch_manifest
        self._downloads_max = downloads_max
        self._on_change = on_news
        self._orders: tuple[wire.Order, ...] = ()
        self._ordered_s = 0.0
        # Priority by digest in the last complete list of the control plane. `_wanted` adds those of
        # this node.
        self._shared: Mapping[str, int] = {}
        self._wanted: Mapping[str, int] = {}
        self._state = _State()
        self._failures: list[wire.Failure] = []
        self._changed = asyncio.Event()
        self._away_since_s: float | None = time.monotonic()
        self._was_connected = False
        self._spread = crc32(node_id.encode()) % 1024 / 1024

    # --- orders and reports of the control plane

    def connected(self, *, is_connected: bool) -> None:
        """Record whether the control plane answers."""
        if is_connected:
            self._away_since_s = None
            self._was_connected = True
        elif self._away_since_s is None:
            self._away_since_s = time.monotonic()

    def take(self, answer: wire.DistributionAnswer) -> None:
        """Replace all orders, and abort the downloads that are not ordered any more."""
        self._orders = tuple(answer.orders)
        self._ordered_s = time.monotonic()
        if not answer.is_wanted_unchanged:
            self._shared = {item.digest: max(0, item.priority - 1) for item in answer.wanted}
        self._wanted = _with_own(self._shared, answer.own)
        self._library.want(self._wanted)
        sources = {(order.digest, order.source_node_id) for order in self._orders}
        for (digest, _), download in self._state.running.items():
            is_ordered = download.source == STORE or (digest, download.source) in sources
            if not is_ordered and not download.is_over:
                download.is_given_up = True
                # the deadline is not ending the download right now
                if not download.scope.expired():
                    download.scope.reschedule(asyncio.get_running_loop().time())
        self._note_change()

    def report(self, *, is_full: bool) -> wire.DistributionReport:
        """Return a report without the node's identity, of all changes since the last report."""
        failures, self._failures = self._failures, []
        now_s = time.monotonic()
        state = self._state
        state.declined = {d: until_s for d, until_s in state.declined.items() if until_s > now_s}
        return wire.DistributionReport(
            held=self._holdings.held(is_full=is_full),
            is_full=is_full,
            failures=failures,
            needed=[digest for digest, wait in state.waits.items() if wait.needed],
            declined=list(state.declined),
        )

    @property
    def is_fetching(self) -> bool:
        """Whether chunks are being fetched, or are to be fetched."""
        return bool(self._state.running or self._orders or self._state.waits)

    # --- requests of this node

    async def ensure(self, digest: str, *, needed: bool) -> None:
        """Wait until the artifact is complete in the library.

        Args:
            digest: Digest of the artifact.
            needed: Whether a request waits for the artifact.

        Raises:
            PlatformError: With ADAPTER_NOT_FOUND if the artifact is unknown. If a request waits,
                also with ENGINE_BUSY for a full disk, and UNAVAILABLE if no source answers.
        """
        if self._library.has(digest):
            return
        if digest not in self._state.waits:
            # the disk may have room again, so a new wait does not inherit the last problem
            self._state.problems.pop(digest, None)
        wait = self._state.waits.setdefault(digest, _Wait(time.monotonic()))
        wait.count += 1
        wait.needed += needed
        try:
            await self._manifest(digest, is_patient=not needed)
            self._on_change()
            self._note_change()
            while not self._library.has(digest):
                if needed and (problem := self._problem(digest)):
                    raise PlatformError(ErrorCode.ENGINE_BUSY, problem, retry_after_s=2.0)
                await self._change(_LOOK_S)
        finally:
            wait.count -= 1
            wait.needed -= needed
            if not wait.count:
                del self._state.waits[digest]

    def progress(self, digest: str) -> str:
        """Return the progress of an artifact as text, or empty if the artifact is complete."""
        if self._library.has(digest):
            return ""
        have, count = self._holdings.progress(digest)
        problem = self._problem(digest)
        text = f"{have} of {count} chunks" if count else "not begun"
        return f"{text}: {problem}" if problem else text

    async def run(self) -> None:
        """Fetch artifacts until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._downloads_max):
                tasks.create_task(self._work())
            tasks.create_task(self._tidy())

    # --- the next chunk or artifact

    def _next(self) -> tuple[wire.Order, int] | None:
        """Return an order with a chunk to fetch, or with -1 to begin or complete the artifact."""
        now_s, state = time.monotonic(), self._state
        state.failed = {key: until_s for key, until_s in state.failed.items() if until_s > now_s}
        for order in self._all_orders(now_s):
            digest = order.digest
            if digest in state.preparing or self._is_held_up(digest, now_s):
                continue
            if self._library.has(digest):
                continue
            partial = self._holdings.partials.get(digest)
            if partial is None or not partial.missing:
                return order, -1
            stop = min(order.stop, len(partial.pieces))
            span = (1 << stop) - (1 << min(order.start, stop))
            for number in members(partial.missing & span):
                key = (digest, number)
                if key not in state.running and (*key, order.source_node_id) not in state.failed:
                    return order, number
        return None

    def _all_orders(self, now_s: float) -> Iterator[wire.Order]:
        """Yield the control plane's orders, and own orders for artifacts without such an order."""
        ordered = {order.digest for order in self._orders}
        away_since_s = self._away_since_s
        is_away = away_since_s is not None and now_s - away_since_s > self._patience_s
        for digest, wait in self._state.waits.items():
            is_unordered = away_since_s is None and digest not in ordered
            if is_away or (is_unordered and now_s - wait.since_s > _UNORDERED_S):
                yield wire.Order(digest=digest, stop=1 << 16)
        # After this time, tickets for peers have expired. Peers would refuse such requests, and
        # would wrongly count as faulty.
        is_stale = now_s - self._ordered_s > _ORDERS_S
        yield from (o for o in self._orders if not (is_stale and o.source_node_id))

    @property
    def _patience_s(self) -> float:
        return _LOST_S + self._spread * _LOST_SPREAD_S if self._was_connected else _AWAY_S

    def _is_held_up(self, digest: str, now_s: float) -> bool:
        until_s, _ = self._state.problems.get(digest, (0.0, ""))
        is_declined = self._state.declined.get(digest, 0.0) > now_s
        return until_s > now_s or (is_declined and digest not in self._state.waits)

    def _problem(self, digest: str) -> str:
        until_s, text = self._state.problems.get(digest, (0.0, ""))
        return text if until_s > time.monotonic() else ""

    # --- the execution of orders

    async def _work(self) -> None:
        while True:
            found = self._next()
            if found is None:
                await self._change(_LOOK_S)
            else:
                await self._do(*found)

    async def _do(self, order: wire.Order, number: int) -> None:
        """Fetch a chunk, or begin or complete an artifact. An error affects only this artifact."""
        try:
            if number < 0:
                await self._prepare(order.digest)
            else:
                await self._fetch(order, number)
        except Exception:
            log.exception("artifact_download_failed", digest=order.digest, chunk=number)
            self._hold_up(order.digest, _DISK_PAUSE_S, "the node's agent failed; see its log")
            if number >= 0:
                self._failed(order, number, wire.TROUBLE_REFUSED)

    async def _prepare(self, digest: str) -> None:
        """Begin a partial artifact, or complete it if all its chunks are on the disk."""
        self._state.preparing.add(digest)
        try:
            partial = self._holdings.partials.get(digest)
            if partial is None:
                partial = await self._begin(digest)
            if partial is not None and not partial.missing:
                await self._complete(partial)
        except (UnknownArtifactError, ConnectionError) as error:
            self._hold_up(digest, _LOOK_S, str(error))
        except OSError as error:
            self._disk_failed(digest, error)
        finally:
            self._state.preparing.discard(digest)
            self._note_change()

    async def _begin(self, digest: str) -> Partial | None:
        manifest = await self._manifest_once(digest)
        needed = digest in self._state.waits
        size_bytes = manifest.size_bytes
        has_room = await self._library.make_room(size_bytes, needed=needed, digest=digest)
        if not has_room and await self._drop_idle(0.0):
            has_room = await self._library.make_room(size_bytes, needed=needed, digest=digest)
        if not has_room:
            text = f"the node has no room for an artifact of {size_bytes} bytes"
            self._state.declined[digest] = time.monotonic() + _DECLINED_S
            self._hold_up(digest, _DISK_PAUSE_S, text)
            self._on_change()
            return None
        log.info("artifact_download_begun", digest=digest, size_bytes=size_bytes)
        try:
            return await self._holdings.begin(manifest)
        except BaseException:
            self._library.give_up(digest)
            raise

    async def _complete(self, partial: Partial) -> None:
        try:
            await self._holdings.complete(partial)
        except CorruptChunkError as error:
            log.warning("artifact_download_corrupt", digest=partial.digest, error=str(error))
            self._hold_up(partial.digest, _DISK_PAUSE_S, str(error))
            # If the artifact is still wanted, its download begins again.
            self._library.give_up(partial.digest)
        else:
            log.info("artifact_download_completed", digest=partial.digest)
        self._on_change()

    async def _drop_idle(self, after_s: float) -> bool:
        """Remove partial artifacts not wanted for `after_s`, and return whether there were any."""
        now_s, state = time.monotonic(), self._state
        asked = {order.digest for order in self._orders} | self._wanted.keys() | state.waits.keys()
        busy = {digest for digest, _ in state.running} | state.preparing
        free = self._holdings.partials.keys() - busy
        idle = {d for d in free if d not in asked or self._library.has(d)}
        state.idle = {digest: state.idle.get(digest, now_s) for digest in idle}
        leaving = [d for d, since_s in state.idle.items() if now_s - since_s >= after_s]
        # so that no worker begins these artifacts while their files are removed
        state.preparing.update(leaving)
        try:
            for digest in leaving:
                await self._holdings.drop(digest)
        finally:
            state.preparing.difference_update(leaving)
            self._note_change()
        return bool(leaving)

    async def _fetch(self, order: wire.Order, number: int) -> None:
        digest, source = order.digest, order.source_node_id
        partial = self._holdings.partials[digest]
        scope = asyncio.timeout(_CHUNK_S)
        download = self._state.running[digest, number] = _Download(source, scope)
        try:
            async with scope:
                piece, address = partial.pieces[number], order.source_address
                content = await self._source.get(address, digest, number, piece, order.ticket)
            download.is_over = True
            await asyncio.to_thread(partial.write, number, content)
        except TimeoutError:
            if not download.is_given_up:
                self._failed(order, number, wire.TROUBLE_TIMEOUT)
        except SourceRefusedError as error:
            log.info("chunk_refused", digest=digest, chunk=number, error=str(error))
            self._failed(order, number, wire.TROUBLE_REFUSED)
        except CorruptChunkError:
            log.warning("chunk_corrupt", digest=digest, chunk=number, source=source or "store")
            self._failed(order, number, wire.TROUBLE_CORRUPT)
        except OSError as error:
            self._disk_failed(digest, error)
        finally:
            del self._state.running[digest, number]
        if not partial.missing and digest not in self._state.preparing:
            if digest in self._holdings.partials:
                await self._prepare(digest)
        elif not self._state.running:
            # all ordered chunks are fetched, and the report requests the next orders
            self._on_change()

    def _failed(self, order: wire.Order, number: int, trouble: wire.Trouble) -> None:
        key = (order.digest, number, order.source_node_id)
        self._state.failed[key] = time.monotonic() + _FAILED_S
        if len(self._failures) < _FAILURES_MAX:
            self._failures.append(
                wire.Failure(
                    digest=order.digest,
                    chunk=number,
                    source_node_id=order.source_node_id,
                    trouble=trouble,
                )
            )
        self._on_change()

    def _disk_failed(self, digest: str, error: OSError) -> None:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        text = "the node's disk is full" if is_full else f"the node's disk: {error}"
        log.warning("artifact_not_written", digest=digest, error=str(error))
        self._hold_up(digest, _DISK_PAUSE_S, text)

    def _hold_up(self, digest: str, pause_s: float, text: str) -> None:
        self._state.problems[digest] = (time.monotonic() + pause_s, text)

    # --- manifests

    async def _manifest(self, digest: str, *, is_patient: bool) -> Manifest:
        while True:
            try:
                return await self._manifest_once(digest)
            except UnknownArtifactError:
                text = f"the control plane does not know artifact {digest}"
                raise PlatformError(ErrorCode.ADAPTER_NOT_FOUND, text) from None
            except (ConnectionError, OSError) as error:
                if not is_patient:
                    raise PlatformError(
                        ErrorCode.UNAVAILABLE, str(error), retry_after_s=2.0
                    ) from None
                self._hold_up(digest, _LOOK_S, str(error))
            await asyncio.sleep(_LOOK_S)

    async def _manifest_once(self, digest: str) -> Manifest:
        manifest = await self._holdings.manifest(digest)
        if manifest is None:
            manifest = await self._ask_manifest(digest)
            await self._holdings.keep(manifest)
        return manifest

    async def _tidy(self) -> None:
        """Adopt wanted artifacts that operators copied here, and delete idle partial ones."""
        while True:
            try:
                await self._drop_idle(_IDLE_S)
                await self._library.scan()
                whole = self._library.complete()
                for digest in sorted(self._wanted.keys() & whole.keys()):
                    await self._holdings.adopt(digest)
            except OSError as error:
                log.warning("artifact_folder_unreadable", error=str(error))
            await asyncio.sleep(_LOOK_S)

    # --- events for waiting tasks

    def _note_change(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def _change(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()
        except TimeoutError:
            pass


def _with_own(shared: Mapping[str, int], own: Collection[wire.Wanted]) -> Mapping[str, int]:
    """Return the priorities of all wanted artifacts, where `own` replaces those of `shared`."""
    if not own:
        return shared
    without = {item.digest for item in own}
    kept = {digest: priority for digest, priority in shared.items() if digest not in without}
    return kept | {item.digest: item.priority - 1 for item in own if item.priority}
