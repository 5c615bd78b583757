"""Reads the files of an import's source in pieces, from a directory, a bucket or a web server."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import aiohttp
import obstore
from obstore.exceptions import BaseError

from control_plane.artifacts import adapter_check, adapter_config, base_check
from control_plane.artifacts.model import Kind
from control_plane.artifacts.sources import ImportSource
from sluice.addresses import is_public
from sluice.base_files import TEXT_FILES
from sluice.checked_addresses import CheckedResolver, Refuse, check_literal
from sluice.chunk_store import Backend, open_bucket
from sluice.manifests import CHUNK_BYTES, FILES_MAX

_CONNECT_S, _READ_S = 10.0, 30.0
_INDEX_BYTES_MAX = 16 << 20
_WEIGHTS_SUFFIX = ".safetensors"
# Required files of each kind of artifact. A web server cannot list a directory, so these names are
# probed.
_NEEDED = {
    Kind.ADAPTER: (adapter_config.CONFIG_FILE, adapter_check.TENSOR_FILE),
    Kind.BASE: (base_check.CONFIG_FILE, base_check.TOKENIZER_FILE),
}
_OPTIONAL = tuple(name for name in TEXT_FILES if name not in _NEEDED[Kind.BASE])


class FetchError(Exception):
    """A source cannot be read. The message has the reason and the fix."""


class Files(Protocol):
    """The files of an import's source."""

    async def names(self) -> list[str]:
        """Return the names of all files, relative to the source."""
        ...

    async def missing(self, names: Collection[str]) -> list[str]:
        """Return the names that the source lacks. The files with the other names can be read."""
        ...

    def read(self, name: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes in pieces of `CHUNK_BYTES`. Only the last piece may be shorter."""
        ...


@asynccontextmanager
async def open_source(source: ImportSource, kind: Kind) -> AsyncGenerator[Files]:
    """Open an allowed source. All its errors are raised as FetchError.

    If the source of an adapter ends in `.safetensors`, it names the file of weights.
    """
    directory, _, name = source.path.rpartition("/")
    if kind is Kind.ADAPTER and name.endswith(_WEIGHTS_SUFFIX):
        async with _open_directory(replace(source, path=directory), kind) as files:
            yield AdapterWeights(files, name)
    else:
        async with _open_directory(source, kind) as files:
            yield files


@asynccontextmanager
async def _open_directory(source: ImportSource, kind: Kind) -> AsyncGenerator[Files]:
    if source.scheme == "file":
        yield LocalFiles(Path(source.place), source.path)
    elif source.scheme == "s3":
        yield BucketFiles(open_bucket(source.place, source.path))
    else:
        connector = aiohttp.TCPConnector(resolver=CheckedResolver(refusal_of(source)))
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_S, sock_read=_READ_S, connect=_CONNECT_S
        )
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, trust_env=False
        ) as session:
            yield WebFiles(session, source, kind)


class AdapterWeights:
    """A file of weights with any name, and the adapter's configuration in the same directory.

    The configuration is required, because the weights alone have no scale (`lora_alpha`).
    """

    def __init__(self, files: Files, name: str) -> None:
        """Create the view. `files` is a directory that may contain other files as well."""
        self._files = files
        self._name = name

    async def names(self) -> list[str]:
        """Return the two file names of the artifact. Raises FetchError if a file is missing."""
        if missing := await self._files.missing((adapter_config.CONFIG_FILE, self._name)):
            raise FetchError(
                f"{' and '.join(missing)} not found: keep {adapter_config.CONFIG_FILE} beside"
                f" {self._name}, or give the adapter's directory"
            )
        return [adapter_config.CONFIG_FILE, adapter_check.TENSOR_FILE]

    async def missing(self, names: Collection[str]) -> list[str]:
        """Return the given names that do not belong to the artifact."""
        return sorted(set(names) - set(await self.names()))

    def read(self, name: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes."""
        return self._files.read(self._name if name == adapter_check.TENSOR_FILE else name)


class LocalFiles:
    """A directory below an allowed directory. Symbolic links are not followed."""

    def __init__(self, root: Path, path: str) -> None:
        self._root = root
        self._directory = root / path

    async def names(self) -> list[str]:
        """Return the names of all files."""
        return await asyncio.to_thread(self._names)

    async def missing(self, names: Collection[str]) -> list[str]:
        """Return the given names that are missing."""
        await asyncio.to_thread(self._check)
        is_there = await asyncio.to_thread(
            lambda: {name: (self._directory / name).is_file() for name in names}
        )
        return [name for name in names if not is_there[name]]

    def _check(self) -> None:
        if not self._directory.resolve().is_relative_to(self._root.resolve()):
            raise FetchError(
                f"{self._directory} leads out of {self._root}: name the real directory"
            )
        if not self._directory.is_dir():
            raise FetchError(f"{self._directory} is no directory of the control plane's machine")

    def _names(self) -> list[str]:
        self._check()
        found: list[str] = []
        for path in self._directory.rglob("*"):
            name = path.relative_to(self._directory).as_posix()
            if path.is_symlink():
                raise FetchError(f"{name} is a symbolic link: copy its target in its place")
            if path.is_file():
                found.append(name)
        return found

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW
            descriptor = await asyncio.to_thread(os.open, self._directory / name, flags)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield piece
        except OSError as error:
            raise FetchError(f"{name} cannot be read: {error.strerror}") from None


class BucketFiles:
    """A prefix in an S3 bucket."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sizes: dict[str, int] = {}

    async def names(self) -> list[str]:
        """Return the names of all objects."""
        try:
            self._sizes = await asyncio.to_thread(self._list)
        except (BaseError, OSError) as error:
            raise _unreadable("the bucket", error) from None
        return list(self._sizes)

    def _list(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for batch in obstore.list(self._backend, chunk_size=1000):
            found |= {str(item["path"]): int(item["size"]) for item in batch}
            if len(found) > FILES_MAX:
                raise FetchError(f"there are more than {FILES_MAX} objects: name a longer prefix")
        return found

    async def missing(self, names: Collection[str]) -> list[str]:
        """Return the given names that are missing in the bucket."""
        found: list[str] = []
        for name in names:
            try:
                meta = await asyncio.to_thread(obstore.head, self._backend, name)
            except FileNotFoundError:
                found.append(name)
            except (BaseError, OSError) as error:
                raise _unreadable(name, error) from None
            else:
                self._sizes[name] = int(meta["size"])
        return found

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Yield an object's bytes."""
        for start in range(0, self._sizes[name], CHUNK_BYTES):
            length = min(CHUNK_BYTES, self._sizes[name] - start)
            try:
                piece = await asyncio.to_thread(
                    obstore.get_range, self._backend, name, start=start, length=length
                )
            except (BaseError, OSError) as error:
                raise _unreadable(name, error) from None
            if len(piece) != length:
                raise FetchError(f"{name} has changed while it was read: import it again")
            yield bytes(piece)


def refusal_of(source: ImportSource) -> Refuse:
    """Return the check of a source's addresses, which private addresses pass only if permitted."""

    def refuse(_host: str, _port: int, address: str) -> str:
        if source.is_private or is_public(address):
            return ""
        return f"{address} is not a public address: allow the host with its port if it is meant"

    return refuse


class WebFiles:
    """A directory on a web server, which is probed for the usual file names."""

    def __init__(self, session: aiohttp.ClientSession, source: ImportSource, kind: Kind) -> None:
        host = f"[{source.place}]" if ":" in source.place else source.place
        self._session = session
        self._url = f"{source.scheme}://{host}:{source.port}{source.path}"
        self._source = source
        self._kind = kind

    async def names(self) -> list[str]:
        """Return the names that exist. Raises FetchError if a required file is missing."""
        names = list(_NEEDED[self._kind])
        if self._kind is Kind.BASE:
            names += [name for name in _OPTIONAL if await self._is_there(name, is_optional=True)]
            names += await self._weights()
        for name in names:
            if not await self._is_there(name):
                raise FetchError(f"{name} is not there (404): is it the right directory?")
        return names

    async def missing(self, names: Collection[str]) -> list[str]:
        """Return the given names that are missing on the server."""
        return [name for name in names if not await self._is_there(name)]

    async def _weights(self) -> list[str]:
        if await self._is_there(base_check.SINGLE_FILE):
            return [base_check.SINGLE_FILE]
        if not await self._is_there(base_check.INDEX_FILE):
            message = f"neither {base_check.SINGLE_FILE} nor {base_check.INDEX_FILE} is there"
            raise FetchError(f"{message}: is it the right directory?")
        text = b""
        async for piece in self.read(base_check.INDEX_FILE):
            text += piece
            if len(text) > _INDEX_BYTES_MAX:
                raise FetchError(f"{base_check.INDEX_FILE} is too large: is it the right file?")
        try:
            shards = set(cast("dict[str, Any]", json.loads(text)["weight_map"]).values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FetchError(f"{base_check.INDEX_FILE} has no weight_map: save anew") from None
        if not all(isinstance(name, str) and base_check.is_shard(name) for name in shards):
            raise FetchError(f"{base_check.INDEX_FILE} names a file without weights: save it anew")
        return [base_check.INDEX_FILE, *sorted(shards)]

    async def _is_there(self, name: str, *, is_optional: bool = False) -> bool:
        # Buckets without permission to list objects answer 403 for missing objects.
        absent = {404, 403} if is_optional else {404}
        async with self._answer(name, "HEAD", absent) as answer:
            return answer.status == 200

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes."""
        held = bytearray()
        async with self._answer(name, "GET") as answer:
            if answer.status != 200:
                raise FetchError(f"{name} is not there (404): is it the right directory?")
            try:
                async for piece in answer.content.iter_any():
                    held += piece
                    while len(held) >= CHUNK_BYTES:
                        yield bytes(held[:CHUNK_BYTES])
                        del held[:CHUNK_BYTES]
            except (aiohttp.ClientError, OSError) as error:
                raise _unreadable(name, error) from None
        if held:
            yield bytes(held)

    @asynccontextmanager
    async def _answer(
        self, name: str, method: str, absent: Collection[int] = (404,)
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Yield an answer with status 200 or in `absent`.

        Raises FetchError for any other status.
        """
        try:
            check_literal(self._source.place, self._source.port, refusal_of(self._source))
            answer = await self._session.request(
                method, f"{self._url}/{name}", allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise _unreadable(name, error) from None
        async with answer:
            if 300 <= answer.status < 400:
                raise FetchError(f"{name} is elsewhere ({answer.status}): give its final address")
            if answer.status != 200 and answer.status not in absent:
                raise FetchError(f"{name} was answered with {answer.status}: is it public?")
            yield answer


def _unreadable(what: str, error: Exception) -> FetchError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return FetchError(f"{what} cannot be read ({reason:.200}): is the address right?")
