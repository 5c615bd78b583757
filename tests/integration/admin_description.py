"""Holds answers of the admin REST against its description: a hook for clients in tests."""

import json
import re
from typing import Any

import httpx
import jsonschema_rs

_DIGIT = "2"  # first of a status of success


class Described:
    """The description of one software: the same for all control planes of a run."""

    def __init__(self) -> None:
        self._document: dict[str, Any] = {}
        self._templates: list[tuple[re.Pattern[str], str]] = []
        self._validators: dict[tuple[str, str, str], Any] = {}

    async def check(self, response: httpx.Response) -> None:
        """Fail if the answer is none that the description tells of."""
        path, method = response.request.url.path, response.request.method.lower()
        if (
            method == "head"
            or not path.startswith("/v1/")
            or not str(response.status_code).startswith(_DIGIT)
        ):
            return
        await response.aread()
        if not self._document:
            await self._read(response.request)
        template = next(
            (t for pattern, t in self._templates if self._fits(pattern, t, path, method)), None
        )
        assert template is not None, f"{method} {path} is not described"
        status = str(response.status_code)
        described = self._document["paths"][template][method]["responses"]
        assert status in described, f"{method} {template}: {status} is not described"
        content = described[status].get("content")
        if content is None:
            assert not response.content, f"{method} {template}: {status} has no body"
            return
        if response.headers["content-type"].startswith("application/json"):
            schema = content["application/json"]["schema"]
            self._hold(method, template, status, schema, json.loads(response.content))

    def _fits(self, pattern: re.Pattern[str], template: str, path: str, method: str) -> bool:
        return bool(pattern.fullmatch(path)) and method in self._document["paths"][template]

    def _hold(self, method: str, template: str, status: str, schema: Any, body: Any) -> None:
        key = (method, template, status)
        if key not in self._validators:
            whole = schema | {"components": self._document["components"]}
            self._validators[key] = jsonschema_rs.validator_for(whole)
        wrong = [f"{'/'.join(map(str, it.instance_path))}: {it.message}" for it in self._validators[key].iter_errors(body)]  # fmt: skip
        assert not wrong, f"{method} {template}: {wrong[:5]}"
        item = schema.get("properties", {}).get("data", {}).get("items", schema)
        rows = body["data"] if item is not schema else [body]
        known = item.get("properties", {}).keys()
        more = {name for row in rows for name in row} - known if known else set()
        assert not more, f"{method} {template}: {more} are not described"

    async def _read(self, request: httpx.Request) -> None:
        async with httpx.AsyncClient() as client:
            self._document = (
                await client.get(request.url.copy_with(raw_path=b"/openapi.json"))
            ).json()
        # Names may hold slashes: the most words first.
        for template in sorted(
            self._document["paths"], key=lambda it: -len(re.sub(r"{\w+}", "", it))
        ):
            pattern = re.compile(re.sub(r"{\w+}", "(.+)", template))
            self._templates.append((pattern, template))


HOOKS = {"response": [Described().check]}
