"""Defines the settings of the node agent, which are read from variables `AGENT__*`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from pydantic_settings import SettingsConfigDict

from sluice.engines import names
from sluice.settings import Address, BindAddress, OptionalBindAddress, ServiceSettings


class AgentSettings(ServiceSettings):
    """Settings of the node agent.

    Attributes:
        node_id: Id of the node, unique in the fleet and stable over restarts.
        control_address: host:port of the control plane's gRPC.
        state_dir: The agent's own directory, with its desired state, replicas and logs.
        artifacts_dir: Directory with one directory per artifact digest.
        artifacts_max_bytes: Largest number of bytes of all artifacts together. 0 means all free
            bytes of the disk except `artifacts_reserve_bytes`. The least used artifact is evicted
            first.
        artifacts_reserve_bytes: Bytes of the disk of `artifacts_dir` that stay free for other uses.
        artifact_store_url: URL of the chunk store, which must be the control plane's. S3 also
            requires the AWS_* environment variables. If empty, the node fetches nothing, and
            operators must copy artifacts to the node.
        peer_address: host:port on which chunks are served to other nodes, where port 0 selects a
            free port.
        peer_advertised: host:port at which other nodes reach this node, where port 0 means the
            bound port. Empty means the bound address. If that address is the loopback or a
            wildcard, and the control plane is on another machine, the node serves no other node.
        region: Region of the node. Nodes fetch from nodes of their own region first.
        rack: Rack of the node in its region. Nodes fetch from nodes of their own rack before
            nodes of other racks.
        downloads_max: Largest number of chunks that are fetched concurrently.
        uploads_max: Largest number of chunks that are served concurrently. Further requests wait.
        download_bytes_per_second: Largest rate of all downloads together, or 0 for no limit.
        upload_bytes_per_second: Largest rate of all uploads together, or 0 for no limit.
        http_address: host:port for /healthz, /readyz and /metrics.
        engines: Drivers that this node offers, separated by commas.
        engine_host: Address that Triton listens on, which routers must reach. A name is resolved
            when the agent starts.
        engine_uid: User and group id of the engines if the agent runs as root, or 0 for root. If a
            directory is closed to this user, its needed parts become visible to engines only.
        hides_secrets: Whether an engine's secret is hidden from other users of the node. Otherwise
            the secret is an argument of Triton, which all users can list.
        on_stop: Effect of SIGTERM. `stop` ends the engines and the agent. `leave` ends only the
            agent, so that an operator can replace it. The next agent then adopts the engines, as
            after a crash.
        start_timeout_s: Seconds from the start of an engine to its first good canary.
        start_stall_s: Seconds without an answer and without processor time after which a starting
            engine counts as frozen.
        probe_interval_s: Seconds from one good probe of an engine to the next.
        probe_timeout_s: Longest wait for a probe's answer, in seconds.
        probe_misses_max: Number of consecutive missed probes that end an engine.
        probe_busy_misses_max: Number of consecutive missed probes that end an engine that uses, or
            waits for, a processor.
        drain_timeout_s: Seconds after which a draining engine is stopped, even with running
            requests.
        backoff_max_s: Longest pause in seconds before an engine that fails repeatedly is started
            again.
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
    engines: str = ",".join(names(lambda engine: engine.is_offered))
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
