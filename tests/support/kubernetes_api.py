"""A stand-in for Kubernetes' API server: the `scale` of StatefulSets, by HTTPS, as it speaks."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.own_certificate import write_certificate

TOKEN = "token-of-the-account"
_PATH = "/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}/scale"
_MERGE = "application/merge-patch+json"


class StandInApi:
    """StatefulSets by namespace and name, and what is done to those who ask.

    Attributes:
        replicas: Number of each set.
        allowed: Sets that the account may scale.
        writes: Numbers that were set, in order.
        rivals: Writes of others that come between reading and writing.
        hangs: Whether no request is answered.
        trouble: Status, reason, message and headers of each answer; None: it is answered.
    """

    def __init__(self) -> None:
        self.replicas: dict[tuple[str, str], int] = {}
        self.version = 100
        self.allowed: set[tuple[str, str]] = set()
        self.writes: list[int] = []
        self.rivals = 0
        self.hangs = False
        self.trouble: tuple[int, str, str, dict[str, str]] | None = None
        self.url = ""
        self.token_file = self.ca_file = Path()

    def add(self, name: str, replicas: int, namespace: str = "sluice") -> None:
        """Have a set that may be scaled."""
        self.replicas[namespace, name] = replicas
        self.allowed.add((namespace, name))

    def actuator(self, name: str, nodes_max: int = 10, **others: Any) -> dict[str, Any]:
        """Return an entry of the file of actuators."""
        return {
            "name": name,
            "kind": "kubernetes",
            "nodes": f"{name}-node",
            "nodes_max": nodes_max,
            "namespace": "sluice",
            "url": self.url,
            "token_file": str(self.token_file),
            "ca_file": str(self.ca_file),
            **others,
        }

    async def answer(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.trouble is not None:
            status, reason, message, headers = self.trouble
            return _status(status, reason, message, headers)
        key = (request.match_info["namespace"], request.match_info["name"])
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        if key not in self.allowed:
            message = f'statefulsets.apps "{key[1]}" is forbidden: User cannot do it'
            return _status(403, "Forbidden", message)
        if key not in self.replicas:
            return _status(404, "NotFound", f'statefulsets.apps "{key[1]}" not found')
        if request.method == "PATCH":
            return await self._patch(request, key)
        found = self._scale(key)
        if self.rivals:
            self.rivals -= 1
            self.version += 1
        return found

    async def _patch(self, request: web.Request, key: tuple[str, str]) -> web.Response:
        if request.content_type != _MERGE:
            return _status(415, "UnsupportedMediaType", f"{request.content_type} is not supported")
        patch = json.loads(await request.read())
        if patch.get("metadata", {}).get("resourceVersion", str(self.version)) != str(self.version):
            message = (
                f'Operation cannot be fulfilled on statefulsets.apps "{key[1]}": the object has'
                " been modified; please apply your changes to the latest version and try again"
            )
            return _status(409, "Conflict", message)
        self.replicas[key] = patch["spec"]["replicas"]
        self.writes.append(self.replicas[key])
        self.version += 1
        return self._scale(key)

    def _scale(self, key: tuple[str, str]) -> web.Response:
        namespace, name = key
        spec = {"replicas": self.replicas[key]} if self.replicas[key] else {}  # 0 is left out
        return web.json_response(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "resourceVersion": str(self.version),
                },
                "spec": spec,
                "status": {"replicas": self.replicas[key], "selector": f"sluice.dev/nodes={name}"},
            }
        )


def _status(
    status: int, reason: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": status,
    }
    return web.json_response(body, status=status, headers=headers)


@asynccontextmanager
async def kubernetes_api(home: Path) -> AsyncGenerator[StandInApi]:
    """Serve until the context ends; its certificate and a token lie in `home`."""
    found, app = StandInApi(), web.Application()
    app.router.add_route("*", _PATH, found.answer)
    cert, key = write_certificate(home)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    found.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    found.ca_file, found.token_file = cert, home / "token"
    found.token_file.write_text(f"{TOKEN}\n")
    yield found
    await runner.cleanup()
