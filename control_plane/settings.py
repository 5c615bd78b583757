"""Settings of the control plane; all come from the environment."""

from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from sluice.settings import ServiceSettings

_ADDRESS = r"^[^:]+:\d{1,5}$|^\[[0-9a-f:]+\]:\d{1,5}$"


class Settings(ServiceSettings):
    """What a control plane needs to know.

    Attributes:
        database_url: postgresql+asyncpg://... of a migrated database.
        grpc_address: host:port of Watch and Sync.
        http_address: host:port of the admin REST, health and metrics.
        admin_key_sha256: SHA-256 of the bootstrap admin key, in hex.
    """

    model_config = SettingsConfigDict(env_prefix="CONTROL_PLANE__")

    database_url: SecretStr
    grpc_address: Annotated[str, Field(pattern=_ADDRESS)]
    http_address: Annotated[str, Field(pattern=_ADDRESS)]
    admin_key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MigrateSettings(ServiceSettings):
    """What `control_plane.migrate` needs; the service's other settings may be there, unread."""

    model_config = SettingsConfigDict(env_prefix="CONTROL_PLANE__")

    database_url: SecretStr
    grpc_address: str = ""
    http_address: str = ""
    admin_key_sha256: str = ""
