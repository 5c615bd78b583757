"""Reads the file of actuators (systems that add and remove nodes), and validates it at start-up."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from control_plane.scaling.nodes import NODES_MAX

ACTUATORS_MAX = 50
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_API_URL = "https://kubernetes.default.svc"
_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"

_Label = Annotated[str, Field(pattern=_LABEL)]
_Count = Annotated[int, Field(ge=0, le=NODES_MAX)]


class Actuator(BaseModel):
    """A system that adds and removes nodes.

    Attributes:
        name: Name by which pools choose the actuator.
        kind: `kubernetes` scales a StatefulSet whose pods are nodes. `webhook` receives signed HTTP
            requests.
        nodes: Prefix of its nodes' ids, before a `-`. In Kubernetes the prefix is the name of the
            StatefulSet.
        nodes_min: Least number of nodes.
        nodes_max: Greatest number of nodes.
        namespace: Namespace of the StatefulSet. If it is empty, the namespace of the control
            plane's pod is used.
        url: URL of the webhook, or of an API server of Kubernetes outside this cluster.
        token_file: File of the token for the API server. The file is read for each call, because
            kubelets renew the token.
        ca_file: File of the CA certificates that verify the API server.
        secret: Key that signs the bodies of a webhook.
        is_internal: Whether a webhook may have an address inside this network.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Label
    kind: Literal["kubernetes", "webhook"]
    nodes: _Label
    nodes_min: _Count = 0
    nodes_max: _Count
    namespace: Annotated[str, Field(pattern=f"^$|{_LABEL}")] = ""
    url: Annotated[str, Field(max_length=2000)] = ""
    token_file: Path = _ACCOUNT / "token"
    ca_file: Path = _ACCOUNT / "ca.crt"
    secret: SecretStr = SecretStr("")
    is_internal: bool = False

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.nodes_min > self.nodes_max:
            raise ValueError(f"nodes_min {self.nodes_min} is above nodes_max {self.nodes_max}")
        if self.kind == "kubernetes":
            if not self.api_url.startswith("https://"):
                raise ValueError("url: the API server wants https://...")
        elif not self.url.startswith(("https://", "http://")):
            raise ValueError("url: a webhook wants https:// or http://...")
        elif not self.secret.get_secret_value():
            raise ValueError("a webhook wants `secret`")
        return self

    @property
    def api_url(self) -> str:
        """URL of Kubernetes' API server."""
        return (self.url or _API_URL).rstrip("/")

    @property
    def own_namespace(self) -> str:
        """Namespace of the StatefulSet.

        Raises:
            OSError: The namespace is not configured, and this process runs in no pod.
        """
        return self.namespace or (_ACCOUNT / "namespace").read_text().strip()

    def owns(self, node_id: str) -> bool:
        """Return whether a node belongs to the actuator, by the prefix of the node's id."""
        prefix, dash, rest = node_id.rpartition("-")
        if self.kind == "kubernetes":
            is_number = rest.isascii() and rest.isdigit() and len(rest) < 6
            return prefix == self.nodes and is_number
        return bool(dash) and node_id.startswith(f"{self.nodes}-")


class ActuatorsError(ValueError):
    """The file of actuators is unusable.

    The message names the invalid field, and never a secret.
    """


def read_actuators(file: Path | None) -> dict[str, Actuator]:
    """Return the actuators of a JSON file by name. Without a configured file there are none.

    Raises:
        ActuatorsError: The file is unreadable, or is no list of actuators with unique names.
    """
    if file is None:
        return {}
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ActuatorsError(f"{file}: {error}") from None
    if not isinstance(entries, list) or len(entries) > ACTUATORS_MAX:
        raise ActuatorsError(f"{file}: want a list of at most {ACTUATORS_MAX} actuators")
    found: list[Actuator] = []
    for number, entry in enumerate(entries):
        try:
            found.append(Actuator.model_validate(entry))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in (number, *first["loc"]))
            raise ActuatorsError(f"{file}: {where}: {first['msg']}") from None
    for what in ("name", "nodes"):
        if len({getattr(one, what) for one in found}) < len(found):
            raise ActuatorsError(f"{file}: two actuators have the same `{what}`")
    return {one.name: one for one in found}


def owners(node_ids: Iterable[str], actuators: Mapping[str, Actuator]) -> dict[str, str]:
    """Return the actuator of each node that has an actuator.

    If several actuators match, the longest prefix wins.
    """
    closest = sorted(actuators.values(), key=lambda one: -len(one.nodes))
    found: dict[str, str] = {}
    for node_id in node_ids:
        name = next((one.name for one in closest if one.owns(node_id)), None)
        if name is not None:
            found[node_id] = name
    return found
