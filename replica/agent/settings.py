"""Settings of the node agent, from `AGENT__*`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from pydantic_settings import SettingsConfigDict

from sluice.settings import Address, BindAddress, OptionalBindAddress, ServiceSettings


class AgentSettings(ServiceSettings):
    """Settings of the node agent.

    Attributes:
        node_id: Unique in the fleet and stable over restarts.
        control_address: host:port of the control plane's gRPC.
        state_dir: The agent's own directory: desired state, replicas, logs.
        artifacts_dir: Holds one directory per artifact digest.
        artifacts_max_bytes: Most bytes of all artifacts together; 0: the free bytes of their disk,
            without
            `artifacts_reserve_bytes`. The least used artifact makes way.
        artifacts_reserve_bytes: Bytes of that disk that stay free for others.
        artifact_store_url: URL of the store of chunks, the same as the control plane's; with S3,
            AWS_* of the environment. Empty: the node fetches nothing, and artifacts are put there
            by hand.
        peer_address: host:port on which other nodes are served chunks; port 0 picks one.
        peer_advertised: host:port at which other nodes reach it, port 0 the bound one; empty: the
            bound address. If that is the loopback or a wildcard, and the control plane is on
            another machine, the node serves no other node.
        region: Region of the node: nodes ask nodes of their own region first.
        rack: Rack of the node in its region: nodes ask nodes of their own rack before others.
        downloads_max: Chunks that are fetched at once.
        uploads_max: Chunks that are served at once; some more requests wait.
        download_bytes_per_second: Bytes per second of all downloads together; 0: any.
        upload_bytes_per_second: Bytes per second of all uploads together; 0: any.
        http_address: host:port for /healthz, /readyz and /metrics.
        engines: Drivers that this node offers, separated by commas.
        engine_host: Address that Triton listens on, or a name of it, looked up at the start;
            routers must reach it.
        engine_uid: User and group id that engines run as where the agent is root; what of closed
            directories they need is opened for them alone; 0: as the agent.
        hides_secrets: Whether the secret of an engine is kept from other users of the node, who can
            list its processes. Without it, the secret is an argument of Triton's.
        on_stop: Effect of SIGTERM on engines: `stop` ends them, too; `leave` ends the agent alone,
            to replace it, and the next one adopts the engines, as it does after a crash.
        start_timeout_s: Seconds from the start of an engine to its first good canary.
        start_stall_s: A starting engine that does not answer and uses no processor for so long is
            frozen.
        probe_interval_s: Seconds from one good probe of an engine to the next.
        probe_timeout_s: Longest wait for a probe's answer.
        probe_misses_max: Missed probes in a row that end an engine.
        probe_busy_misses_max: Misses in a row that end an engine which uses, or waits for, a
            processor.
        drain_timeout_s: A draining engine is stopped then, whatever it still runs.
        backoff_max_s: Longest pause before an engine that keeps failing is started again.
    """

    model_config = SettingsConfigDict(env_prefix="AGENT__")

    node_id: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    control_address: Address
    state_dir: Path
    artifacts_dir: Path
    artifacts_max_bytes: int = Field(default=0, ge=0)
    artifacts_reserve_bytes: int = Field(default=1 << 30, ge=0)
    artifact_store_url: Annotated[str, StringConstraints(pattern=r"^$|^file:///|^s3://[^/]")] = ""
    peer_address: BindAddress = "127.0.0.1:0"
    peer_advertised: OptionalBindAddress = ""
    region: Annotated[str, StringConstraints(min_length=1, max_length=128)] = "default"
    rack: Annotated[str, StringConstraints(min_length=1, max_length=128)] = "default"
    downloads_max: int = Field(default=8, ge=1, le=64)
    uploads_max: int = Field(default=8, ge=1, le=256)
    download_bytes_per_second: float = Field(default=0.0, ge=0)
    upload_bytes_per_second: float = Field(default=0.0, ge=0)
    http_address: Address
    engines: str = "openvino,sim,embed"
    engine_host: str = "127.0.0.1"
    engine_uid: int = Field(default=10001, ge=0)
    hides_secrets: bool = True
    on_stop: Literal["stop", "leave"] = "stop"
    start_timeout_s: float = Field(default=120.0, gt=0)
    start_stall_s: float = Field(default=10.0, gt=0)
    probe_interval_s: float = Field(default=0.4, gt=0)
    probe_timeout_s: float = Field(default=0.4, gt=0)
    probe_misses_max: int = Field(default=2, ge=1)
    probe_busy_misses_max: int = Field(default=25, ge=1)
    drain_timeout_s: float = Field(default=600.0, ge=0)
    backoff_max_s: float = Field(default=30.0, gt=0)

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The drivers that this node offers."""
        return tuple(name.strip() for name in self.engines.split(",") if name.strip())
