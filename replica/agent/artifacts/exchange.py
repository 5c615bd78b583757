"""Runs the agent's stream about artifacts, which reports chunks and receives orders to fetch."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import structlog

from replica.agent.artifacts.fetcher import Fetcher, UnknownArtifactError
from replica.agent.artifacts.peer_keys import PeerKeys
from replica.agent.link import OPTIONS, Link
from sluice.channels import channel_to
from sluice.identity import CertificateRole
from sluice.ids import new_id
from sluice.manifests import MANIFEST_BYTES_MAX, Manifest, parse_manifest
from sluice.wire.distribution.v1 import distribution_pb2 as wire
from sluice.wire.distribution.v1 import distribution_pb2_grpc

log = structlog.get_logger(__name__)

_MANIFEST_S = 20.0
_FETCHING_S = 0.5
_IDLE_S = 2.0
# seconds to wait after a change, so that simultaneous changes are sent as one message
_SETTLE_S = 0.05
_BACKOFF_MAX_S = 3.0

_Call = grpc.aio.StreamStreamCall[wire.DistributionReport, wire.DistributionAnswer]


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The id and location of a node, sent in each report."""

    node_id: str
    region: str
    rack: str


class ArtifactNews:
    """A signal that a report should be sent to the control plane without delay."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def note(self) -> None:
        """Request a report without delay."""
        self._event.set()

    async def wait(self, at_most_s: float) -> None:
        """Wait until `note` requests a report, for at most `at_most_s` seconds."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._event.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_SETTLE_S)
        self._event.clear()


class ArtifactExchange(Link[wire.DistributionReport, wire.DistributionAnswer]):
    """Opens the `Exchange` stream of artifacts, and reopens it until cancelled."""

    def __init__(
        self,
        address: str,
        identity: NodeIdentity,
        fetcher: Fetcher,
        keys: PeerKeys,
        news: ArtifactNews,
        directory: Path,
    ) -> None:
        """Create a stream that `run` opens.

        Args:
            address: host:port of the control plane.
            identity: Id and location of the node.
            fetcher: Fetcher that makes the reports and executes the orders.
            keys: Keys that verify the tickets of other nodes. The control plane changes them every
                hour.
            news: Signal that a report should be sent without delay.
            directory: Directory of artifacts. The free bytes of its disk are reported.
        """
        super().__init__(address, "distribution", wire.DistributionAnswer, _BACKOFF_MAX_S)
        self._identity = identity
        self._fetcher = fetcher
        self._keys = keys
        self._changes = news
        self._directory = directory
        self._boot_id = new_id("boot")
        self._is_full_due = True
        self._peer_address = ""

    def serve_at(self, peer_address: str) -> None:
        """Set the host:port at which this node serves other nodes, or empty if it serves none."""
        self._peer_address = peer_address
        self._changes.note()

    async def _end_of_session(self) -> str:
        try:
            return await super()._end_of_session()
        except Exception:  # an error in one answer must not end the agent and its engines
            log.exception("distribution_failed", address=self._address)
            return ""

    def _lost(self) -> None:
        self._fetcher.connected(is_connected=False)

    def _open(self, channel: grpc.aio.Channel) -> _Call:
        self._is_full_due = True
        return distribution_pb2_grpc.DistributionServiceStub(channel).Exchange()  # pyright: ignore[reportReturnType] - sync stub's types

    async def _speak(self, call: _Call) -> None:
        while True:
            await self._write(call, self._report())
            await self._changes.wait(_FETCHING_S if self._fetcher.is_fetching else _IDLE_S)

    def _report(self) -> wire.DistributionReport:
        report = self._fetcher.report(is_full=self._is_full_due)
        self._is_full_due = False
        identity = self._identity
        report.node_id, report.boot_id = identity.node_id, self._boot_id
        report.region, report.rack = identity.region, identity.rack
        report.peer_address = self._peer_address
        report.knows_unchanged = True
        report.free_bytes = free_bytes(self._directory)
        return report

    async def _take(self, received: wire.DistributionAnswer) -> None:
        keys = {peer_key.id: peer_key.key for peer_key in received.peer_keys}
        if keys and keys != self._keys.known:
            await asyncio.to_thread(self._keys.take, keys)
        self._fetcher.connected(is_connected=True)
        self._fetcher.take(received)
        if received.wants_full:
            self._is_full_due = True
            self._changes.note()


def free_bytes(directory: Path) -> int:
    """Return the free bytes on the disk of a folder, or 0 if they are unknown."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


async def fetch_manifest(address: str, digest: str) -> Manifest:
    """Return a manifest from the control plane.

    Raises:
        UnknownArtifactError: The control plane does not have the artifact.
        ConnectionError: The control plane does not answer, or its answer is not this manifest.
    """
    content = bytearray()
    try:
        async with (
            asyncio.timeout(_MANIFEST_S),
            channel_to(address, CertificateRole.CONTROL_PLANE, options=OPTIONS) as channel,
        ):
            stub = distribution_pb2_grpc.DistributionServiceStub(channel)
            call = stub.Manifest(wire.ManifestRequest(digest=digest))
            async for piece in call:  # pyright: ignore[reportGeneralTypeIssues] - sync stub's types
                content += piece.json
                if len(content) > MANIFEST_BYTES_MAX:
                    raise ConnectionError("the control plane sends more than a manifest")
        manifest = await asyncio.to_thread(_parse, bytes(content))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise UnknownArtifactError(
                f"the control plane does not know artifact {digest}"
            ) from None
        raise ConnectionError(f"the control plane cannot be asked: {error.details()}") from None
    except (TimeoutError, ValueError) as error:
        raise ConnectionError(f"the control plane sent no manifest: {error!r}") from None
    if manifest.digest != digest:
        raise ConnectionError("the control plane sent another manifest")
    return manifest


def _parse(content: bytes) -> Manifest:
    return parse_manifest(json.loads(content))
