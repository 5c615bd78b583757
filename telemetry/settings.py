"""Settings of the telemetry service; all come from the environment."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from sluice.events import REQUESTS_TOPIC
from sluice.settings import ServiceSettings

_ADDRESS = r"^[^:]+:\d{1,5}$|^\[[0-9a-f:]+\]:\d{1,5}$"
_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


class StoreSettings(ServiceSettings):
    """How to reach ClickHouse and what its tables are like.

    Attributes:
        clickhouse_url: http(s)://host:port.
        clickhouse_user: Empty for the server's default user.
        clickhouse_password: Empty when there is none.
        clickhouse_database: Created by the migrations.
        clickhouse_cluster: Name for ON CLUSTER; empty on a single server.
        clickhouse_engine_prefix: `Replicated` on a cluster with replicas, else empty.
    """

    model_config = SettingsConfigDict(env_prefix="TELEMETRY__")

    clickhouse_url: Annotated[str, Field(pattern=r"^https?://[^/]+/?$")]
    clickhouse_user: str = ""
    clickhouse_password: SecretStr = SecretStr("")
    clickhouse_database: Annotated[str, Field(pattern=_NAME)] = "sluice"
    clickhouse_cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9_{}-]*$")] = ""
    clickhouse_engine_prefix: Literal["", "Replicated"] = ""


class Settings(StoreSettings):
    """What the service needs to know besides its store.

    Attributes:
        kafka_bootstrap: host:port,... of the brokers.
        kafka_group_protocol: `classic` for brokers before Kafka 4.
        topic: Where the gateways send request events.
        group: Consumer group; the id of the Kafka cluster is appended, see `telemetry.consumer`.
        batch_max: Events per insert at most.
        batch_wait_s: How long to wait for a batch to fill.
        closing_settle_s: How long a gateway whose stream broke may take to tell of its requests
            itself, before a router's word counts; longer than an insert takes.
        http_address: host:port of queries, health and metrics.
        admin_key_sha256: SHA-256 of the admin key, in hex.
        prices_file: Price list of the fleet for costs, TOML or JSON; empty: none.
        control_plane_url: http(s)://host:port of its REST, asked for replica-hours when somebody
            asks for costs of pools of which the price list says no replicas; empty: none.
        control_plane_key: An admin key of it; a viewer's is enough.
    """

    kafka_bootstrap: Annotated[str, Field(min_length=3)]
    kafka_group_protocol: Literal["consumer", "classic"] = "consumer"
    topic: Annotated[str, Field(min_length=1)] = REQUESTS_TOPIC
    group: Annotated[str, Field(min_length=1)] = "sluice-telemetry"
    batch_max: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    batch_wait_s: Annotated[float, Field(gt=0, le=10)] = 0.25
    closing_settle_s: Annotated[float, Field(ge=0)] = 60.0
    http_address: Annotated[str, Field(pattern=_ADDRESS)]
    admin_key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    prices_file: Path | None = None
    control_plane_url: Annotated[str, Field(pattern=r"^$|^https?://[^/]+/?$")] = ""
    control_plane_key: SecretStr = SecretStr("")


class MigrateSettings(StoreSettings):
    """What `telemetry.migrate` needs; the service's other settings may be there, unread."""

    kafka_bootstrap: str = ""
    kafka_group_protocol: str = ""
    topic: str = ""
    group: str = ""
    batch_max: str = ""
    batch_wait_s: str = ""
    closing_settle_s: str = ""
    http_address: str = ""
    admin_key_sha256: str = ""
    prices_file: str = ""
    control_plane_url: str = ""
    control_plane_key: str = ""
