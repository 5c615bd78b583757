"""Uploads directories to the control plane, chunk by chunk."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from cli.api import ApiClient, ApiError, Json
from sluice.manifests import CHUNK_BYTES, Manifest

_ENDED = ("ready", "refused", "cancelled")
_POLL_S = 0.5
_TRIES_MAX = 30


def _no_progress(_sent_bytes: int, _all_bytes: int) -> None:
    """Do nothing. This is the default of `upload` for callers that show no progress."""


async def upload(
    api: ApiClient,
    directory: Path,
    manifest: Manifest,
    body: Json,
    *,
    jobs: int = 4,
    on_sent: Callable[[int, int], None] = _no_progress,
) -> Json:
    """Upload the missing chunks of a directory, so that an interrupted upload can continue.

    Args:
        api: Client of the control plane.
        directory: Directory whose files are sent.
        manifest: Manifest of the directory.
        body: Body of the first request, with kind, base, tenant, signatures and manifest.
        jobs: Number of chunks that are sent concurrently.
        on_sent: Function of the sent bytes and of all bytes, called after each chunk.

    Returns:
        The accepted upload.

    Raises:
        ApiError: The upload was refused, with the reasons, or the control plane is unreachable.
    """
    found = await api.call("POST", "/v1/artifacts/uploads", body)
    path = f"/v1/artifacts/uploads/{found['id']}"
    waiting = [(chunk["sha256"], chunk["size_bytes"]) for chunk in found["missing"]]
    places, all_bytes, sent_bytes = _places(directory, manifest), sum(s for _, s in waiting), 0

    async def work() -> None:
        nonlocal sent_bytes
        while waiting:
            sha256, size = waiting.pop()
            content = await asyncio.to_thread(_read, *places[sha256], size)
            await _put(api, f"{path}/chunks/{sha256}", content)
            sent_bytes += size
            on_sent(sent_bytes, all_bytes)

    # gather instead of a TaskGroup, which would hide the error's message in an ExceptionGroup.
    outcomes = await asyncio.gather(*(work() for _ in range(jobs)), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
    return await ended(api, await api.call("POST", f"{path}/complete"))


async def _put(api: ApiClient, path: str, content: bytes) -> None:
    """Send a chunk, and retry while the platform is busy or restarting."""
    for left in reversed(range(_TRIES_MAX)):
        try:
            await api.send_bytes(path, content)
        except ApiError as error:
            if not left or 0 < error.status < 500:
                raise
            await asyncio.sleep(1.0)
        else:
            return


def _places(directory: Path, manifest: Manifest) -> dict[str, tuple[Path, int]]:
    """Return the file of each chunk and the chunk's offset in the file."""
    return {
        chunk.sha256: (directory / file.name, index * CHUNK_BYTES)
        for file in manifest.files
        for index, chunk in enumerate(file.chunks())
    }


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


async def ended(api: ApiClient, found: Json) -> Json:
    """Wait for an upload's end, and return an accepted upload.

    Raises ApiError if the upload was refused or cancelled.
    """
    while found["state"] not in _ENDED:
        await asyncio.sleep(_POLL_S)
        found = await api.call("GET", f"/v1/artifacts/uploads/{found['id']}")
    if found["state"] == "refused":
        raise ApiError("refused: " + "\n".join(found["reasons"]), 400)
    if found["state"] == "cancelled":
        raise ApiError(f"upload {found['id']} was cancelled: push it again", 409)
    return found
