"""How many tokens engines gave this router, by model and hour: what the ledger comes to. Pure.

Counted apart from the gateways' events: what one of them forgot, or told twice, shows in the
difference. A token is counted in the hour in which its request was received, as in the ledger, so
neither side depends on when an hour is looked at.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent, TokenCount

SCHEMA_VERSION = 3
_HOUR_MS = 3_600_000
_KEPT = 4_096  # models and hours; the oldest are not counted on


class TokenCounts:
    """Sums since the start; what changed is reported as a whole, so that reports may be lost."""

    def __init__(self, router_id: str, epoch: int) -> None:
        self._router_id = router_id
        self._epoch = epoch
        self._sums: dict[tuple[int, str], TokenCount] = {}
        self._changed: set[tuple[int, str]] = set()
        self._reports = 0

    def add(
        self, closing: bytes, output_tokens: int, *, uncertain: int = 0, discarded: int = 0
    ) -> None:
        """Count tokens of one request; `closing` says when it came, and for which model."""
        try:
            event = RequestEvent.FromString(closing)
        except DecodeError:  # of a gateway that sends anything
            return
        key = (event.received_at_unix_ms // _HOUR_MS * _HOUR_MS, event.model)
        count = self._sums.get(key)
        if count is None:
            if len(self._sums) >= _KEPT:
                oldest = min(self._sums)
                del self._sums[oldest]
                self._changed.discard(oldest)
            count = self._sums[key] = TokenCount(epoch=self._epoch)
        count.output_tokens = max(0, count.output_tokens + output_tokens)
        count.uncertain_tokens += uncertain
        count.discarded_tokens += discarded
        self._changed.add(key)

    def reports(self, unix_ms: int, *, is_last: bool = False) -> Iterator[bytes]:
        """Yield events with what changed since the last call, and one that says we are here."""
        self._reports += 1
        for hour_ms, model in sorted(self._changed):
            count = self._sums[hour_ms, model]
            count.number = self._reports
            yield self._event(hour_ms, model, count)
        self._changed.clear()
        here = TokenCount(epoch=self._epoch, number=self._reports, is_last=is_last)
        yield self._event(unix_ms // _HOUR_MS * _HOUR_MS, "", here)

    def _event(self, hour_ms: int, model: str, count: TokenCount) -> bytes:
        return RequestEvent(
            schema_version=SCHEMA_VERSION,
            event_id=f"count_{self._router_id}_{self._epoch}_{hour_ms}_{model}",
            received_at_unix_ms=hour_ms,
            router_id=self._router_id,
            model=model,
            count=count,
        ).SerializeToString()
