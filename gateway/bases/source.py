"""Fetches tokenizer and configuration files of bases from the control plane's artifact store."""

import asyncio
import hashlib
import json

import grpc
import grpc.aio

from sluice.base_files import TEXT_FILE_BYTES_MAX, TEXT_FILES, TOKENIZER
from sluice.channels import channel_to
from sluice.identity import CertificateRole
from sluice.manifests import MANIFEST_BYTES_MAX, FileEntry, Manifest, parse_manifest
from sluice.wire.distribution.v1 import distribution_pb2 as wire
from sluice.wire.distribution.v1 import distribution_pb2_grpc

_MANIFEST_S, _FILE_S = 20.0, 60.0
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class BaseFetchError(Exception):
    """The files cannot be fetched now. The message names the reason."""


async def fetch_base(address: str, digest: str) -> dict[str, bytes]:
    """Return the small files of a base by name, verified against its digest.

    Args:
        address: The control plane's gRPC host:port.
        digest: Digest of the artifact, which covers the hash of each file.

    Raises:
        BaseFetchError: The control plane does not send the files, or they do not match the digest.
    """
    try:
        async with channel_to(address, CertificateRole.CONTROL_PLANE, options=_OPTIONS) as channel:
            stub = distribution_pb2_grpc.DistributionServiceStub(channel)
            manifest = await _manifest(stub, digest)
            entries = [entry for name in TEXT_FILES if (entry := manifest.find(name)) is not None]
            if all(entry.name != TOKENIZER for entry in entries):
                raise BaseFetchError(f"artifact {digest} has no {TOKENIZER}: it is no base")
            return {entry.name: await _file(stub, digest, entry) for entry in entries}
    except grpc.aio.AioRpcError as error:
        raise BaseFetchError(error.details() or error.code().name) from None
    except TimeoutError:
        raise BaseFetchError("the control plane does not answer") from None


async def _manifest(stub: distribution_pb2_grpc.DistributionServiceStub, digest: str) -> Manifest:
    content = bytearray()
    call = stub.Manifest(wire.ManifestRequest(digest=digest))
    try:
        async with asyncio.timeout(_MANIFEST_S):
            async for piece in call:  # pyright: ignore[reportGeneralTypeIssues] - sync stub's types
                content += piece.json
                if len(content) > MANIFEST_BYTES_MAX:
                    raise BaseFetchError("the control plane sends more than a manifest")
    finally:
        call.cancel()
    try:
        manifest = await asyncio.to_thread(lambda: parse_manifest(json.loads(bytes(content))))
    except ValueError as error:
        raise BaseFetchError(f"the control plane sent no manifest: {error}") from None
    if manifest.digest != digest:
        raise BaseFetchError("the control plane sent another manifest")
    return manifest


async def _file(
    stub: distribution_pb2_grpc.DistributionServiceStub, digest: str, entry: FileEntry
) -> bytes:
    if entry.size_bytes > TEXT_FILE_BYTES_MAX:
        raise BaseFetchError(f"{entry.name} has {entry.size_bytes} bytes; that is too much")
    content = bytearray()
    call = stub.TextFile(wire.TextFileRequest(digest=digest, name=entry.name))
    try:
        async with asyncio.timeout(_FILE_S):
            async for piece in call:  # pyright: ignore[reportGeneralTypeIssues] - sync stub's types
                content += piece.content
                if len(content) > entry.size_bytes:
                    break
    finally:
        call.cancel()
    found = await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest())
    if found != entry.sha256:
        raise BaseFetchError(f"{entry.name} came with another SHA-256")
    return bytes(content)
