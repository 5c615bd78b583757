"""The requests of a replayed trace, without any content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        arrived_s: Seconds since the first request of the trace.
        prompt_tokens: Number of prompt tokens, at least 1.
        output_tokens: Length of the model's answer in tokens, at least 1, which is hidden from
            routers.
        blocks: Chained ids of the prompt's blocks. Equal ids mean equal prefixes. The last block
            may be partly filled.
        session: Number of the conversation, or a negative number if the trace names no
            conversation.
        tenant: Tenant of the request, or empty if the trace names none.
        priority: Priority of the tenant's tier. A higher priority is more important.
    """

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: int
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, of which the first arrives at time 0.

    Attributes:
        name: Name in results.
        block_tokens: Tokens per block of `TraceRequest.blocks`.
    """

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def time_factor(self, rate_per_s: float) -> float:
        """Return the factor on arrival times that leads to a mean rate."""
        duration_s = self.requests[-1].arrived_s
        return len(self.requests) / duration_s / rate_per_s if duration_s else 1.0
