"""Settings of the router, all from the environment."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from sluice.settings import Address, ServiceSettings


class Settings(ServiceSettings):
    """Settings of a router.

    Attributes:
        instance_id: Unique id of the router, to which cells are assigned.
        grpc_address: host:port for gateways, which receive it from the control plane.
        http_address: host:port of health and metrics.
        control_address: host:port of the control plane's gRPC.
        state_dir: Directory of the last snapshot.
        queue_requests_max: Most waiting requests per cell. Further requests are rejected.
        queue_tokens_max: Most waiting prompt tokens per cell.
        tenant_requests_max: Most waiting requests per tenant and cell.
        tenant_tokens_max: Most waiting prompt tokens per tenant and cell.
        deadline_default_s: Deadline of the first token, in seconds, for requests without their own.
        retries_max: Times that a request which was lost or failed is dispatched again.
        ttft_base_s: Constant part of the TTFT objective, in seconds.
        ttft_factor: Multiple of a prompt's prefill time on an idle replica, which the objective
            adds to `ttft_base_s`.
        tpot_s: Objective of the mean time per output token, in seconds.
        overtake_factor: Multiple of its objective after which no request of its tier overtakes a
            waiting request.
        decision_sample: Number of placements per explained placement, or 0 to explain none.
        decision_pause_s: Least seconds between two explanations of placements that are traced, late
            or repeated, per router. Each explanation visits every replica. Other slow or
            interrupted requests get three figures without an explanation, at the same rate.
        plans_adapters: Whether replicas load adapters ahead of their requests, by demand.
        silence_s: Seconds without a frame after which a replica is lost. Busy engines send a frame
            with every step, and idle engines send one every 0.2 s.
        drain_s: Longest wait for running requests after SIGTERM, in seconds.
    """

    model_config = SettingsConfigDict(env_prefix="ROUTER__")

    instance_id: Annotated[str, Field(min_length=1)]
    grpc_address: Address
    http_address: Address
    control_address: Address
    state_dir: Path
    queue_requests_max: Annotated[int, Field(ge=1)] = 4096
    queue_tokens_max: Annotated[int, Field(ge=1)] = 8_000_000
    tenant_requests_max: Annotated[int, Field(ge=1)] = 4096
    tenant_tokens_max: Annotated[int, Field(ge=1)] = 8_000_000
    deadline_default_s: Annotated[float, Field(gt=0)] = 30.0
    retries_max: Annotated[int, Field(ge=0)] = 2
    ttft_base_s: Annotated[float, Field(ge=0)] = 0.5
    ttft_factor: Annotated[float, Field(ge=0)] = 2.0
    tpot_s: Annotated[float, Field(gt=0)] = 0.1
    overtake_factor: Annotated[float, Field(ge=1)] = 48.0
    decision_sample: Annotated[int, Field(ge=0)] = 0
    decision_pause_s: Annotated[float, Field(gt=0)] = 0.05
    plans_adapters: bool = True
    silence_s: Annotated[float, Field(ge=0.5)] = 1.0
    drain_s: Annotated[float, Field(ge=0)] = 30.0
