"""Sending directories to the control plane, chunk by chunk."""

import asyncio
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cli.api import Api, ApiError, Json
from cli.render import console
from sluice.manifests import CHUNK_BYTES, Manifest

_ENDED = ("ready", "refused")
_POLL_S = 0.5
_TRIES_MAX = 30


async def upload(api: Api, directory: Path, manifest: Manifest, body: Json, jobs: int) -> Json:
    """Upload a directory; what is there already is not sent, and an upload that broke goes on.

    Args:
        api: Of the control plane.
        directory: Whose files are sent.
        manifest: Of the directory.
        body: What begins an upload: kind, base, tenant, signatures, manifest.
        jobs: Chunks on their way at once.

    Returns:
        The upload, accepted.

    Raises:
        ApiError: It was refused, with the reasons, or the control plane cannot be reached.
    """
    found = await api.call("POST", "/v1/artifacts/uploads", body)
    await _send(api, found, directory, manifest, jobs)
    path = f"/v1/artifacts/uploads/{found['id']}"
    return await ended(api, await api.call("POST", f"{path}/complete"))


async def _send(api: Api, upload: Json, directory: Path, manifest: Manifest, jobs: int) -> None:
    """Send what an upload lacks, some chunks at once, with a bar on a terminal's stderr."""
    places = _places(directory, manifest)
    waiting = [(chunk["sha256"], chunk["size_bytes"]) for chunk in upload["missing"]]
    columns = (TextColumn("sending"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    err = console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("", total=sum(size for _, size in waiting))

        async def work() -> None:
            while waiting:
                sha256, size = waiting.pop()
                content = await asyncio.to_thread(_read, *places[sha256], size)
                await _put(api, f"/v1/artifacts/uploads/{upload['id']}/chunks/{sha256}", content)
                progress.advance(bar, size)

        # A group would wrap the one error that people shall read.
        outcomes = await asyncio.gather(*(work() for _ in range(jobs)), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


async def _put(api: Api, path: str, content: bytes) -> None:
    """Send a chunk; while the platform is busy or restarts, again."""
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
    """Return the file and offset of each chunk."""
    return {
        chunk.sha256: (directory / file.name, index * CHUNK_BYTES)
        for file in manifest.files
        for index, chunk in enumerate(file.chunks())
    }


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


async def ended(api: Api, found: Json) -> Json:
    """Return an upload once it has ended; ApiError with the reasons if it was refused."""
    while found["state"] not in _ENDED:
        await asyncio.sleep(_POLL_S)
        found = await api.call("GET", f"/v1/artifacts/uploads/{found['id']}")
    if found["state"] == "refused":
        raise ApiError("refused: " + "\n".join(found["reasons"]), 400)
    return found
