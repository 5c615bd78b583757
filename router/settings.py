"""Settings of the router; all come from the environment."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from sluice.settings import ServiceSettings

_Address = Annotated[str, Field(pattern=r"^[^:]+:\d{1,5}$|^\[[0-9a-f:]+\]:\d{1,5}$")]


class Settings(ServiceSettings):
    """What a router needs to know.

    Attributes:
        instance_id: Unique among routers; cells are assigned to it.
        grpc_address: host:port for gateways; it is also what they are told to dial.
        http_address: host:port of health and metrics.
        control_address: host:port of the control plane's gRPC.
        state_dir: Keeps the last snapshot.
        queue_requests_max: Waiting requests per cell; more are rejected.
        queue_tokens_max: Waiting prompt tokens per cell.
        deadline_default_s: Until the first token, for requests that name no deadline.
        silence_s: A replica without a frame for this long is lost.
        drain_s: How long running requests may take after SIGTERM.
    """

    model_config = SettingsConfigDict(env_prefix="ROUTER__")

    instance_id: Annotated[str, Field(min_length=1)]
    grpc_address: _Address
    http_address: _Address
    control_address: _Address
    state_dir: Path
    queue_requests_max: Annotated[int, Field(ge=1)] = 4096
    queue_tokens_max: Annotated[int, Field(ge=1)] = 8_000_000
    deadline_default_s: Annotated[float, Field(gt=0)] = 30.0
    silence_s: Annotated[float, Field(ge=0.5)] = 2.0
    drain_s: Annotated[float, Field(ge=0)] = 30.0
