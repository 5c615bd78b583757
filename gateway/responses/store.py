"""The store of responses, which writes to Valkey at once and to PostgreSQL a moment later.

Once a client has been informed that its response is stored, the response is in PostgreSQL, or in
both Valkey and this process's queue. So the response survives the loss of any one of gateway,
Valkey, control plane and PostgreSQL. After the loss of one, the second copy is made again within
seconds.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from gateway.content.seals import ContentSeals
from gateway.limits.valkey import ValkeyClient
from gateway.limits.valkey_commands import ValkeyCommands, ValkeyDownError
from gateway.responses.background_log import BackgroundLog
from gateway.responses.durable import RECORD_BYTES_MAX, Durable, DurableDownError
from gateway.responses.hot_store import COMMANDS_MAX, NOTHING, Found, HotStore
from gateway.responses.turn_seals import TurnSeals
from sluice.errors import ErrorCode, PlatformError, RejectedError
from sluice.lifecycle import run_every
from sluice.response_ids import (
    belongs_to,
    created_unix_ms,
    new_response_id,
    response_of_item,
)
from sluice.shared_secret import SharedSecret
from sluice.wire.state.v1 import state_pb2 as wire

log = structlog.get_logger(__name__)

_MARKS_S, _CLAIMS_S, _STEP_S = 5.0, 1.0, 10.0
# Milliseconds after which a response whose gateway renews no claim belongs to a dead gateway.
_SILENT_MS = 5_000
_TAKEN_OVER_MAX, _READ_AT_ONCE = 64, 8
# Age until which a response may be in Valkey alone, because other gateways take over the responses
# of a dead one after `_SILENT_MS`, `_TAKEN_OVER_MAX` in each second.
_ONLY_HOT_MS = 30_000
_WITHOUT_VALKEY_S = 1.0
_SHOWN_CHARACTERS_MAX = 100


class ResponseStore:
    """The stored responses, for one worker. `run` has to run in a TaskGroup.

    Attributes:
        background: Log of background responses.
        commands: Connection to Valkey, which other parts of this worker use too.
    """

    def __init__(
        self,
        valkey_url: str,
        control_address: str,
        *,
        idle_s: float,
        secret: SharedSecret,
        seals: ContentSeals,
    ) -> None:
        """The connections are opened by `run`.

        Args:
            valkey_url: URL of Valkey, in the form of `ValkeyClient`.
            control_address: `host:port` of the control plane.
            idle_s: Seconds until an unread response expires in Valkey.
            secret: Secret that proves the owner of an id.
            seals: Encrypts stored content with keys of its tenants.
        """
        self._valkey = ValkeyClient(valkey_url, commands_max=COMMANDS_MAX)
        self.commands = ValkeyCommands(self._valkey, commands_max=COMMANDS_MAX)
        self._hot = HotStore(self.commands, idle_s=idle_s)
        self._seals = TurnSeals(seals)
        self.background = BackgroundLog(self._hot, self._seals, idle_s=idle_s)
        self._durable = Durable(control_address, self._settled)
        self._secret = secret
        self._under_way: set[str] = set()

    @property
    def can_keep(self) -> bool:
        """Whether a response that ends now can be stored."""
        return self._durable.is_up and self._durable.has_room

    @property
    def is_hot(self) -> bool:
        """Whether Valkey can be reached."""
        return self._valkey.is_connected

    @property
    def waiting(self) -> int:
        """Number of this worker's responses that are not yet in PostgreSQL."""
        return self._durable.waiting

    def new_id(self, tenant_id: str) -> str:
        """Return an id for a new response of a tenant."""
        return new_response_id(tenant_id, self._secret)

    async def keep(self, stored: wire.StoredResponse, *, is_promised: bool = False) -> bool:
        """Store a response and return whether other requests can read it from now on.

        While PostgreSQL cannot be reached, the response waits in Valkey and in this process.

        Args:
            stored: The response.
            is_promised: Whether to store the response even while PostgreSQL cannot be reached,
                because its client was already informed that it will be stored.

        Returns:
            False if the response is too large, or if no store can accept it.
        """
        self._under_way.discard(stored.id)
        can_keep = self._durable.has_room if is_promised else self.can_keep
        if not can_keep or stored.ByteSize() > RECORD_BYTES_MAX:
            return False
        try:
            sealed = self._seals.sealed(stored)
        except RejectedError:
            return False  # the tenant's own encryption key cannot be opened here
        try:
            await self._hot.keep(sealed)
        except ValkeyDownError:
            return await self._durable.offer_and_wait(sealed, _WITHOUT_VALKEY_S)
        self._durable.offer(sealed)
        return True

    async def keep_if_missing(self, stored: wire.StoredResponse) -> bool:
        """Store a response unless it exists or was deleted.

        Returns:
            Whether this call stored the response.

        Raises:
            RejectedError: UNAVAILABLE if no store answers.
        """
        (found,) = await self._find_all(stored.tenant_id, [stored.id])
        if found.stored is not None or found.is_deleted:
            return False
        return await self.keep(stored, is_promised=True)

    def mark(self, tenant_id: str, response_id: str, under_way: bytes) -> None:
        """Mark a response as under way. Without Valkey no mark is written."""
        self._under_way.add(response_id)
        with suppress(RejectedError):
            sealed = self._seals.under_way(tenant_id, response_id, under_way)
            self._hot.mark(response_id, sealed)

    def unmark(self, response_id: str) -> None:
        """Remove the mark of a response that was not stored, if Valkey can be reached."""
        self._under_way.discard(response_id)
        self._hot.unmark(response_id)

    async def find(self, tenant_id: str, response_id: str, param: str | None = None) -> Found:
        """Return a response of a tenant, or its present state while it is under way.

        Raises:
            PlatformError: NOT_FOUND for an unknown response or a response of another tenant.
            RejectedError: UNAVAILABLE if no store answers.
        """
        (found,) = await self._find_all(tenant_id, [response_id])
        if found.stored is None and not found.under_way:
            raise _not_found(response_id, param)
        return found

    async def chain(
        self,
        tenant_id: str,
        response_id: str,
        param: str,
        known: Callable[[str], Sequence[str]] = lambda _: (),
    ) -> list[wire.StoredResponse]:
        """Return a response that a request continues, preceded by all its ancestors.

        Args:
            tenant_id: Tenant that owns the response.
            response_id: Id of the response.
            param: Request field that names the response.
            known: Returns the ids of the chain that ends with a response, oldest first, if the
                caller already has that chain in memory. Known responses are only checked for
                existence and are not returned.

        Raises:
            PlatformError: NOT_FOUND if the response or one of its ancestors is missing, or
                CONFLICT if the response is under way.
            RejectedError: UNAVAILABLE if no store answers.
        """
        if ids := known(response_id):
            *before, found = await self._find_all(tenant_id, ids, len(ids))
            if not found.is_stored:
                raise _not_found(response_id, param)
            _require_all(response_id, ids[:-1], before, param)
            return []
        found = await self.find(tenant_id, response_id, param)
        if found.stored is None:
            text = f"Response '{response_id}' is still under way: continue it when it has ended."
            raise PlatformError(ErrorCode.CONFLICT, text, param=param)
        ids = found.stored.ancestors
        behind = next((at for at in range(len(ids), 0, -1) if known(ids[at - 1])), 0)
        before = await self._find_all(tenant_id, ids, behind)
        _require_all(response_id, ids, before, param)
        turns = [it.stored for it in before[behind:]]
        return [*(it for it in turns if it is not None), found.stored]

    async def turn_of_item(self, tenant_id: str, item_id: str, param: str) -> wire.StoredResponse:
        """Return the response that contains an item.

        Raises:
            PlatformError: NOT_FOUND if no stored response contains the item.
            RejectedError: UNAVAILABLE if no store answers.
        """
        for response_id in response_of_item(item_id, tenant_id, self._secret):
            (found,) = await self._find_all(tenant_id, [response_id])
            if found.stored is not None:
                return found.stored
        raise self.no_item(item_id, param)

    @staticmethod
    def no_item(item_id: str, param: str) -> PlatformError:
        """Return the error for an item that is not stored."""
        shown = item_id[:_SHOWN_CHARACTERS_MAX]
        text = f"Item with id '{shown}' not found: send the item itself."
        return PlatformError(ErrorCode.NOT_FOUND, text, param=param)

    async def delete(self, tenant_id: str, response_id: str) -> None:
        """Delete a response permanently.

        Raises:
            PlatformError: NOT_FOUND for an unknown response, or CONFLICT for one under way.
            RejectedError: UNAVAILABLE if PostgreSQL cannot be reached. The response may still
                exist.
        """
        found = await self.find(tenant_id, response_id)
        if found.stored is None:
            text = f"Response '{response_id}' is still under way: delete it when it has ended."
            raise PlatformError(ErrorCode.CONFLICT, text)
        # Without Valkey no request reads the copy in Valkey, which expires soon.
        with suppress(ValkeyDownError):
            await self._hot.delete(response_id)
        try:
            await self._durable.delete(tenant_id, response_id)
        except DurableDownError:
            raise _away() from None

    async def run(self) -> None:
        """Write responses to PostgreSQL until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._valkey.run())
            tasks.create_task(self._durable.run())
            for period_s, step in ((_MARKS_S, self._renew_marks), (_CLAIMS_S, self._renew_claims)):
                tasks.create_task(
                    run_every(
                        period_s,
                        step,
                        name="responses",
                        expected=(ValkeyDownError,),
                        step_timeout_s=_STEP_S,
                    )
                )

    async def flush(self, timeout_s: float) -> None:
        """Write waiting responses to PostgreSQL, for at most `timeout_s` seconds."""
        await self._durable.flush(timeout_s)

    async def _find_all(self, tenant_id: str, ids: Sequence[str], known: int = 0) -> list[Found]:
        """Return the states of responses, or raise RejectedError if no store answers.

        The first `known` ids were read by this tenant before. Their states only report whether the
        responses exist, and may lack the text.
        """
        if not ids:
            return []
        is_foreign = not all(belongs_to(it, tenant_id, self._secret) for it in ids[known:])
        if is_foreign or self._seals.is_over(tenant_id, ids):
            return [NOTHING for _ in ids]
        found = await self._look(tenant_id, ids, known)
        opened = self._seals.found
        return [opened(tenant_id, *state) for state in zip(ids, found, strict=True)]

    async def _look(self, tenant_id: str, ids: Sequence[str], known: int) -> list[Found]:
        """Return the states of responses as stored, still encrypted."""
        near = [self._durable.waits(it) for it in ids] if self._durable.waiting else []
        found, is_hot = [Found(it) if it else NOTHING for it in near] or [NOTHING] * len(ids), True
        if NOTHING in found:
            try:
                hot = await self._hot.find(ids, known)
                found = [it if it.stored else far for it, far in zip(found, hot, strict=True)]
            except ValkeyDownError:
                is_hot = False
        if NOTHING not in found:
            return found
        missing = [it for it, state in zip(ids, found, strict=True) if state == NOTHING]
        read = await self._read(tenant_id, missing, is_hot=is_hot)
        if not is_hot and any(it not in read and _may_wait_in_valkey(it) for it in missing):
            raise _away()
        return [
            Found(read.get(it)) if state == NOTHING else state
            for it, state in zip(ids, found, strict=True)
        ]

    async def _read(
        self, tenant_id: str, ids: Sequence[str], *, is_hot: bool
    ) -> dict[str, wire.StoredResponse]:
        try:
            read = await self._durable.read(tenant_id, ids)
        except DurableDownError:
            raise _away() from None
        if is_hot:
            with suppress(ValkeyDownError):
                for stored in read.values():
                    await self._hot.warm(stored)
        return read

    async def _settled(self, ids: Sequence[str]) -> None:
        with suppress(ValkeyDownError):
            await self._hot.settle(ids)

    async def _renew_marks(self) -> None:
        self._hot.extend(list(self._under_way))

    async def _renew_claims(self) -> None:
        """Claim this worker's waiting responses again, and those of dead gateways.

        After a loss of its data Valkey gets the waiting responses once more. A response of a dead
        gateway is taken into memory even while PostgreSQL cannot be reached. So a waiting response
        is again in two places, seconds after one of them was lost.
        """
        if not self._valkey.is_connected:
            return
        for response_id in await self._hot.hold(self._durable.promised()):
            if (stored := self._durable.waits(response_id)) is not None:
                await self._hot.keep(stored)
        taken = list[str]()
        if self._durable.has_room:
            taken = await self._hot.take_over(_SILENT_MS, _TAKEN_OVER_MAX)
        for start in range(0, len(taken), _READ_AT_ONCE):
            for stored in await self._hot.waiting(taken[start : start + _READ_AT_ONCE]):
                self._durable.offer(stored)


def cannot_store() -> RejectedError:
    """Return the error for a response that must be stored while no store is available."""
    text = "Responses cannot be stored now; try again shortly."
    return RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=2.0)


def _require_all(
    response_id: str, ancestors: Sequence[str], found: Sequence[Found], param: str
) -> None:
    """Raise NOT_FOUND unless all responses that a response continues exist."""
    for ancestor, it in zip(ancestors, found, strict=True):
        if not it.is_stored:
            text = (
                f"Response '{response_id}' cannot be continued: '{ancestor}', which it continues,"
                " was deleted or has expired."
            )
            raise PlatformError(ErrorCode.NOT_FOUND, text, param=param)


def _not_found(response_id: str, param: str | None) -> PlatformError:
    shown = response_id[:_SHOWN_CHARACTERS_MAX]
    text = f"Response with id '{shown}' not found: it never existed, was deleted, or has expired."
    return PlatformError(ErrorCode.NOT_FOUND, text, param=param)


def _may_wait_in_valkey(response_id: str) -> bool:
    """Return whether a response is so young that PostgreSQL may lack it though it was stored."""
    return time.time_ns() // 1_000_000 - created_unix_ms(response_id) < _ONLY_HOT_MS


def _away() -> RejectedError:
    text = "Stored responses cannot be reached now; try again shortly."
    return RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=2.0)
