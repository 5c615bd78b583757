"""Defines the settings of the telemetry service, which are read from environment variables."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from sluice.events import REQUESTS_TOPIC, TEXTS_TOPIC
from sluice.kafka import Brokers
from sluice.settings import Address, ServiceSettings

_Days = Annotated[int, Field(ge=0, le=36_500)]
# Least permitted value of `requests_days`. After half of it, an event counts as late and has a
# separate rollup row. So a change of this constant would invalidate existing rollups.
REQUESTS_DAYS_MIN = 7
_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


class StoreSettings(ServiceSettings):
    """Settings of the connection to ClickHouse and of its tables.

    Attributes:
        clickhouse_url: http(s)://host:port of ClickHouse.
        clickhouse_user: User, or empty for the server's default user.
        clickhouse_password: Password, or empty for none.
        clickhouse_database: Database, which the migrations create.
        clickhouse_cluster: Name for ON CLUSTER, or empty for a single server.
        clickhouse_engine_prefix: Prefix of table engines: `Replicated` on a cluster with replicas,
            else empty. With the prefix, inserts wait for most replicas, and queries read all
            acknowledged rows.
        clickhouse_is_sharded: Whether the cluster has several shards. If so, each table exists on
            each shard, and a further table covers all shards. This setting must never change.
        clickhouse_storage_policy: Storage policy of the tables that grow with requests, or empty
            for the default.
        clickhouse_cold_volume: Volume of that policy to which old rows move.
        cold_after_days: Days after which rows move to the cold volume, or 0 for never.
        requests_days: Days after which events of requests are deleted, or 0 for never. They must be
            more days than brokers and spools store events.
        closings_days: Days after which routers' closings of lost gateways are deleted, or 0 for
            never.
        token_counts_days: Days after which routers' token counts are deleted, or 0 for never.
        attempts_days: Days after which attempts are deleted, or 0 for never.
        tool_calls_days: Days after which calls of tools are deleted, or 0 for never.
        poison_days: Days after which invalid messages are deleted, or 0 for never.
        usage_minutes_days: Days after which sums per minute are deleted, or 0 for never.
        usage_hours_days: Days after which sums per hour are deleted, or 0 for never. Usage of
            deleted hours is lost.
    """

    model_config = SettingsConfigDict(env_prefix="TELEMETRY__")

    clickhouse_url: Annotated[str, Field(pattern=r"^https?://[^/]+/?$")]
    clickhouse_user: str = ""
    clickhouse_password: SecretStr = SecretStr("")
    clickhouse_database: Annotated[str, Field(pattern=_NAME)] = "sluice"
    clickhouse_cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9_{}-]*$")] = ""
    clickhouse_engine_prefix: Literal["", "Replicated"] = ""
    clickhouse_is_sharded: bool = False
    clickhouse_storage_policy: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]*$")] = ""
    clickhouse_cold_volume: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]*$")] = ""
    cold_after_days: _Days = 0
    requests_days: _Days = 400
    closings_days: _Days = 30
    token_counts_days: _Days = 400
    attempts_days: _Days = 30
    tool_calls_days: _Days = 400
    poison_days: _Days = 90
    usage_minutes_days: _Days = 400
    usage_hours_days: _Days = 1_200

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.clickhouse_is_sharded and not self.clickhouse_cluster:
            raise ValueError("clickhouse_is_sharded needs clickhouse_cluster")
        if bool(self.cold_after_days) != bool(self.clickhouse_cold_volume):
            raise ValueError("cold_after_days and clickhouse_cold_volume need one another")
        if 0 < self.requests_days < REQUESTS_DAYS_MIN:
            raise ValueError(f"requests_days is 0 or at least {REQUESTS_DAYS_MIN}")
        return self


class Settings(StoreSettings):
    """Settings of the telemetry service, in addition to those of its store.

    Attributes:
        kafka_bootstrap: host:port,... of the brokers.
        kafka_group_protocol: `classic` for brokers before Kafka 4.
        topic: Topic of the gateways' request events.
        texts_topic: Topic of redacted texts of tenants that opted in.
        group: Consumer group, to which the id of the Kafka cluster is appended
            (`telemetry.consumer`).
        batch_max: Maximum number of events per insert.
        batch_wait_s: Seconds to wait for a batch to fill. Even an insert of few rows costs the
            trace store about 40 ms of processor time.
        closing_settle_s: Seconds after a gateway's stream broke, in which the gateway may still
            report its requests. After this time, a router's report counts. The time must be longer
            than an insert.
        http_address: host:port of queries, health and metrics.
        admin_key_sha256: SHA-256 of the admin key, in hex.
        prices_file: File with the price list of the fleet, in TOML or JSON, or empty for no costs.
        control_plane_url: http(s)://host:port of the control plane's REST API, or empty. It has the
            replica-hours of pools for which the price list has no replicas.
        control_plane_key: Admin key of the control plane. The viewer role suffices.
        otlp_endpoint: URL for spans by OTLP over HTTP, for example
            `http://collector:4318/v1/traces`, or empty for no export. OpenTelemetry's own
            variables set headers and certificates (`OTEL_EXPORTER_OTLP_HEADERS`,
            `OTEL_EXPORTER_OTLP_CERTIFICATE`).
        otlp_slow_s: Seconds of TTFT, or of a pause between tokens, from which a request counts as
            slow. Spans of slow requests are exported even if the requests are not sampled. 0 means
            that no request counts as slow.
    """

    kafka_bootstrap: Brokers
    kafka_group_protocol: Literal["consumer", "classic"] = "consumer"
    topic: Annotated[str, Field(min_length=1)] = REQUESTS_TOPIC
    texts_topic: Annotated[str, Field(min_length=1)] = TEXTS_TOPIC
    group: Annotated[str, Field(min_length=1)] = "sluice-telemetry"
    batch_max: Annotated[int, Field(ge=1, le=100_000)] = 20_000
    batch_wait_s: Annotated[float, Field(gt=0, le=10)] = 1.0
    closing_settle_s: Annotated[float, Field(ge=0)] = 60.0
    http_address: Address
    admin_key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    prices_file: Path | None = None
    control_plane_url: Annotated[str, Field(pattern=r"^$|^https?://[^/]+/?$")] = ""
    control_plane_key: SecretStr = SecretStr("")
    otlp_endpoint: Annotated[str, Field(pattern=r"^$|^https?://[^/]+/.*$")] = ""
    otlp_slow_s: Annotated[float, Field(ge=0)] = 5.0


class MigrateSettings(StoreSettings):
    """Settings of `telemetry.migrate`. The service's other settings are accepted but ignored."""

    kafka_bootstrap: str = ""
    kafka_group_protocol: str = ""
    topic: str = ""
    texts_topic: str = ""
    group: str = ""
    batch_max: str = ""
    batch_wait_s: str = ""
    closing_settle_s: str = ""
    http_address: str = ""
    admin_key_sha256: str = ""
    prices_file: str = ""
    control_plane_url: str = ""
    control_plane_key: str = ""
    otlp_endpoint: str = ""
    otlp_slow_s: str = ""
