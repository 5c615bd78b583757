"""`sluice adapters` and `sluice artifacts pull, gc, pin, ...` against a real control plane."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from cli.app import app
from sluice.artifacts import digest_directory
from tests.integration.artifact_site import Site, begin, send
from tests.integration.conftest import ADMIN_KEY
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

Sluice = Callable[..., Awaitable[str]]


@pytest.fixture
def sluice(site: Site, monkeypatch: pytest.MonkeyPatch) -> Sluice:
    """Run a command; return what it says, errors included."""
    monkeypatch.setenv("SLUICE_ADMIN_URL", str(site.admin.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)

    async def run(*words: object, status: int = 0) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, [str(word) for word in words])
        assert done.exit_code == status, (words, done.output)
        return done.output

    return run


async def as_json(sluice: Sluice, *words: object) -> Any:
    return json.loads(await sluice(*words, "--json"))


async def tiny(site: Site, sluice: Sluice, directory: Path, **changes: int) -> str:
    """Push a base and let a model `tiny` stand for it; return its digest."""
    write_random_model(directory, changes=changes)
    digest = (await as_json(sluice, "artifacts", "push", directory))["digest"]
    await site.plane.put(f"bases/{digest}", context_tokens_max=64, name="tiny")
    await site.plane.put("pools/main", base_digest=digest, engine="sim", replicas_wanted=0)
    await site.plane.put("models/tiny", base_digest=digest, pool_id="main")
    return digest


async def test_an_adapter_from_publish_to_remove(site, sluice, tmp_path) -> None:
    base = await tiny(site, sluice, tmp_path / "base")
    for name, rank in (("one", 2), ("two", 4)):
        write_random_adapter(tmp_path / name, tmp_path / "base", rank=rank, seed=rank)
    publish, on = ("adapters", "publish", "voice"), ("--base-model", "tiny")
    await sluice(*publish, "1", tmp_path / "one", *on, "--promote")
    await sluice(*publish, "2", tmp_path / "two", *on)
    digests = {name: digest_directory(tmp_path / name) for name in ("one", "two")}
    rows = {row["digest"]: row for row in await as_json(sluice, "adapters", "list", "--ranks")}
    assert set(rows) == set(digests.values())
    one, two = (rows[digests[name]] for name in ("one", "two"))
    assert (one["rank"], two["rank"], one["promoted"], two["promoted"]) == (2, 4, ["voice"], [])
    assert one["base_digests"] == [base]
    table = await sluice("adapters", "list", "--model", "voice", "--tenant", "nobody")
    assert "voice@1" not in table
    table = await sluice("adapters", "list", "--model", "voice", "--base", base)
    for told in (digests["one"][:12], base[:12], "voice@2", "everybody", "kB"):
        assert told in table
    for name in ("voice", "voice@1", digests["one"], digests["one"][:12]):
        shown = await as_json(sluice, "adapters", "show", name)
        assert (shown["digest"], shown["rank"], shown["nodes"]) == (digests["one"], 2, [])
    assert "target_modules" in await sluice("adapters", "show", "voice@2")

    show = ("adapters", "show")
    assert "has no adapter" in await sluice(*show, "tiny", status=1)
    assert "see: sluice adapters list" in await sluice(*show, "00000", status=1)
    assert "there is no model nothing" in await sluice(*show, "nothing", status=1)
    assert "there is no adapter" in await sluice(*show, "00" * 32, status=1)
    remove = ("adapters", "remove")
    assert "serves this release" in await sluice(*remove, "voice@1", status=1)
    assert "delete them first" in await sluice(*remove, digests["two"], status=1)
    assert "removed voice@2" in await sluice(*remove, "voice@2")
    assert "removed" in await sluice(*remove, digests["two"][:8])
    assert [row["digest"] for row in await as_json(sluice, "adapters", "list")] == [digests["one"]]


async def test_a_pulled_artifact_equals_the_pushed_one(site, sluice, tmp_path) -> None:
    digest = await tiny(site, sluice, tmp_path / "base", intermediate_size=9000)
    pulled = tmp_path / "pulled"
    assert f"is {digest}" in await sluice("artifacts", "pull", digest, pulled)
    assert digest_directory(pulled) == digest
    assert f"is {digest}" in await sluice("artifacts", "pull", digest, pulled), "again is fine"
    (pulled / "config.json").write_text("{}")
    told = await sluice("artifacts", "pull", digest, pulled, status=1)
    assert "name a directory that is not there yet" in told
    assert "404" in await sluice("artifacts", "pull", "00" * 32, tmp_path / "none", status=1)
    assert "64" in await sluice("artifacts", "pull", "abc", tmp_path / "none", status=1)

    # What a download that broke has left is used, and what is wrong in it is fetched again.
    again = tmp_path / "again"
    part = tmp_path / f"again.{digest[:12]}.part"
    (tmp_path / "base").rename(part)
    weights = part / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 5)
        file.write(b"\1\2\3")
    found = await as_json(sluice, "artifacts", "pull", digest, again)
    assert (found["digest"], found["directory"]) == (digest, str(again))
    assert digest_directory(again) == digest
    assert not part.exists()
    (tmp_path / "file").write_text("")
    wrong = tmp_path / "file" / "below"
    assert "file" in await sluice("artifacts", "pull", digest, wrong, status=1)


async def test_garbage_is_listed_with_the_reasons_of_the_rest(site, sluice, tmp_path) -> None:
    base = await tiny(site, sluice, tmp_path / "base")
    digests: dict[str, str] = {}
    for seed, name in enumerate(("spare", "pinned")):
        write_random_adapter(tmp_path / name, tmp_path / "base", rank=2, seed=seed)
        pushed = await as_json(sluice, "artifacts", "push", tmp_path / name, "--base", base)
        digests[name] = pushed["digest"]
    assert "True" in await sluice("artifacts", "pin", digests["pinned"])
    told = await sluice("artifacts", "gc")
    assert digests["spare"] in told
    assert digests["pinned"] not in told
    assert "1 artifacts are unused" in told
    assert "1 pinned" in told
    assert "model tiny" in await sluice("artifacts", "gc", "--all")
    swept = await as_json(sluice, "artifacts", "gc", "--run")
    assert swept["sweep"]["state"] in {"done", "busy", "running"}
    states = {row["digest"]: row["state"] for row in swept["artifacts"]}
    assert states[base] == states[digests["pinned"]] == "kept"
    await sluice("artifacts", "unpin", digests["pinned"])
    assert "2 artifacts are unused" in await sluice("artifacts", "gc", "--run")


async def test_uploads_and_signing_keys(site, sluice, tmp_path) -> None:
    write_random_model(tmp_path / "base")
    upload = (await begin(site.admin, tmp_path / "base")).json()
    assert upload["id"] in await sluice("artifacts", "uploads", "list")
    shown = await sluice("artifacts", "uploads", "show", upload["id"])
    assert f"{len(upload['missing'])} chunks, " in shown
    await send(site.admin, upload, tmp_path / "base")
    assert (await as_json(sluice, "artifacts", "uploads", "show", upload["id"]))["missing"] == []

    raw = (serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    public = base64.b64encode(Ed25519PrivateKey.generate().public_key().public_bytes(*raw)).decode()
    keys = ("artifacts", "signing-keys")
    (made,) = await as_json(sluice, *keys, "set", "release", public)
    assert (made["public_key"], made["is_disabled"]) == (public, False)
    assert await as_json(sluice, *keys, "show", "release") == made
    assert "True" in await sluice(*keys, "set", "release", public, "--disable")
    assert "release" in await sluice(*keys, "list")
    assert "an Ed25519 public key is expected" in await sluice(*keys, "set", "x", "y", status=1)
    assert "deleted signing key release" in await sluice(*keys, "delete", "release")
