"""Settings of the gateway; each field `x` is the environment variable `GATEWAY__X`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from sluice.addresses import host_and_port
from sluice.kafka import Brokers
from sluice.settings import Address, ServiceSettings

_ORIGINS = r"^(\*|https?://[^\s,/]+(,https?://[^\s,/]+)*)?$"

_HOSTS = r"^([^\s,/]+:[0-9]{1,5}(,[^\s,/]+:[0-9]{1,5})*)?$"


class GatewaySettings(ServiceSettings):
    """Settings of one gateway process.

    Attributes:
        instance_id: Unique among all gateway processes.
        http_address: `host:port` for clients and probes.
        ops_address: `host:port` for metrics and probes of all workers together. Without it,
            /metrics is at `http_address`, and tells of the one worker that answers and of no
            tenant.
        public_metrics: Whether `http_address` serves /metrics in spite of `ops_address`.
        tls_cert: PEM file of the certificate chain; with `tls_key`, `http_address` speaks TLS.
        tls_key: PEM file of its key. Both are read again when they change.
        control_address: `host:port` of the control plane's Watch.
        state_dir: Last snapshot and event spool.
        artifacts_dir: Directory of whole bases, by digest. The control plane sends the small files
            of other bases, tokenizers for instance; without the directory, of all bases.
        bases_bytes_max: Bytes of these small files that `state_dir` keeps; the least recently used
            ones go.
        valkey_url: `redis://[[user]:password@]host:port` of the limits; `rediss://` speaks TLS,
            `redis+sentinel://[[user]:password@]host:port,host:port/name` asks Sentinels.
        kafka_bootstrap: `host:port,...` of the brokers.
        workers: Processes that share the port; from two on, a parent replaces those that end, and
            SIGHUP replaces all, one after the other.
        freeze_s: A worker whose event loop stands still for so long is killed and replaced.
        connections_max: Open at once in one worker; beyond, only probes are answered.
        head_timeout_s: How long a request's head may take from its first byte.
        idle_timeout_s: How long a kept-alive connection may be silent.
        body_buffer_bytes: Bytes of unfinished request bodies that one worker holds at most.
        unready_s: Seconds from SIGTERM for which /readyz says no before the port closes.
        idle_grace_s: Seconds from then on for which kept-alive connections may still bring a
            request.
        drain_s: Seconds after that for which streams may still run.
        keep_alive_s: A stream that is silent for so long gets a comment, so that no proxy takes it
            for dead.
        flush_s: Seconds at the end for events to reach the broker; the rest is spooled.
        limit_deadline_s: How long Valkey may take before the local allowance decides.
        limit_local_share: Share of each limit that this process may grant while Valkey is away.
        response_idle_s: How long Valkey has a response that no request reads.
        copies_max: Copies of requests for shadow stages of rollouts, and scores of answers, that
            one worker has under way at most; further ones are not made.
        objective_ttft_s: Within this time, and twice their prefill if they have more than 2,048
            tokens of prompt, requests must have their first token to count as goodput.
        objective_tpot_s: Bound of their mean time per further token for that.
        text_spool_bytes_max: Bytes of redacted texts of tenants that opted in that one worker keeps
            on disk while the brokers are away. They go first where usage needs the room.
        log_every: One in so many successful requests is logged.
        trace_share: Share of requests without a trace context whose trace is kept: spans are
            exported, and routers explain placements. Slow and failed ones always are.
        tool_hosts: `host:port,...` of tools that may have addresses that are not the internet's.
        tool_calls_max: Calls of tools that run here in one response at most.
        tool_tokens_max: Tokens of all its rounds, prompts and answers.
        tool_loop_s: Time from its begin until no more tools are called for it.
        tool_micros_max: Prices of these calls together, in millionths of the ledger's currency.
        cors_origins: Origins whose pages in browsers may call the API, as `https://host` with
            commas between; `*` is any.
        classifiers: JSON file that names the classifiers of rules on texts, read at the start;
            without one, there is the one that ships.
        azure_paths: The API is also at `/openai/deployments/MODEL/...` and `/openai/v1/...`, where
            clients of Azure OpenAI look for it.
    """

    model_config = SettingsConfigDict(env_prefix="GATEWAY__")

    instance_id: Annotated[str, Field(min_length=1, max_length=64)]
    http_address: Address
    control_address: Address
    state_dir: Path
    valkey_url: SecretStr
    kafka_bootstrap: Brokers
    artifacts_dir: Path | None = None
    bases_bytes_max: Annotated[int, Field(ge=128 << 20)] = 1 << 30
    ops_address: Address | None = None
    public_metrics: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    freeze_s: Annotated[float, Field(ge=2, le=300)] = 10.0
    connections_max: Annotated[int, Field(ge=1)] = 12_000
    head_timeout_s: Annotated[float, Field(gt=0, le=300)] = 10.0
    idle_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 75.0
    body_buffer_bytes: Annotated[int, Field(ge=8 << 20)] = 256 << 20
    unready_s: Annotated[float, Field(ge=0, le=300)] = 0.0
    idle_grace_s: Annotated[float, Field(ge=0, le=300)] = 2.0
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    keep_alive_s: Annotated[float, Field(gt=0, le=300)] = 15.0
    flush_s: Annotated[float, Field(ge=0, le=60)] = 5.0
    limit_deadline_s: Annotated[float, Field(gt=0, le=5)] = 0.05
    limit_local_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    response_idle_s: Annotated[float, Field(ge=1, le=604_800)] = 3600.0
    copies_max: Annotated[int, Field(ge=0, le=10_000)] = 64
    objective_ttft_s: Annotated[float, Field(gt=0)] = 0.5
    objective_tpot_s: Annotated[float, Field(gt=0)] = 0.05
    text_spool_bytes_max: Annotated[int, Field(ge=8 << 20)] = 256 << 20
    log_every: Annotated[int, Field(ge=1)] = 100
    trace_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    tool_hosts: Annotated[str, Field(pattern=_HOSTS)] = ""
    tool_calls_max: Annotated[int, Field(ge=1, le=1024)] = 32
    tool_tokens_max: Annotated[int, Field(ge=1)] = 2_000_000
    tool_loop_s: Annotated[float, Field(gt=0, le=3600)] = 300.0
    tool_micros_max: Annotated[int, Field(ge=0)] = 10_000_000
    cors_origins: Annotated[str, Field(pattern=_ORIGINS)] = ""
    classifiers: Path | None = None
    azure_paths: bool = False

    @property
    def origins(self) -> list[str]:
        """The origins of `cors_origins`."""
        return self.cors_origins.split(",") if self.cors_origins else []

    @property
    def host(self) -> str:
        """The host part of `http_address`."""
        return host_and_port(self.http_address)[0]

    @property
    def port(self) -> int:
        """The port part of `http_address`."""
        return host_and_port(self.http_address)[1]
