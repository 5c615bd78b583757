"""Settings of the gateway. Each field `x` is the environment variable `GATEWAY__X`."""

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
        instance_id: Id, unique among all gateway processes.
        http_address: `host:port` for clients and probes.
        ops_address: `host:port` for metrics and probes of all workers together. Without it,
            /metrics is at `http_address`, and shows only the worker that answers, without tenants.
        public_metrics: Whether `http_address` serves /metrics in spite of `ops_address`.
        tls_cert: PEM file of the certificate chain. With `tls_key`, `http_address` speaks TLS.
        tls_key: PEM file of the certificate's key. Both files are read again when they change.
        control_address: `host:port` of the control plane's gRPC server.
        state_dir: Directory of the last snapshot and of the event spool.
        artifacts_dir: Directory of whole bases, by digest. The control plane sends the small files,
            such as tokenizers, of all other bases.
        bases_bytes_max: Maximum size in bytes of the bases' small files in `state_dir`. The least
            recently used bases are removed.
        valkey_url: `redis://[[user]:password@]host:port` of the Valkey for limits. `rediss://`
            speaks TLS, and `redis+sentinel://[[user]:password@]host:port,host:port/name` queries
            Sentinels.
        kafka_bootstrap: `host:port,...` of the brokers.
        workers: Processes that share the port. From two on, a parent replaces workers that end, and
            SIGHUP replaces all workers, one after the other.
        freeze_s: Seconds after which a worker whose event loop does not run is killed and replaced.
        connections_max: Maximum number of open connections of one worker. Above the maximum, only
            probes are answered.
        head_timeout_s: Maximum number of seconds from the first to the last byte of a request's
            head.
        idle_timeout_s: Seconds for which a kept-alive connection may be silent.
        http2: Whether `http_address` also speaks HTTP/2, to clients that begin with it or select it
            over TLS.
        http2_streams_max: Maximum number of requests under way on one connection of HTTP/2.
        body_buffer_bytes: Maximum size in bytes of unfinished request bodies in one worker.
        unready_s: Seconds from SIGTERM for which /readyz reports not ready before the port closes.
        idle_grace_s: Seconds after `unready_s` for which kept-alive connections may still send a
            request.
        drain_s: Seconds after `idle_grace_s` for which streams may still run.
        keep_alive_s: Seconds of silence after which a comment is sent in a stream, so that no proxy
            closes it.
        flush_s: Seconds at the end for events to reach the broker. Remaining events are spooled.
        limit_deadline_s: Seconds to wait for Valkey before the local allowance decides.
        limit_local_share: Share of each limit that this process may grant while Valkey is
            unreachable.
        response_idle_s: Seconds for which Valkey stores a response that no request reads.
        response_grace_s: Seconds for which a stored response goes on after the client of its stream
            has disconnected, unless another request reads the stream. With 0 it ends at once.
        copies_max: Maximum number of concurrent copies for shadow stages of rollouts, and scores of
            answers, in one worker. Above the maximum, requests are neither copied nor scored.
        objective_ttft_s: TTFT objective of goodput, in seconds. For prompts above 2,048 tokens,
            twice their prefill time is added.
        objective_tpot_s: TPOT objective of goodput, in seconds.
        text_spool_bytes_max: Maximum size in bytes of redacted texts (of tenants that opted in)
            that one worker spools while the brokers are unreachable. They are dropped first if
            usage events need the space.
        log_every: Number of successful requests per logged request.
        trace_share: Share of requests without a trace context whose trace is sampled. For these,
            spans are exported, and routers explain placements. Slow and failed requests are always
            sampled.
        tool_hosts: `host:port,...` of tools that may have addresses outside the public internet.
        tool_calls_max: Maximum number of calls of server tools in one response or chat.
        tool_tokens_max: Maximum number of prompt and output tokens of all rounds of an answer with
            server tools.
        tool_loop_s: Seconds from the beginning of an answer until no more server tools are called.
        tool_micros_max: Maximum cost of the calls of one answer, in millionths of the ledger's
            currency.
        cors_origins: Origins whose pages in browsers may call the API, as `https://host` separated
            by commas, or `*` for any.
        classifiers: JSON file with the classifiers of rules on texts, read at the start. Without a
            file, only the shipped classifier is used.
        azure_paths: Whether the API is also at `/openai/deployments/MODEL/...` and
            `/openai/v1/...`, the paths of Azure OpenAI's clients.
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
    http2: bool = True
    http2_streams_max: Annotated[int, Field(ge=1, le=4096)] = 256
    body_buffer_bytes: Annotated[int, Field(ge=8 << 20)] = 256 << 20
    unready_s: Annotated[float, Field(ge=0, le=300)] = 0.0
    idle_grace_s: Annotated[float, Field(ge=0, le=300)] = 2.0
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    keep_alive_s: Annotated[float, Field(gt=0, le=300)] = 15.0
    flush_s: Annotated[float, Field(ge=0, le=60)] = 5.0
    limit_deadline_s: Annotated[float, Field(gt=0, le=5)] = 0.05
    limit_local_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    response_idle_s: Annotated[float, Field(ge=1, le=604_800)] = 3600.0
    response_grace_s: Annotated[float, Field(ge=0, le=300)] = 5.0
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
