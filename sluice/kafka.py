"""Security of the connections to brokers by TLS and SASL, the same for all clients."""

import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Annotated, Literal

from pydantic import AfterValidator, SecretStr
from pydantic_settings import SettingsConfigDict

from sluice.settings import ServiceSettings

_BROKER = re.compile(
    r"([a-z_]+://)?(?:\[[0-9a-f:.]+(?:%[^\s\]]+)?\]|[^\s:/;\[\]]+)(?::([0-9]{1,5}))?(?(1)(?:/\S*)?)",
    re.IGNORECASE,
)
_PORT = 9092  # librdkafka's port for addresses without a port


def _checked(brokers: str) -> str:
    """Return the brokers, or raise ValueError if librdkafka would refuse one of them."""
    named = [broker for part in brokers.split(",") if (broker := part.strip())]
    if not named or not all(map(_is_broker, named)):
        raise ValueError("want host:port, with commas between brokers, as in a:9092,b:9092")
    return brokers


def _is_broker(text: str) -> bool:
    with suppress(ValueError):
        IPv6Address(text)  # without brackets, an address has no port
        return True
    found = _BROKER.fullmatch(text)
    return found is not None and 0 < int(found[2] or _PORT) < 65536


Brokers = Annotated[str, AfterValidator(_checked)]


class KafkaSettings(ServiceSettings):
    """Security of the connections to brokers, which are plain without settings.

    Attributes:
        security_protocol: Protocol of the connections, by Kafka's name.
        ssl_ca_location: PEM file of the CA that signs brokers' certificates, or empty for the
            system's CAs.
        ssl_certificate_location: PEM file of the client certificate, for brokers that require one.
        ssl_key_location: PEM file of the client certificate's key.
        sasl_mechanism: Login mechanism of `sasl_plaintext` and `sasl_ssl`.
        sasl_username: User of the SASL login.
        sasl_password: Password of the SASL login.
    """

    model_config = SettingsConfigDict(env_prefix="KAFKA__")

    security_protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    ssl_ca_location: str = ""
    ssl_certificate_location: str = ""
    ssl_key_location: str = ""
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    sasl_username: str = ""
    sasl_password: SecretStr = SecretStr("")

    def options(self) -> dict[str, str]:
        """Return the settings by librdkafka's names. librdkafka also verifies brokers' names."""
        values = self.model_dump(exclude_defaults=True)
        return {
            name.replace("_", "."): value.get_secret_value() if name == "sasl_password" else value
            for name, value in values.items()
        }


def security() -> dict[str, str]:
    """Return the options of the environment. Invalid options end the process."""
    return KafkaSettings.from_environment().options()


def problems(brokers: str) -> Iterator[str]:
    """Yield the problems of these brokers and this environment, line by line."""
    from confluent_kafka import KafkaException, Producer  # many callers need only the settings

    settings, wrong = KafkaSettings.check()
    yield from wrong
    if settings is None or wrong:
        return
    try:
        Producer({"bootstrap.servers": brokers, "log_level": 0, **settings.options()})
    except KafkaException as error:
        text = error.args[0].str().removeprefix("Failed to create producer: ")
        yield f"KAFKA__*: {text}; see docs/config.md for what belongs together"
