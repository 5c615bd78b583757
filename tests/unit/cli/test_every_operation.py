"""Every operation of the admin REST has a command, and every command says what it takes.

Each command is run once against a transport that knows the OpenAPI document alone: a request that
is not in it fails, and so does an operation that no command has asked for.
"""

import json
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import click
import httpx
import pytest
import typer
from typer.testing import CliRunner

from cli.app import app
from control_plane.app import admin_routes
from control_plane.artifacts.routes import ArtifactRoutes
from control_plane.http.describe import SCHEMAS
from control_plane.http.openapi import document
from sluice.manifests import manifest_of_directory

DOCUMENT = document([*ArtifactRoutes(Mock(), Mock()).routes(), *admin_routes(Mock())], "1")
D = "ab" * 32
# What these commands ask is not the admin REST, or nothing.
ELSEWHERE = {
    *("certificates", "compose", "config"),
    *("up", "down", "status", "logs", "version", "backup", "restore"),
    *("requests", "usage", "cost", "explain", "trace", "top", "doctor"),
    *("auto learn", "auto evaluate", "auto judge"),  # of the trace store, and a gateway
}
# By command, what it is given; several lines where it takes different ways.
COMMANDS = """
scaling status
scaling set p --max 5
scaling unset p
scaling explain p
scaling plan p --dry-run
scaling pin p 3 --for 2h
scaling pause p
scaling resume p
scaling history p
scaling actuators
scaling replay p --max 4
scaling replay p --max 4 --trace {trace}
scaling day p
scaling budget --accelerators 8
tenants list
tenants show t
tenants create t --tier standard
tenants update t --rpm 5 --server-urls --gather-ms 50 --retention-hours 24
tenants delete t
tenants pin t m 1
tenants unpin t m
tenants budget set t b --tokens 5
tenants budget show
tenants budget show t --state soft
tenants budget remove t b
tenants guard set t g --file {plan} --model m --key k
tenants guard promote g
tenants guard stop g
tenants guard show
tenants guard show --json
tenants guard remove g
tools set x --tenant t --url https://x.example.com --parameters {plan} --secret-header A=PATH
tools list
tools show x
tools remove x
auto set t --model m=0.1,0.4,0.05 --published m=llama-3.1-8b-instruct --quality-of m=0.5 --price-max 1
auto set t --quality-min 0.5 --second-price 1 --miss-price 1 --explored 2 --queue-from 5
auto show
auto show --json
auto pin t m
auto unpin t
auto use t --table {table}
auto remove t
tenants texts set t --on --percent 5 --days 3 --redact email --word falcon
tenants texts show
tenants texts remove t
tenants texts read t r
tenants texts delete t --yes
tenants content show t
tenants content rotate t
tenants content erase t --yes
keys list t
keys show t k
keys create t --expires 1d
keys update t k --rpm 5 --interval-ms 100
keys rotate t k
keys revoke t k
tiers list
tiers show s
tiers create s --rpm 5
tiers update s --rpm 5
tiers delete s
models list
models show m
models show m@1
models create m --base {D} --pool p
models update m --pool p
models delete m
models forget m@1
models releases m
models publish m 1 sha256:{D} --base-model tiny
models publish m 1 sha256:{D} --base-model tiny --staged --plan {plan}
models alias list
models alias show a
models alias set a m
models alias remove a
models warm list
models warm show m
models warm set m --file {plan}
models warm remove m
models pools list
models pools show m
models pools set m p=2 q=1,3 --other-base r=1
models pools remove m
models base list
models base show {D}
models base set {D} --context-tokens-max 64
models base delete {D}
adapters list --model m --base {D} --tenant t
adapters show {D}
adapters publish m 1 sha256:{D} --base-model tiny
adapters remove m@1
artifacts list
artifacts show {D}
artifacts push {directory}
artifacts import file:///x
artifacts verify {directory} {digest}
artifacts remove {D} --tenant t
artifacts pull {digest} {target}
artifacts pin {D}
artifacts unpin {D}
artifacts nodes {D}
artifacts gc --run
artifacts uploads list
artifacts uploads show u
artifacts uploads cancel u
artifacts signing-keys list
artifacts signing-keys show k
artifacts signing-keys set k AAAA
artifacts signing-keys delete k
rollouts start m 1
rollouts list --model m --phase done
rollouts show r
rollouts events r
rollouts watch r
rollouts launch r
rollouts pause r
rollouts resume r
rollouts abort r
rollouts promote r
rollouts show m
rollback m
rollback m --to 1
rollouts plan m
rollouts plan m --default
rollouts plan m --set {plan}
fleet pools
fleet cells
fleet replicas
fleet replicas --pool p --node n
fleet routers
fleet ejections
fleet quarantines
fleet quarantine q
fleet release q --reason x
fleet pool show p
fleet pool create p --base {D} --engine sim
fleet pool update p --replicas 2
fleet pool delete p
fleet hours
fleet nodes list
fleet nodes show n
fleet nodes cordon n --reason x
fleet nodes uncordon n
fleet nodes drain n
fleet nodes lift n c@1
fleet nodes forget n
alerts list --firing
alerts show a
alerts acknowledge a --note mine
alerts silence alertname=X --for 2h --reason work
alerts silences
alerts unsilence s
alerts told
alerts try --severity P3
incidents list --open
incidents show i
incidents note i found
incidents close i done
golden add m --prompt hello
golden list
golden list m
golden show g
golden remove g
golden results --pool p
golden forget p
admin-keys list
admin-keys show k
admin-keys create viewer
admin-keys update k --name x
admin-keys rotate k
admin-keys revoke k
audit --actor a --kind k --object o --since 1h
"""
# What fields are where the document says no more than that there are some.
_NUMBERS = {
    0: "expires_at_unix_ms stage mirrored_percent share_percent sample control_sample chunks replicas file_count",
    1: "size_bytes watched_s watched_needed_s stage_left_s sample_needed stages used age_s stop_delay_s",
}
_LISTS = "gates missing accelerator_facts needed_by noticed needed retired removed tenant_ids"
_OBJECTS = "limits fallbacks roles needs engine_options model_limits before after"
VALUES: dict[str, Any] = {
    **{name: value for value, names in _NUMBERS.items() for name in names.split()},
    **{name: [] for name in (*_LISTS.split(), "base_digests")},
    **{name: {} for name in _OBJECTS.split()},
    **dict.fromkeys(("is_draining", "is_uploaded", "is_public"), False),
    "pins": {"m": "1"},
    "state": "ready",
    "phase": "done",
    "ended_at": "2030-01-01T00:00:00",
    "plan": {"stages": [], "gates": []},
}
# What is answered besides, by how operations end.
REST: dict[str, Any] = {
    "_rotate": {"replaces": {"id": "k", "expires_at_unix_ms": 0}},
    "_release": {"is_serving_again": True},
}


class Server:
    """Answers what the document describes, and notes which operations were asked for."""

    def __init__(self, manifest: dict[str, Any], chunks: dict[str, bytes]) -> None:
        self.manifest, self.chunks = manifest, chunks
        self.asked: set[str] = set()
        self.lines: list[list[str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/tokenize":  # the gateway's
            return httpx.Response(200, json={"tokens": [1, 2]})
        operation = find(request.method, path)
        name = operation["operationId"]
        self.asked.add(name)
        known = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
        assert set(request.url.params) <= known, (
            f"{name} takes no {set(request.url.params) - known}"
        )
        if "requestBody" in operation:
            self.check(operation, json.loads(request.content))
        headers = {"ETag": '"x"'}
        if name == "get_artifacts_manifest":
            return httpx.Response(200, json=self.manifest, headers=headers)
        if name == "get_artifacts_chunks":
            return httpx.Response(200, content=self.chunks[path.rpartition("/")[2]])
        status, told = next(iter(operation["responses"].items()))
        if "content" not in told:
            return httpx.Response(int(status))
        shape = told["content"]["application/json"]["schema"]
        body = instance("", shape)
        body |= REST.get(name[name.rindex("_") :], {})
        if name == "post_artifacts_uploads":
            found = self.chunks.items()
            body["missing"] = [{"sha256": sha256, "size_bytes": len(one)} for sha256, one in found]
        if name == "put_models_versions":
            body.pop("state", None)
        return httpx.Response(int(status), json=body, headers=headers)

    @staticmethod
    def check(operation: dict[str, Any], body: dict[str, Any]) -> None:
        shape = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
        name, known = operation["operationId"], shape["properties"].keys()
        assert body.keys() <= known, f"{name} takes no {body.keys() - known}"
        assert set(shape.get("required", ())) <= body.keys(), f"{name} needs more than {body}"


def find(method: str, path: str) -> dict[str, Any]:
    """Return the operation of a request; of paths that fit the one with the most fixed words."""
    fitting: list[tuple[int, dict[str, Any]]] = []
    for template, operations in DOCUMENT["paths"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", template)
        if re.fullmatch(pattern, path) and method.lower() in operations:
            fitting.append((-template.count("{"), operations[method.lower()]))
    assert fitting, f"{method} {path} is not in the document"
    return max(fitting, key=lambda one: one[0])[1]


def resolved(shape: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in shape:
        return DOCUMENT["components"]["schemas"][shape["$ref"].removeprefix(SCHEMAS)]
    return shape


def instance(name: str, shape: dict[str, Any]) -> Any:
    """Return a value of a schema."""
    if name in VALUES:
        return VALUES[name]
    shape = resolved(shape)
    match shape.get("type"):
        case "object" if "properties" in shape:
            inner = shape["properties"]
            return {key: instance(key, part) for key, part in inner.items()}
        case "object":
            return {}
        case "array":
            return [instance("", shape["items"])] if name == "data" else []
        case "boolean":
            return False
        case "integer" | "number":
            return 1
        case "string" if shape.get("format") == "date-time":
            return "2026-11-28T00:00:00+00:00"
        case _:
            return "x"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Server:
    directory = tmp_path_factory.mktemp("reach") / "artifact"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 2}')
    manifest = manifest_of_directory(directory)
    content = (directory / "adapter_config.json").read_bytes()
    made = Server(manifest.document(), {manifest.files[0].sha256: content})
    plan = directory.with_name("plan.json")
    plan.write_text("{}")
    words = {"directory": directory, "target": directory.with_name("pulled"), "plan": plan}
    table = directory.with_name("table.json")
    table.write_text('{"scheme": 1, "cells": []}')
    trace = directory.with_name("trace.jsonl")
    trace.write_text('{"timestamp": 1, "input_length": 2, "output_length": 3}')
    words |= {"trace": trace, "table": table, "D": D, "digest": manifest.digest}
    made.lines = [line.format(**words).split() for line in COMMANDS.strip().splitlines()]
    return made


def leaves(command: click.Command, name: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield all commands with their names."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(name), command
        return
    for word, one in inner.items():
        yield from leaves(one, (*name, word))


COMMAND_LINES = dict(leaves(typer.main.get_command(app)))
ADMIN = [it for it in COMMAND_LINES if it.split()[0] not in ELSEWHERE and it not in ELSEWHERE]


def test_every_operation_has_a_command(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class Client(httpx.AsyncClient):
        def __init__(self, **options: Any) -> None:
            options |= {"transport": httpx.MockTransport(server)}
            super().__init__(**options)

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    for name in ("SLUICE_ADMIN_URL", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("SLUICE_ADMIN_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "key")
    run = CliRunner().invoke
    for words in server.lines:
        done = run(app, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    operations = {
        operation["operationId"]
        for path in DOCUMENT["paths"].values()
        for method, operation in path.items()
        if method != "parameters"
    }
    assert operations - server.asked == set(), "give each a command, and its line above"


def test_a_manifest_is_described_with_its_files() -> None:
    body = DOCUMENT["paths"]["/v1/artifacts/uploads"]["post"]["requestBody"]
    begin = resolved(body["content"]["application/json"]["schema"])
    manifest = resolved(begin["properties"]["manifest"])
    (file,) = (resolved(it["items"]) for it in manifest["properties"].values() if "items" in it)
    assert {"name", "size_bytes", "sha256", "chunks"} <= file["properties"].keys()


def test_requests_are_asked_for_by_their_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[httpx.URL] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        return httpx.Response(200, json={"data": []})

    class Client(httpx.AsyncClient):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | {"transport": httpx.MockTransport(answer)})

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    monkeypatch.setenv("SLUICE_TELEMETRY_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "key")
    words = "requests --tenant t --key k --model m --status 5xx --since 2030-12-31T12:00:00Z -n 5"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    (url,) = asked
    wanted = {"tenant": "t", "key": "k", "model": "m", "status": "5xx", "limit": "5"}
    assert dict(url.params) == wanted | {"since": "2030-12-31T12:00:00+00:00"}


def test_every_command_is_tried(server: Server) -> None:
    tried = {" ".join(words) + " " for words in server.lines}
    untried = [name for name in ADMIN if not any(line.startswith(f"{name} ") for line in tried)]
    assert untried == []


@pytest.mark.parametrize("name", ADMIN)
def test_help_names_the_purpose_and_arguments_of_a_command(name: str) -> None:
    command = COMMAND_LINES[name]
    assert command.help, "has no purpose"
    silent = [p.name for p in command.params if not getattr(p, "help", "")]
    assert silent == []


@pytest.mark.parametrize("name", [n for n in ADMIN if re.search(r"list|show|s$|audit|gc", n)])
def test_every_output_exists_for_programs_too(name: str) -> None:
    assert "--json" in [option for p in COMMAND_LINES[name].params for option in p.opts]
