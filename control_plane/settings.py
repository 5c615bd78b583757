"""Settings of the control plane, which are all read from the environment."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from sluice.settings import Address, ServiceSettings


class Settings(ServiceSettings):
    """Settings of a control plane.

    Attributes:
        database_url: postgresql+asyncpg://... of a migrated database.
        grpc_address: host:port of the gRPC services, for example Watch and Sync.
        http_address: host:port of the admin REST, health and metrics.
        admin_key_sha256: SHA-256 of the bootstrap admin key, in hex.
        telemetry_url: http(s)://host:port of a telemetry service, the source of evidence for
            rollouts and of usage for budgets. Without it there is no evidence, and no budget is
            ever exhausted.
        telemetry_key: Admin key for the telemetry service.
        gateway_url: http(s)://host:port of a gateway for the console's playground. Without it there
            is no playground.
        rollout_window_s: Seconds of a window in which the two releases of a rollout are compared.
        artifact_store_url: URL of the artifact store, as file:///directory or s3://bucket/prefix
            (with AWS_* of the environment). Without it uploads are refused.
        artifact_rank_max: Largest rank of an adapter if no pool of its base serves adapters.
            Otherwise the limit is the pools' engine option adapter_rank.
        artifact_adapter_bytes_max: Largest size of one adapter's files together, in bytes.
        artifact_tenant_bytes_max: Largest size of all artifacts and uploads of a tenant, in bytes.
            Zero means no limit.
        artifact_signatures_required: Whether an artifact needs a signature of a registered key.
        artifact_import_roots: Directories that may be imported from, separated by commas.
        artifact_import_hosts: Web servers, separated by commas. `host` permits public addresses,
            and `host:port` permits any address.
        artifact_import_buckets: S3 buckets that may be imported from, separated by commas.
        artifact_grace_s: Seconds for which unreferenced artifacts and chunks are kept. They must
            exceed the duration of any import.
        distribution_node_bytes_per_second: Bytes per second that a node can send to other nodes,
            and receive.
        distribution_store_bytes_per_second: Bytes per second that the nodes of one region may read
            from the store.
        audit_days: Days for which rows of the audit log are kept.
        response_days: Days for which stored responses are kept. A client can continue a stored
            response.
        replica_hours_days: Days for which intervals of replicas are kept.
        budget_interval_s: Seconds between two comparisons of a budget with the ledger.
        scaling_interval_s: Seconds between two decisions of scaling, and length of a bucket of
            demand.
        scaling_actuators: JSON file of the actuators that add nodes, read at the start. Without it,
            replicas run on the existing nodes.
        scaling_consolidation: Gain for which replicas move to other nodes, one at a time, so that a
            node becomes empty. `needed` means that an actuator then ends the node, or that a
            waiting replica has room. With `always` an empty node is a gain. `off` moves none.
        scaling_consolidation_hold_s: Seconds for which a replica has run, and its pool's number has
            not changed, before the replica moves.
        scaling_prefetch_bases: Largest number of bases that a node fetches before it has a replica,
            because it would get the next replica of a scaled pool. Zero means none.
        console_session_s: Seconds after which a session of the console ends, so that its user has
            to sign in again.
        openid: JSON file of the provider for sign-in to the console, read at the start. Without it,
            people sign in only with admin keys.
        quality_pool_hour_max: Largest number of a pool's quarantined replicas that are replaced
            within an hour.
        alert_receivers: JSON file with the receivers of alerts, read at the start. Without it,
            alerts have no receivers.
        alert_targets: Pages of metrics on which this process evaluates alert rules, as
            JOB=HOST:PORT, separated by commas. Engines are added automatically. If it is empty, a
            Prometheus must evaluate the rules.
        alert_rules: Rule files in Prometheus' format, separated by commas. If it is empty, the
            platform's rules are used.
        alert_runbooks: URL of the folder of runbooks for links in alerts, for example
            https://docs.example.com/runbooks. If it is empty, the folder of this repository is
            used.
        alert_interval_s: Seconds between two rounds of `alert_targets`.
        alert_days: Days for which ended alerts, and closed incidents, are kept.
        quality_node_day_max: Largest number of a node's quarantined replicas within a day. Above
            it, the node receives no new replicas.
    """

    model_config = SettingsConfigDict(env_prefix="CONTROL_PLANE__")

    database_url: SecretStr
    grpc_address: Address
    http_address: Address
    admin_key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    telemetry_url: Annotated[str, Field(pattern=r"^$|^https?://[^/]+/?$")] = ""
    telemetry_key: SecretStr = SecretStr("")
    gateway_url: Annotated[str, Field(pattern=r"^$|^https?://[^/]+/?$")] = ""
    rollout_window_s: Annotated[float, Field(ge=1, le=300)] = 10
    artifact_store_url: Annotated[str, Field(pattern=r"^$|^file:///|^s3://[^/]")] = ""
    artifact_rank_max: Annotated[int, Field(ge=1, le=1024)] = 64
    artifact_adapter_bytes_max: Annotated[int, Field(ge=1)] = 2 << 30
    artifact_tenant_bytes_max: Annotated[int, Field(ge=0)] = 100 << 30
    artifact_signatures_required: bool = False
    artifact_import_roots: str = ""
    artifact_import_hosts: str = ""
    artifact_import_buckets: str = ""
    artifact_grace_s: Annotated[float, Field(ge=1)] = 86_400
    distribution_node_bytes_per_second: Annotated[float, Field(ge=1)] = 1.25e9
    distribution_store_bytes_per_second: Annotated[float, Field(ge=1)] = 6.25e9
    audit_days: Annotated[int, Field(ge=1, le=36_500)] = 400
    response_days: Annotated[int, Field(ge=1, le=3650)] = 30
    replica_hours_days: Annotated[int, Field(ge=1, le=36_500)] = 400
    budget_interval_s: Annotated[float, Field(ge=1, le=3600)] = 15
    scaling_interval_s: Annotated[float, Field(ge=0.5, le=60)] = 15
    scaling_actuators: Path | None = None
    scaling_consolidation: Literal["off", "needed", "always"] = "needed"
    scaling_consolidation_hold_s: Annotated[float, Field(ge=1, le=86_400)] = 900
    scaling_prefetch_bases: Annotated[int, Field(ge=0, le=16)] = 2
    console_session_s: Annotated[float, Field(ge=60, le=86_400)] = 14_400
    quality_pool_hour_max: Annotated[int, Field(ge=0)] = 3
    quality_node_day_max: Annotated[int, Field(ge=0)] = 3
    openid: Path | None = None
    alert_receivers: Path | None = None
    alert_targets: str = ""
    alert_rules: str = ""
    alert_runbooks: str = ""
    alert_interval_s: Annotated[float, Field(ge=1, le=60)] = 15
    alert_days: Annotated[int, Field(ge=1, le=36_500)] = 90


class MigrateSettings(ServiceSettings):
    """Settings of `control_plane.migrate`, which ignores the service's other settings."""

    model_config = SettingsConfigDict(env_prefix="CONTROL_PLANE__")

    database_url: SecretStr
    grpc_address: str = ""
    http_address: str = ""
    admin_key_sha256: str = ""
    telemetry_url: str = ""
    telemetry_key: str = ""
    gateway_url: str = ""
    rollout_window_s: str = ""
    artifact_store_url: str = ""
    artifact_rank_max: str = ""
    artifact_adapter_bytes_max: str = ""
    artifact_tenant_bytes_max: str = ""
    artifact_signatures_required: str = ""
    artifact_import_roots: str = ""
    artifact_import_hosts: str = ""
    artifact_import_buckets: str = ""
    artifact_grace_s: str = ""
    distribution_node_bytes_per_second: str = ""
    distribution_store_bytes_per_second: str = ""
    audit_days: str = ""
    response_days: str = ""
    replica_hours_days: str = ""
    budget_interval_s: str = ""
    scaling_interval_s: str = ""
    scaling_actuators: str = ""
    scaling_consolidation: str = ""
    scaling_consolidation_hold_s: str = ""
    scaling_prefetch_bases: str = ""
    console_session_s: str = ""
    quality_pool_hour_max: str = ""
    quality_node_day_max: str = ""
    openid: str = ""
    alert_receivers: str = ""
    alert_targets: str = ""
    alert_rules: str = ""
    alert_runbooks: str = ""
    alert_interval_s: str = ""
    alert_days: str = ""
