"""Receivers of alerts, which are read from a file and validated at start-up."""

import ipaddress
import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from sluice.addresses import is_public

RECEIVERS_MAX = 50


class Receiver(BaseModel):
    """A receiver of notices.

    Attributes:
        name: Unique name, shown in the list of deliveries.
        kind: Kind of the receiver's protocol.
        url: URL of a webhook, of Alertmanager, or of an API compatible with PagerDuty. For e-mail,
            `smtp://HOST:PORT` (with STARTTLS if offered) or `smtps://HOST:PORT`.
        secret: Secret that signs a webhook's bodies, routing key of PagerDuty, or password of the
            e-mail server.
        user: User of an e-mail server with a login, whose password is `secret`.
        sender: Sender's address of e-mail.
        to: Recipients' addresses of e-mail.
        severity: Least severe alerts that are sent, from `P1` (only pages) to `P3` (all).
        is_internal: Whether the address may be loopback, private or link-local.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    kind: Literal["email", "slack", "webhook", "pagerduty", "alertmanager"]
    url: Annotated[str, Field(max_length=2000)] = ""
    secret: SecretStr = SecretStr("")
    user: str = ""
    sender: str = ""
    to: Annotated[tuple[str, ...], Field(max_length=50)] = ()
    severity: Literal["P1", "P2", "P3"] = "P2"
    is_internal: bool = False

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        schemes = ("smtp://", "smtps://") if self.kind == "email" else ("https://", "http://")
        needs_url = self.kind != "pagerduty" or bool(self.url)
        if needs_url and not self.url.startswith(schemes):
            raise ValueError(f"url: {self.kind} wants {' or '.join(schemes)}...")
        if self.kind == "email" and not (self.sender and self.to):
            raise ValueError("e-mail wants `sender` and `to`")
        if self.kind in ("webhook", "pagerduty") and not self.secret.get_secret_value():
            raise ValueError(f"{self.kind} wants `secret`")
        if any(set(address) & set("\r\n,") for address in (self.sender, *self.to)):
            raise ValueError("an address of e-mail holds a comma or the end of a line")
        return self

    @property
    def rank_max(self) -> int:
        """The rank of the least severe alerts that are sent."""
        return int(self.severity[1])


class ReceiversError(ValueError):
    """The file of receivers is not valid. The message names the place, and never a secret."""


def read_receivers(file: Path | None) -> tuple[Receiver, ...]:
    """Return the receivers in a JSON file, or no receivers if no file is configured.

    Raises:
        ReceiversError: The file cannot be read, or is not a list of receivers with unique names.
    """
    if file is None:
        return ()
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ReceiversError(f"{file}: {error}") from None
    if not isinstance(entries, list) or len(entries) > RECEIVERS_MAX:
        raise ReceiversError(f"{file}: want a list of at most {RECEIVERS_MAX} receivers")
    found: list[Receiver] = []
    for number, entry in enumerate(entries):
        try:
            found.append(Receiver.model_validate(entry))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in (number, *first["loc"]))
            raise ReceiversError(f"{file}: {where}: {first['msg']}") from None
    if len({one.name for one in found}) < len(found):
        raise ReceiversError(f"{file}: two receivers have one name")
    return tuple(found)


def refusal(address: str, *, is_internal: bool) -> str:
    """Return the reason why an IP address must not be called, or an empty text.

    The file may contain a mistake, and a name may resolve to any address. In both cases, no request
    may reach the platform's own network or the metadata service of a cloud.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    if ip.is_multicast or ip.is_unspecified:
        return f"{ip} is no address of a host"
    if is_internal or is_public(address):
        return ""
    return f"{ip} is an address of this network: allow it with `is_internal`"
