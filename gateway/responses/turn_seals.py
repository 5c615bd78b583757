"""Encrypts stored responses and their events with the keys of their tenants."""

import time
from collections.abc import Sequence

from gateway.content.seals import ContentGoneError, ContentSeals, is_sealed
from gateway.responses.hot_store import NOTHING, Found
from sluice.response_ids import created_unix_ms
from sluice.wire.state.v1 import state_pb2 as wire


class TurnSeals:
    """Encrypts and decrypts responses for one worker, with the errors of `ContentSeals`."""

    def __init__(self, seals: ContentSeals) -> None:
        """`seals` encrypts and decrypts with the keys of the tenants."""
        self._seals = seals

    def sealed(self, turn: wire.StoredResponse) -> wire.StoredResponse:
        """Return an encrypted copy of a response, or the response if its tenant has no key."""
        tenant_id = turn.tenant_id
        if not self._seals.encrypts(tenant_id):
            return turn
        return _with(
            turn,
            self._seals.sealed(tenant_id, f"{turn.id}/input", turn.input_items),
            self._seals.sealed(tenant_id, f"{turn.id}/response", turn.response),
            self._seals.sealed(tenant_id, f"{turn.id}/prompt", turn.prompt),
            self._seals.sealed(tenant_id, f"{turn.id}/deltas", turn.deltas),
        )

    def opened(self, turn: wire.StoredResponse) -> wire.StoredResponse | None:
        """Return a decrypted response, or None if its key was deleted."""
        if not (is_sealed(turn.input_items) or is_sealed(turn.response)):
            return turn
        tenant_id, open_ = turn.tenant_id, self._seals.opened
        try:
            input_items = open_(tenant_id, f"{turn.id}/input", turn.input_items)
            response = open_(tenant_id, f"{turn.id}/response", turn.response)
            prompt = open_(tenant_id, f"{turn.id}/prompt", turn.prompt)
            deltas = open_(tenant_id, f"{turn.id}/deltas", turn.deltas)
        except ContentGoneError:
            return None
        return _with(turn, input_items, response, prompt, deltas)

    def found(self, tenant_id: str, response_id: str, it: Found) -> Found:
        """Return the state of a response, decrypted."""
        if it.stored is not None:
            turn = self.opened(it.stored)
            return NOTHING if turn is None else it._replace(stored=turn)
        if not it.under_way:
            return it
        under_way = self.under_way_opened(tenant_id, response_id, it.under_way)
        return it._replace(under_way=under_way) if under_way else NOTHING

    def under_way(self, tenant_id: str, response_id: str, document: bytes) -> bytes:
        """Return the JSON of a response under way, encrypted."""
        return self._seals.sealed(tenant_id, f"{response_id}/under_way", document)

    def under_way_opened(self, tenant_id: str, response_id: str, document: bytes) -> bytes:
        """Return the decrypted JSON of a response under way, empty if its key was deleted."""
        try:
            return self._seals.opened(tenant_id, f"{response_id}/under_way", document)
        except ContentGoneError:
            return b""

    def events(self, tenant_id: str, response_id: str, events: bytes) -> bytes:
        """Return complete events, encrypted."""
        return self._seals.sealed(tenant_id, f"{response_id}/events", events)

    def events_opened(
        self, tenant_id: str, response_id: str, blocks: Sequence[bytes]
    ) -> list[bytes]:
        """Return decrypted blocks of events, or an empty list if their key was deleted."""
        try:
            place = f"{response_id}/events"
            return [self._seals.opened(tenant_id, place, block) for block in blocks]
        except ContentGoneError:
            return []

    def is_over(self, tenant_id: str, ids: Sequence[str]) -> bool:
        """Return whether the tenant's retention or last erasure covers any of these responses."""
        horizon_ms = self._seals.horizon_unix_ms(tenant_id, time.time_ns() // 1_000_000)
        return bool(horizon_ms) and any(created_unix_ms(it) < horizon_ms for it in ids)


def _with(
    turn: wire.StoredResponse, input_items: bytes, response: bytes, prompt: bytes, deltas: bytes
) -> wire.StoredResponse:
    return wire.StoredResponse(
        id=turn.id,
        tenant_id=turn.tenant_id,
        created_at_unix_ms=turn.created_at_unix_ms,
        ancestors=turn.ancestors,
        input_items=input_items,
        response=response,
        prompt=prompt,
        deltas=deltas,
    )
