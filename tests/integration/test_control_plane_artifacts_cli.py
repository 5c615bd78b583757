"""`sluice artifacts` and `sluice models publish` against a real control plane."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
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


async def test_from_directories_to_a_version(site, sluice) -> None:
    base, adapter, other = (site.home / name for name in ("base", "adapter", "other"))
    write_random_model(base, changes={"intermediate_size": 9000})
    write_random_adapter(adapter, base, rank=2, seed=1)
    write_random_adapter(other, base, rank=2, seed=2)
    begun = (await begin(site.admin, base)).json()
    await send(site.admin, begun, base, only=[begun["missing"][0]["sha256"]])
    pushed = json.loads(await sluice("artifacts", "push", base, "--json"))
    digest = digest_directory(base)
    assert (pushed["id"], pushed["state"], pushed["digest"]) == (begun["id"], "ready", digest)
    assert f"{digest} is ready (base," in await sluice("artifacts", "push", base)
    await site.plane.put(f"bases/{digest}", context_tokens_max=64)
    await site.plane.put("pools/main", base_digest=digest, engine="sim", replicas_wanted=0)
    await site.plane.put("models/tiny", base_digest=digest, pool_id="main")

    words = ("models", "publish", "support")
    made = await sluice(*words, "1", adapter, "--base-model", "tiny", "--promote", "--json")
    assert json.loads(made)[0]["id"] == "support@1"
    uri = f"file://{other}"
    assert "support@2" in await sluice(*words, "2", uri, "--base-model", "tiny")
    model = (await site.admin.get("/v1/models/support")).json()
    assert (model["release"], model["adapter_digest"]) == ("1", digest_directory(adapter))

    listed = json.loads(await sluice("artifacts", "list", "--json"))
    known = {digest, digest_directory(adapter), digest_directory(other)}
    assert {item["digest"] for item in listed} == known
    assert digest in await sluice("artifacts", "show", digest)
    assert f"is {digest}" in await sluice("artifacts", "verify", base, digest)
    (base / "config.json").write_text("{}")
    (base / "extra.md").write_text("")
    told = await sluice("artifacts", "verify", base, digest, status=1)
    assert told == "config.json differs\nextra.md is only here\n"
    assert "name" in await sluice("artifacts", "remove", digest, status=1)


async def test_refusals_are_told_in_full(site, sluice) -> None:
    write_random_model(site.home / "base")
    (site.home / "base" / "tokenizer.json").write_text("{}")
    (site.home / "base" / "run.py").write_text("")
    for words in (("push", site.home / "base"), ("import", f"file://{site.home}/base")):
        told = await sluice("artifacts", *words, status=1)
        assert "run.py does not belong into such an artifact: remove it" in told
        assert "tokenizer.json cannot be read" in told
    (site.home / "base" / "link").symlink_to("run.py")
    told = await sluice("artifacts", "push", site.home / "base", status=1)
    assert "link is a symbolic link" in told
    told = await sluice("artifacts", "import", "https://example.com/x", status=1)
    assert "nothing may be imported from host example.com:443" in told
    (site.home / "base" / "link").unlink()
    wrong = ("artifacts", "push", site.home / "base", "--signature", "x")
    assert "KEY=BASE64" in await sluice(*wrong, status=2)


async def test_without_a_store_the_fix_is_told(database_url, tmp_path, start_control_plane) -> None:
    write_random_model(tmp_path / "base")
    async with start_control_plane(database_url, tmp_path) as plane:
        answer = await begin(plane.admin, tmp_path / "base")
        assert answer.status_code == 503
        assert "set CONTROL_PLANE__ARTIFACT_STORE_URL" in answer.json()["detail"]
