"""The settings classes of all services by name, for the reference page and `sluice config`."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

import control_plane.settings
import gateway.settings
import replica.agent.settings
import router.settings
import sluice.certificates
import sluice.kafka
import sluice.shared_secret
import telemetry.settings
from sluice.settings import ServiceSettings

SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "gateway": gateway.settings.GatewaySettings,
    "router": router.settings.Settings,
    "agent": replica.agent.settings.AgentSettings,
    "control plane": control_plane.settings.Settings,
    "telemetry": telemetry.settings.Settings,
    "installation": sluice.shared_secret.InstallationSettings,
    "certificates": sluice.certificates.MtlsSettings,
    "kafka": sluice.kafka.KafkaSettings,
}
_TYPES = {str: "text", int: "integer", float: "number", bool: "boolean", Path: "path"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def descriptions(owner: type[ServiceSettings]) -> dict[str, str]:
    """Return the descriptions under `Attributes:` of a class and its bases, by field."""
    found: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        if not issubclass(cls, ServiceSettings):
            continue
        _, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \w)", "\n" + attributes):
            name, _, text = entry.strip().partition(":")
            found[name] = " ".join(text.split())
    return {name: text for name, text in found.items() if text}


def accepted(field: FieldInfo) -> str:
    """Return the type and the range of a setting."""
    kind: Any = field.annotation
    if type(None) in get_args(kind):  # the page shows a default of None as empty
        kind = next(choice for choice in get_args(kind) if choice is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" if choice else "empty" for choice in get_args(kind))
    bounds = [
        f"{sign} {getattr(rule, name):,}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    word = "text, secret" if kind is SecretStr else _TYPES[kind]
    return ", ".join([word, *bounds])
