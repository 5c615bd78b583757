"""One accepted request's bookkeeping, from admission to its single event: pure facts, no I/O."""

from dataclasses import dataclass

from gateway.directory import Principal
from gateway.dispatch.generation import Generation
from gateway.limits.limiter import Reservation
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_SCHEMA_VERSION = 1


@dataclass(slots=True)
class Exchange:
    """What happens to an accepted request.

    Attributes:
        uid: Unique, ours; the ids of completion and event are made of it.
        request_id: Also in the answer's headers.
        trace_id: 32 hex digits.
        endpoint: Path of the API.
        received_at_s: Monotonic time.
        received_at_unix_ms: Wall-clock time.
        submitted_at_s: Monotonic time of the first submission; 0 before.
        first_sent_at_s: Monotonic time when the first token left; 0 before.
        outcome: The finish reason or the error code.
        status: HTTP status.
    """

    uid: str
    request_id: str
    trace_id: str
    endpoint: str
    received_at_s: float
    received_at_unix_ms: int
    principal: Principal
    model: control.Model
    reservation: Reservation
    is_stream: bool
    submitted_at_s: float = 0.0
    first_sent_at_s: float = 0.0
    cell_id: str = ""
    router_id: str = ""
    outcome: str = ""
    status: int = 0

    def submitted(self, cell_id: str, router_id: str, now_s: float) -> None:
        """Note where the request went; the time counts only once."""
        self.cell_id, self.router_id = cell_id, router_id
        if not self.submitted_at_s:
            self.submitted_at_s = now_s

    def event(self, generation: Generation, gateway_id: str, ended_at_s: float) -> RequestEvent:
        """Return the event that tells everything once."""
        principal, model, spec = self.principal, self.model, generation.spec
        event = RequestEvent(
            schema_version=_SCHEMA_VERSION,
            event_id=f"evt_{self.uid}",
            received_at_unix_ms=self.received_at_unix_ms,
            request_id=self.request_id,
            trace_id=self.trace_id,
            tenant_id=principal.tenant.id,
            key_id=principal.key.id,
            tier_id=principal.tier.id,
            session_hash=spec.session_hash,
            model=model.id,
            release=model.release,
            base_digest=model.base_digest,
            adapter_digest=model.adapter_digest,
            pool_id=model.pool_id,
            cell_id=self.cell_id,
            router_id=self.router_id,
            gateway_id=gateway_id,
            endpoint=self.endpoint,
            is_stream=self.is_stream,
            prompt_tokens=len(spec.prompt),
            output_tokens=len(generation.emitted),
            gateway_us=self._us(self.submitted_at_s),
            prefill_us=generation.prefill_us,
            ttft_us=self._us(self.first_sent_at_s),
            total_us=self._us(ended_at_s),
            itl_max_us=_us(generation.itl_max_s),
            outcome=self.outcome,
            status=self.status,
            resumes=generation.resumes,
        )
        if (placed := generation.placed) is not None:
            event.replica_id = placed.replica_id
            event.queue_us = placed.queue_us
            event.engine_queue_us = placed.engine_queue_us
            event.cached_tokens = generation.cached_tokens
        return event

    def _us(self, at_s: float) -> int:
        return _us(at_s - self.received_at_s) if at_s else 0


def _us(seconds: float) -> int:
    return min(0xFFFFFFFF, max(0, round(seconds * 1e6)))
