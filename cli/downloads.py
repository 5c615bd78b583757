"""Downloads artifacts from the control plane into a directory, verifying each chunk."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from cli.api import ApiClient, ApiError
from sluice.manifests import CHUNK_BYTES, Manifest, ManifestError, parse_manifest

_TRIES_MAX = 30
_PAUSE_S = 1.0

Place = tuple[Path, int]  # a file, and an offset in it in bytes
OnDone = Callable[[int, int], None]


class Pull:
    """A download of one artifact into a directory beside the target.

    The complete directory is renamed to the target, so the target is never incomplete. After an
    interruption the same call verifies the present chunks and fetches only the missing ones.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Prepare a download without writing anything.

        Args:
            directory: Target, which must be missing or empty.
            manifest: Manifest of the artifact.

        Raises:
            ApiError: The target cannot be replaced by another directory.
        """
        self.directory = _replaceable(directory)
        self.part = self.directory.with_name(f"{self.directory.name}.{manifest.digest[:12]}.part")
        self._manifest = manifest
        self._all_bytes = manifest.size_bytes
        self._done_bytes = 0

    async def run(self, api: ApiClient, *, jobs: int, on_done: OnDone) -> None:
        """Download the artifact, then rename the directory to the target.

        Args:
            api: Client of the control plane.
            jobs: Largest number of concurrent chunks.
            on_done: Function of the present bytes and of all bytes, called after each chunk.

        Raises:
            ApiError: The control plane cannot be reached, or its bytes differ from the manifest.
            OSError: The disk is full, or access is denied.
        """
        waiting = await asyncio.to_thread(self._prepare)
        missing = sum(len(places) * size for _, size, places in waiting)
        self._done_bytes = self._all_bytes - missing
        on_done(self._done_bytes, self._all_bytes)
        free = shutil.disk_usage(self.part).free
        if missing > free:
            raise ApiError(f"{missing} bytes are missing, and {self.part} has room for {free}")

        async def work() -> None:
            while waiting:
                sha256, size, places = waiting.pop()
                try:
                    content = await _fetch(api, sha256, size)
                    await asyncio.to_thread(_write, places, content)
                except (ApiError, OSError):
                    waiting.clear()  # the other workers finish the chunks that they have begun
                    raise
                self._done_bytes += size * len(places)
                on_done(self._done_bytes, self._all_bytes)

        # gather instead of a TaskGroup, which would hide the error's message in an ExceptionGroup.
        outcomes = await asyncio.gather(*(work() for _ in range(jobs)), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        self.part.replace(self.directory)

    def _prepare(self) -> list[tuple[str, int, list[Place]]]:
        """Create all files with their final sizes. Returns missing chunks with sizes and places."""
        self.part.mkdir(parents=True, exist_ok=True)
        lacking: dict[str, tuple[int, list[Place]]] = {}
        for entry in self._manifest.files:
            path = self.part / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            with path.open("ab") as file:
                file.truncate(entry.size_bytes)
            for index, chunk in enumerate(entry.chunks()):
                place = (path, index * CHUNK_BYTES)
                if is_new or not _holds(place, chunk.sha256, chunk.size_bytes):
                    lacking.setdefault(chunk.sha256, (chunk.size_bytes, []))[1].append(place)
        waiting = [(sha256, size, places) for sha256, (size, places) in lacking.items()]
        return waiting[::-1]  # workers pop from the end


def _replaceable(directory: Path) -> Path:
    try:
        found = directory.resolve()
    except RuntimeError:  # Python 3.11 raises this error
        raise ApiError(f"{directory} is a loop of symbolic links") from None
    # A shell in the working directory would stay in the old, empty directory.
    if found == Path.cwd():
        why = "is the working directory"
    elif found.is_mount():
        why = "is a mount point"
    else:
        return found
    raise ApiError(f"{directory} {why}, which cannot be replaced: name one inside it")


async def find_manifest(api: ApiClient, digest: str) -> Manifest:
    """Return the manifest of an artifact.

    Raises:
        ApiError: There is no manifest, or the manifest does not match the digest.
    """
    document = await api.call("GET", f"/v1/artifacts/{digest}/manifest")
    try:
        manifest = parse_manifest(document)
    except ManifestError as error:
        raise ApiError(f"the manifest of {digest} cannot be read: {error}") from None
    if manifest.digest != digest:
        raise ApiError(f"the manifest that {api.base_url} has for {digest} is of other files")
    return manifest


async def fetch_file(api: ApiClient, manifest: Manifest, name: str) -> bytes:
    """Return the content of a small file of an artifact.

    Raises ApiError if there is no such file.
    """
    entry = manifest.find(name)
    if entry is None:
        raise ApiError(f"{manifest.digest} has no {name}")
    parts = [await _fetch(api, chunk.sha256, chunk.size_bytes) for chunk in entry.chunks()]
    return b"".join(parts)


async def _fetch(api: ApiClient, sha256: str, size: int) -> bytes:
    """Return a verified chunk, and retry while the platform is busy or restarting."""
    for left in reversed(range(_TRIES_MAX)):
        try:
            content = await api.read(f"/v1/artifacts/chunks/{sha256}", {})
        except ApiError as error:
            if not left or 0 < error.status < 500:
                raise
        else:
            if len(content) == size and hashlib.sha256(content).hexdigest() == sha256:
                return content
        if left:
            await asyncio.sleep(_PAUSE_S)
    raise ApiError(
        f"chunk {sha256} arrived with other bytes {_TRIES_MAX} times: is a proxy between?"
    )


def _holds(place: Place, sha256: str, size: int) -> bool:
    path, offset = place
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.sha256(file.read(size)).hexdigest() == sha256


def _write(places: list[Place], content: bytes) -> None:
    for path, offset in places:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(content)
