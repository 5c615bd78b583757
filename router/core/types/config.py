"""The limits and constants of the router core, from the router's settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits and constants of the core. Every bound of a queue is per cell.

    Attributes:
        queue_requests_max: Most waiting requests.
        queue_tokens_max: Most prompt tokens of the waiting requests.
        tenant_requests_max: Most waiting requests of one tenant.
        tenant_tokens_max: Most prompt tokens of one tenant's waiting requests.
        deadline_default_s: Deadline of the first token, in seconds, for requests without their own.
        retries_max: Most further dispatches of a request after lost or failed dispatches.
        busy_pause_s: Seconds without dispatches after an engine's reply "busy".
        draining_pause_s: Seconds without dispatches after an engine's reply "draining".
        cell_state_interval_s: Seconds between two broadcasts of a cell's state.
        output_tokens_expected: Output tokens per answer, until answers have ended in the cell.
        ttft_base_s: Constant part of the TTFT objective, in seconds.
        ttft_factor: Proportional part of the TTFT objective, as a multiple of the prefill time of
            the prompt on an idle replica.
        tpot_s: Objective of the mean time per output token, in seconds.
        overtake_factor: Multiple of its objective after which no request of the same tier overtakes
            a waiting request.
        decision_sample: One of this many placements is explained in `Placed.decision`. With 0 there
            is no sample.
        decision_pause_s: Least seconds between two explanations of placements that are traced, late
            or repeated. With inf no placement is explained for these reasons.
    """

    queue_requests_max: int = 4096
    queue_tokens_max: int = 8_000_000
    tenant_requests_max: int = 4096
    tenant_tokens_max: int = 8_000_000
    deadline_default_s: float = 30.0
    retries_max: int = 2
    busy_pause_s: float = 0.02
    draining_pause_s: float = 1.0
    cell_state_interval_s: float = 0.1
    output_tokens_expected: int = 256
    ttft_base_s: float = 0.5
    ttft_factor: float = 2.0
    tpot_s: float = 0.1
    overtake_factor: float = 48.0
    decision_sample: int = 0
    decision_pause_s: float = float("inf")
