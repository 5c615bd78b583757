"""A live copy of the control plane's state, which is also stored on disk.

Gateways and routers decide from this copy alone. So they continue to serve while the control plane
is unreachable, and can start from the file on disk. Only the file's owner may read it, because the
snapshot contains key hashes and cache salts.
"""

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from sluice.channels import RenewedChannel, channel_to
from sluice.identity import CertificateRole
from sluice.ids import new_id
from sluice.lifecycle import backoff_s
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub

log = structlog.get_logger(__name__)

KINDS = (
    *("tiers", "tenants", "keys", "bases", "models", "pools", "cells", "replicas"),
    *("aliases", "releases", "splits", "budget_stops", "text_policies", "guard_sets"),
    "server_tools",
    "auto_policies",
    "warm_prompts",
    "model_pools",
    "content_keys",
)

# First word of a snapshot file. The payload's SHA-256 and the kinds of objects follow on that line.
_FORMAT = b"sluice-snapshot-1"
_KINDS = ",".join(KINDS).encode()
STEP_OBJECTS = 64  # objects processed per step of a generator, which lasts well below 1 ms
_SLICE_S = 0.002  # seconds of work on a snapshot before other tasks run
_CHUNK_OBJECTS = 2000  # objects serialized in one call, which locks the interpreter for about 1 ms
_SILENCE_S = 6.0  # seconds of silence until a stream is dead, with a heartbeat every 2 s
_LEAVE_TIMEOUT_S = 0.5
_SAVE_DELAY_S = 1.0  # seconds in which changes are collected before the file is written
_SAVE_RETRY_S = 10.0  # seconds until a failed write is retried, for example on a full disk
_TOUCH_S = 30.0  # seconds between updates of the file's modification time without changes
_LEFTOVER_S = 60.0  # age in seconds at which a staging file must belong to a killed writer
_SAVE_SHARE = 20  # a write of t seconds is followed by a pause of at least this factor times t
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 512 * 1024 * 1024),  # older servers send whole snapshots
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment must not be used within the fleet
)


def key_of(kind: str, message: Message) -> str:
    """Return the key of an object, which is the digest of a base or the id of any other object."""
    return cast("str", getattr(message, "digest" if kind == "bases" else "id"))


class ControlState:
    """All objects of the control plane by id. A change replaces an object, never its fields."""

    def __init__(self) -> None:
        self.version = 0
        # Number of possible changes by kind of object. A reader of a few kinds compares their
        # numbers, and so ignores versions that changed other kinds.
        self.revisions = dict.fromkeys(KINDS, 0)
        self.tiers: dict[str, wire.Tier] = {}
        self.tenants: dict[str, wire.Tenant] = {}
        self.keys: dict[str, wire.ApiKey] = {}
        self.bases: dict[str, wire.Base] = {}
        self.models: dict[str, wire.Model] = {}
        self.pools: dict[str, wire.Pool] = {}
        self.cells: dict[str, wire.Cell] = {}
        self.replicas: dict[str, wire.Replica] = {}
        self.aliases: dict[str, wire.Alias] = {}
        self.releases: dict[str, wire.Release] = {}
        self.splits: dict[str, wire.Split] = {}
        self.budget_stops: dict[str, wire.BudgetStops] = {}
        self.text_policies: dict[str, wire.TextPolicy] = {}
        self.guard_sets: dict[str, wire.GuardSet] = {}
        self.server_tools: dict[str, wire.ServerTool] = {}
        self.auto_policies: dict[str, wire.AutoPolicy] = {}
        self.warm_prompts: dict[str, wire.WarmPrompts] = {}
        self.model_pools: dict[str, wire.ModelPools] = {}
        self.content_keys: dict[str, wire.ContentKeys] = {}

    def of_kind(self, kind: str) -> dict[str, Message]:
        """Return the objects of one of `KINDS`."""
        return cast("dict[str, Message]", getattr(self, kind))

    def apply(self, response: wire.WatchResponse) -> bool:
        """Apply a snapshot or a newer delta, and return whether the response was applied.

        A snapshot is always applied, even with a lower version, because it may be from another
        control plane or from a restored database.
        """
        if response.is_heartbeat:
            return False
        if response.is_snapshot:
            coming = ControlState()
            for _ in coming.fill(response):
                pass
            self.become(coming)
            return True
        if response.version <= self.version:
            return False
        for kind in KINDS:
            objects = self.of_kind(kind)
            for key in getattr(response.removals, kind):
                objects.pop(key, None)
            for message in getattr(response.upserts, kind):
                objects[key_of(kind, message)] = message
            if getattr(response.removals, kind) or getattr(response.upserts, kind):
                self.revisions[kind] += 1
        self.version = response.version
        return True

    def fill(self, snapshot: wire.WatchResponse) -> Iterator[None]:
        """Add the objects of a snapshot, or of a part, to this state, `STEP_OBJECTS` per step."""
        for kind in KINDS:
            objects = self.of_kind(kind)
            for number, message in enumerate(getattr(snapshot.upserts, kind)):
                objects[key_of(kind, message)] = message
                if number % STEP_OBJECTS == 0:
                    yield
        self.version = snapshot.version

    def become(self, other: "ControlState") -> None:
        """Replace all objects by those of another state, which must not be used afterwards."""
        self.version = other.version
        for kind in KINDS:
            setattr(self, kind, other.of_kind(kind))
            self.revisions[kind] += 1

    def drop(self) -> Iterator[None]:
        """Free the objects step by step, because freeing 200,000 objects at once is slow."""
        for kind in KINDS:
            objects = self.of_kind(kind)
            while objects:
                for _ in range(min(STEP_OBJECTS, len(objects))):
                    objects.popitem()
                yield

    def serialized(self) -> Iterator[bytes]:
        """Return the serialized parts of a snapshot, each of which needs about a millisecond.

        Each part is a message, and the last part has the version. Concatenated, the parts are one
        valid message. The objects are listed at the call, so later changes have no effect.
        """
        listed = {kind: tuple(self.of_kind(kind).values()) for kind in KINDS}
        return _serialize(self.version, listed)


def _serialize(version: int, listed: dict[str, tuple[Message, ...]]) -> Iterator[bytes]:
    for kind, messages in listed.items():
        for chunk in _chunks(messages, _CHUNK_OBJECTS):
            objects = wire.Objects(**cast("dict[str, Any]", {kind: chunk}))
            yield wire.WatchResponse(upserts=objects, is_part=True).SerializeToString()
    yield wire.WatchResponse(version=version, is_snapshot=True).SerializeToString()


def _chunks(items: Sequence[Message], size: int) -> Iterator[list[Message]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def write_snapshot(pieces: Iterator[bytes], file: Path, *, true_at_unix_s: float = 0.0) -> None:
    """Write a snapshot file atomically, with mode 0600. The call blocks.

    Args:
        pieces: Serialized parts of a snapshot, in order.
        file: File, whose modification time is set to `true_at_unix_s`.
        true_at_unix_s: Unix time at which the state was last current, or 0 for now.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(file)
    payload = b"".join(pieces)
    header = b" ".join((_FORMAT, hashlib.sha256(payload).hexdigest().encode(), _KINDS)) + b"\n"
    staging = file.with_name(new_id(f".{file.name}"))
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(header)
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        if true_at_unix_s:
            os.utime(staging, (true_at_unix_s, true_at_unix_s))
        staging.replace(file)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def _remove_leftovers(file: Path) -> None:
    """Remove unfinished files of killed writers, which contain secrets and occupy disk space."""
    for staging in file.parent.glob(f".{file.name}_*"):
        with suppress(FileNotFoundError):  # another process of this folder was faster
            if time.time() - staging.stat().st_mtime > _LEFTOVER_S:
                staging.unlink()


def read_snapshot(file: Path) -> wire.WatchResponse:
    """Return the snapshot in a file.

    The version is 0 if the file's writer supported other kinds of objects than this process. The
    objects in the file are then usable, but deltas would not add objects of the missing kinds.

    Raises:
        OSError: The file is missing or cannot be read.
        ValueError: The file is damaged, or has another format.
    """
    header, _, payload = file.read_bytes().partition(b"\n")
    form, digest, kinds = (*header.split(b" ", 2), b"", b"")[:3]
    if (form, digest) != (_FORMAT, hashlib.sha256(payload).hexdigest().encode()):
        raise ValueError("checksum or format does not match")
    try:
        response = wire.WatchResponse.FromString(payload)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    if not response.is_snapshot:
        raise ValueError("not a snapshot")
    if kinds != _KINDS:
        response.version = 0
    return response


class ControlWatcher:
    """Follows the control plane's stream of changes, and applies the changes to a `ControlState`.

    The service runs `run` in its TaskGroup. While `run` runs with the role ROUTER and an address,
    the control plane regards this process as a live router.
    """

    def __init__(
        self,
        address: str,
        role: wire.Role,
        instance_id: str,
        own_address: str = "",
        snapshot_file: Path | None = None,
    ) -> None:
        """Create a watcher without opening or reading anything.

        Args:
            address: `host:port` of the control plane's gRPC.
            role: Role of this process.
            instance_id: Id of this process, unique within its role.
            own_address: The `host:port` of a router, to which gateways connect.
            snapshot_file: File for the last state, or None to write no file.
        """
        self.state = ControlState()
        self._address = address
        self._role = role
        self._instance_id = instance_id
        self._own_address = own_address
        self._file = snapshot_file
        self._callbacks: list[Callable[[wire.WatchResponse], None]] = []
        self._preparations: list[Callable[[ControlState], Iterator[None]]] = []
        self._received_at: float | None = None  # time by the monotonic clock
        self._synced = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._is_connected = False
        self._coming = ControlState()  # the received parts of a snapshot

    @property
    def is_connected(self) -> bool:
        """Whether the control plane is connected now."""
        return self._is_connected

    def age_s(self) -> float:
        """Return the age of the state in seconds, or infinity before the first state."""
        return float("inf") if self._received_at is None else time.monotonic() - self._received_at

    def on_change(self, callback: Callable[[wire.WatchResponse], None]) -> None:
        """Register a callback, called after each applied change.

        A snapshot (`is_snapshot`) may have changed all objects, a delta only the objects in
        `upserts` and `removals`. Callbacks must be fast, and their errors end `run`.
        """
        self._callbacks.append(callback)

    def before_snapshot(self, prepare: Callable[[ControlState], Iterator[None]]) -> None:
        """Register a preparation, called with a received snapshot before it replaces the state.

        Preparations are for slow work on many objects, because other tasks run between their steps.
        The callbacks of `on_change` run afterwards. A snapshot from disk needs no preparation.
        """
        self._preparations.append(prepare)

    async def wait_synced(self, timeout_s: float) -> bool:
        """Wait for a state from disk or from the server, or return False after `timeout_s`.

        A state from the server is used only once the server has marked it as current. The first
        snapshot may be older than the state that other processes already have, because snapshots
        are shared between connections.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        return self._synced.is_set()

    async def leave(self) -> None:
        """Report that this router stops, so that its cells are reassigned. Errors are ignored.

        The caller must also end `run`.
        """
        request = wire.LeaveRequest(instance_id=self._instance_id)
        try:
            async with (
                asyncio.timeout(_LEAVE_TIMEOUT_S),
                channel_to(
                    self._address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
                ) as channel,
            ):
                await ControlServiceStub(channel).Leave(request)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.warning("departure_not_reported", address=self._address, error=repr(error))

    def load_from_disk(self) -> bool:
        """Load a valid stored state, if any, and return whether it was loaded. Blocks."""
        if self._file is None:
            return False
        try:
            response = read_snapshot(self._file)
            saved_at_unix_s = self._file.stat().st_mtime
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            log.warning("control_snapshot_ignored", file=str(self._file), error=str(error))
            return False
        self._received_at = time.monotonic() - max(0.0, time.time() - saved_at_unix_s)
        self.state.apply(response)
        self._publish(response)
        self._unsaved.clear()
        self._synced.set()
        log.info("control_snapshot_loaded", version=self.state.version, age_s=round(self.age_s()))
        return True

    async def run(self) -> None:
        """Follow the control plane until cancelled, and retain the last state through failures."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            if self._file is not None:
                tasks.create_task(self._save_changes(self._file))

    async def _follow(self) -> None:
        attempt = 0
        link = RenewedChannel(
            self._address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
        )
        async with aclosing(link):
            while True:
                reason = "the stream ended"
                await self._forget_parts()
                try:
                    channel = await link.current()
                    async with aclosing(self._responses(channel)) as responses:
                        async for response in responses:
                            attempt = 0
                            await self._receive(response)
                except grpc.aio.AioRpcError as error:
                    reason = error.details() or error.code().name
                except DecodeError as error:
                    reason = f"not a WatchResponse: {error}"
                except TimeoutError:
                    reason = f"silent for {_SILENCE_S:g} s"
                if self._is_connected or attempt == 0:
                    log.warning("control_plane_lost", address=self._address, reason=reason)
                self._is_connected = False
                pause_s = backoff_s(attempt, first_s=0.1, max_s=2.0)
                attempt += 1
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads

    async def _responses(self, channel: grpc.aio.Channel) -> AsyncGenerator[wire.WatchResponse]:
        """Yield the responses of one call, or raise TimeoutError if the server is silent."""
        request = wire.WatchRequest(
            role=self._role,
            instance_id=self._instance_id,
            address=self._own_address,
            known_version=self.state.version,
            takes_parts=True,
        )
        call = ControlServiceStub(channel).Watch(request)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    response = await call.read()
                if not isinstance(response, wire.WatchResponse):  # the end is grpc.aio.EOF
                    return
                yield response
        finally:
            call.cancel()

    async def _receive(self, response: wire.WatchResponse) -> None:
        if not self._is_connected:
            self._is_connected = True
            log.info("control_plane_connected", address=self._address, known=self.state.version)
        if response.version:  # version 0 is a greeting before the first snapshot, without a state
            self._received_at = time.monotonic()
            if response.is_heartbeat:
                self._synced.set()
        if response.is_snapshot:
            await self._take_snapshot(response)
        elif response.is_part:
            await _in_slices(self._coming.fill(response))
            await asyncio.sleep(0)  # the next part may have arrived already
        elif self.state.apply(response):
            self._publish(response)

    async def _take_snapshot(self, response: wire.WatchResponse) -> None:
        """Prepare a complete snapshot step by step, and replace the state in one step.

        Args:
            response: The whole snapshot, or its last part.
        """
        coming, before = self._coming, ControlState()
        await _in_slices(coming.fill(response))
        self._coming = ControlState()
        for prepare in self._preparations:
            await _in_slices(prepare(coming))
        before.become(self.state)
        self.state.become(coming)
        self._publish(response)
        await _in_slices(before.drop())

    async def _forget_parts(self) -> None:
        """Drop an incomplete snapshot."""
        partial, self._coming = self._coming, ControlState()
        await _in_slices(partial.drop())

    def _publish(self, response: wire.WatchResponse) -> None:
        self._unsaved.set()
        for callback in self._callbacks:
            callback(response)

    async def _save_changes(self, file: Path) -> None:
        pause_s = _SAVE_DELAY_S
        try:
            while True:
                try:
                    async with asyncio.timeout(_TOUCH_S):
                        await self._unsaved.wait()
                except TimeoutError:
                    self._touch(file)
                    continue
                await asyncio.sleep(pause_s)
                self._unsaved.clear()
                started_at = time.monotonic()
                pieces, at_unix_s = self.state.serialized(), self._true_at_unix_s()
                is_saved = await asyncio.to_thread(_write_or_warn, pieces, file, at_unix_s)
                pause_s = max(_SAVE_DELAY_S, _SAVE_SHARE * (time.monotonic() - started_at))
                if not is_saved:
                    self._unsaved.set()
                    pause_s = _SAVE_RETRY_S
        finally:
            if self._unsaved.is_set():
                _write_or_warn(self.state.serialized(), file, self._true_at_unix_s())

    def _true_at_unix_s(self) -> float:
        return time.time() - self.age_s() if self._received_at is not None else 0.0

    def _touch(self, file: Path) -> None:
        """Set the file's modification time to the last time at which its state was current."""
        at_unix_s = self._true_at_unix_s()
        if at_unix_s:
            with suppress(OSError):
                os.utime(file, (at_unix_s, at_unix_s))


async def _in_slices(steps: Iterator[None]) -> None:
    """Run all steps of an iterator, and run other tasks every `_SLICE_S`."""
    until_s = time.perf_counter() + _SLICE_S
    for _ in steps:
        if time.perf_counter() >= until_s:
            await asyncio.sleep(0)
            until_s = time.perf_counter() + _SLICE_S


def _write_or_warn(pieces: Iterator[bytes], file: Path, true_at_unix_s: float) -> bool:
    try:
        write_snapshot(pieces, file, true_at_unix_s=true_at_unix_s)
    except OSError as error:
        log.warning("control_snapshot_not_saved", file=str(file), error=str(error))
        return False
    return True
