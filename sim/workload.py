"""The replayed workload: requests of a trace, without any content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        arrived_s: Seconds since the first request of the trace.
        prompt_tokens: Number of prompt tokens; at least 1.
        output_tokens: Length of the model's answer, hidden from routers; at least 1.
        blocks: Chained ids of the prompt's blocks; equal ids mean equal prefixes. The last block
            may be partly filled.
        session: Requests of one conversation have one number; a negative one stands for a request
            whose conversation, if any, the trace does not name.
        tenant: Tenant of the request; empty if the trace does not say.
        priority: Priority of its tier; higher is more important.
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
    """Requests in order of arrival; the first one arrives at time 0.

    Attributes:
        name: Name in results.
        block_tokens: Tokens per block of `TraceRequest.blocks`.
    """

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def time_factor(self, rate_per_s: float) -> float:
        """Return the factor on arrival times that gives a mean rate."""
        duration_s = self.requests[-1].arrived_s
        return len(self.requests) / duration_s / rate_per_s if duration_s else 1.0
