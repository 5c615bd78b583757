"""Stores the bytes of artifacts as immutable chunks by SHA-256, on a disk or in S3.

A chunk is stored completely or not at all. A reader receives bytes with the requested hash or an
error. The manifests that refer to chunks are in PostgreSQL.

Only the blocking functions of obstore are used, in threads of this class. Its asynchronous
functions may abort the interpreter at exit while an answer is pending (obstore 0.12).
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
import structlog
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, S3Store

from sluice.errors import ErrorCode, PlatformError

if TYPE_CHECKING:
    from obstore.store import ClientConfig

log = structlog.get_logger(__name__)

Backend: TypeAlias = LocalStore | S3Store | MemoryStore
Result = TypeVar("Result")

CALL_TIMEOUT_S: Final = 20.0
_THREADS = 8  # concurrent calls, each with at most one chunk of 4 MiB in memory
_ERRORS = (BaseError, OSError)


class StoreDownError(PlatformError):
    """Raised if the store did not answer in time."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            "the store of artifacts cannot be reached; try again",
            retry_after_s=2.0,
        )
        self.reason = reason


class LostChunkError(PlatformError):
    """Raised if the store lacks a chunk, so that its artifacts must be uploaded again."""

    def __init__(self, sha256: str, problem: str) -> None:
        message = f"chunk {sha256} {problem}: upload the artifacts that have it again"
        super().__init__(ErrorCode.UNAVAILABLE, message)


def open_backend(url: str) -> Backend:
    """Return the store at a URL.

    Args:
        url: `file:///directory`, which is created if necessary, or `s3://bucket/prefix`, with the
            usual AWS_* variables of the environment.

    Raises:
        ValueError: The URL has no known scheme.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return LocalStore(prefix=unquote(parts.path), mkdir=True)
    if parts.scheme == "s3" and parts.netloc:
        return open_bucket(parts.netloc, parts.path.strip("/"))
    raise ValueError(f"{url!r} is no store: file:///directory or s3://bucket/prefix is expected")


def open_bucket(bucket: str, prefix: str) -> S3Store:
    """Return a bucket below a prefix, for calls that end within `CALL_TIMEOUT_S`."""
    # An http:// endpoint is permitted, because the operator has configured it explicitly. The
    # option replaces AWS_ALLOW_HTTP.
    is_plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: ClientConfig = {
        "allow_http": is_plain,
        "timeout": f"{CALL_TIMEOUT_S / 2:g}s",
        "connect_timeout": "3s",
    }
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options=options,
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=CALL_TIMEOUT_S / 2)},
    )


def awake_s() -> float:
    """Return seconds since the machine started, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def chunk_path(sha256: str) -> str:
    """Return the path of a chunk, in nested directories so that each directory stays small."""
    return f"chunks/{sha256[:2]}/{sha256[2:4]}/{sha256}"


class ChunkStore:
    """A store of chunks by SHA-256, which several control planes may use concurrently."""

    def __init__(self, backend: Backend) -> None:
        """Create a store on top of `backend`."""
        self._backend = backend
        self._threads = ThreadPoolExecutor(_THREADS, "artifact-store")

    def close(self) -> None:
        """End the threads after their current calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def put(self, sha256: str, content: bytes) -> None:
        """Store a chunk, unless it exists.

        Args:
            sha256: Hash of the content, computed by the caller.
            content: Bytes of the chunk.

        Raises:
            StoreDownError: It is unknown whether the chunk is stored, so the caller must repeat the
                call.
        """
        path = chunk_path(sha256)

        def work() -> None:
            modes: tuple[Literal["create", "overwrite"], ...] = ("create", "overwrite")
            for mode in modes:
                try:
                    obstore.put(self._backend, path, content, mode=mode, use_multipart=False)
                except AlreadyExistsError:
                    # After a power failure, the file on disk may be incomplete.
                    if obstore.head(self._backend, path)["size"] != len(content):
                        continue
                return

        await self._call(work)

    async def get(self, sha256: str) -> bytes:
        """Return a chunk.

        Raises:
            LostChunkError: The chunk is missing, or its bytes have changed.
            StoreDownError: The store does not answer.
        """

        def work() -> bytes | None:
            try:
                return bytes(obstore.get(self._backend, chunk_path(sha256)).bytes())
            except FileNotFoundError:
                return None

        content = await self._call(work)
        if content is None:
            raise LostChunkError(sha256, "is not in the store")
        if hashlib.sha256(content).hexdigest() != sha256:
            raise LostChunkError(sha256, "has been changed in the store")
        return content

    async def delete(self, sha256: str, *, before_s: float) -> None:
        """Delete a chunk, if it exists.

        Args:
            sha256: Hash of the chunk.
            before_s: Time by `awake_s` after which the deletion is skipped. Otherwise a process
                that was suspended could delete a chunk that has been stored again since.

        Raises:
            StoreDownError: The store does not answer, so it is unknown whether the chunk is
                deleted.
        """

        def work() -> None:
            if awake_s() >= before_s:
                raise TimeoutError("it is too late to delete it")
            try:
                obstore.delete(self._backend, chunk_path(sha256))
            except FileNotFoundError:
                return

        await self._call(work)

    async def _call(self, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await loop.run_in_executor(self._threads, work)
        except _ERRORS as error:
            reason = str(error).partition("\n")[0] or f"no answer in {CALL_TIMEOUT_S:g} s"
            log.warning("store_call_failed", error=reason)
            raise StoreDownError(reason) from None
