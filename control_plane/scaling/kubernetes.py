"""Sets the number of pods of a StatefulSet (its `scale` subresource) through the API server."""

import json
import ssl
from dataclasses import dataclass
from typing import Any

import aiohttp

from control_plane.alerts.sending import SendError, in_time, refused
from control_plane.scaling.actuators import Actuator
from control_plane.scaling.nodes import NODES_MAX, NodesAsk

_ANSWER_BYTES_MAX = 64 << 10
_TRIES = 3  # largest number of attempts if another client writes between the read and the write
_CONFLICT = 409
_HINTS = {
    401: "the API server refuses the token",
    403: "the role must allow get and patch of statefulsets/scale (components/node-scaling)",
    404: "is the name right, and the namespace?",
}


@dataclass(frozen=True, slots=True)
class _Scale:
    """A Scale of autoscaling/v1, with the resource version of its last write."""

    replicas: int
    version: str


async def set_scale(actuator: Actuator, ask: NodesAsk) -> tuple[int, int]:
    """Set the requested number of pods, and return the numbers before and after the write.

    Raises:
        SendError: The API server refused, or did not answer.
    """
    return await in_time(_set_scale(actuator, ask))


async def _set_scale(actuator: Actuator, ask: NodesAsk) -> tuple[int, int]:
    context = ssl.create_default_context(cafile=str(actuator.ca_file))
    token = actuator.token_file.read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    path = f"/apis/apps/v1/namespaces/{actuator.own_namespace}/statefulsets/{actuator.nodes}/scale"
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    async with aiohttp.ClientSession(
        actuator.api_url, connector=connector, headers=headers, trust_env=False
    ) as http:
        for attempt in range(_TRIES):
            try:
                found = await _call(http, "GET", path)
                wanted = ask.step(found.replicas)
                if wanted != found.replicas:
                    await _call(http, "PATCH", path, _patch(wanted, found.version))
            except _ConflictError as error:
                if attempt == _TRIES - 1:
                    raise SendError(f"{error}: something else writes it all the time") from None
            else:
                return found.replicas, wanted
    raise AssertionError("the last try returns or raises")


class _ConflictError(Exception):
    """Another client has written the object since it was read."""


def _patch(replicas: int, version: str) -> bytes:
    """Return a merge patch that the API server refuses after a write since `version`."""
    return json.dumps(
        {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
    ).encode()


async def _call(
    http: aiohttp.ClientSession, method: str, path: str, body: bytes | None = None
) -> _Scale:
    headers = {} if body is None else {"Content-Type": "application/merge-patch+json"}
    async with http.request(
        method, path, data=body, headers=headers, allow_redirects=False
    ) as answer:
        text = await _text(answer)
        if answer.status == _CONFLICT:
            raise _ConflictError(_message(text))
        if answer.status >= 300:
            hint = _HINTS.get(answer.status, "")
            said = f"{_message(text)[:120]}{'; ' if hint else ''}{hint}"
            raise refused(answer.status, said, answer.headers.get("Retry-After", ""))
    return _scale(text)


async def _text(answer: aiohttp.ClientResponse) -> str:
    """Return an answer's text, truncated to a bounded length."""
    parts: list[bytes] = []
    async for part in answer.content.iter_any():
        parts.append(part)
        if sum(map(len, parts)) > _ANSWER_BYTES_MAX:
            break
    return b"".join(parts)[:_ANSWER_BYTES_MAX].decode(errors="replace")


def _message(text: str) -> str:
    """Return the message of an API server's Status object, or any other text unchanged."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    said = found.get("message") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return said if isinstance(said, str) else text


def _scale(text: str) -> _Scale:
    try:
        found: Any = json.loads(text)
        kind, replicas = found["kind"], found["spec"].get("replicas", 0)
        version = found["metadata"]["resourceVersion"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SendError(f"the API server's answer is no Scale: {text[:120]!r}") from None
    if kind != "Scale" or not isinstance(replicas, int) or not 0 <= replicas <= NODES_MAX:
        raise SendError(f"the API server's answer is no Scale: {text[:120]!r}")
    return _Scale(replicas, str(version))
