"""Versions of models: an adapter becomes a release, and the model stands for it when promoted."""

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from cli.app import app
from sluice.artifacts import digest_directory
from tests.integration.artifact_site import Site, push
from tests.integration.conftest import ADMIN_KEY
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def site(site: Site) -> Site:
    """With a base model `tiny` that everybody may use."""
    write_random_model(site.home / "base")
    digest = (await push(site.admin, site.home / "base")).json()["digest"]
    await site.plane.put(f"bases/{digest}", context_tokens_max=64)
    await site.plane.put("pools/main", base_digest=digest, engine="sim", replicas_wanted=0)
    await site.plane.put("models/tiny", base_digest=digest, pool_id="main")
    return site


def adapter(site: Site, seed: int, rank: int = 2) -> Path:
    directory = site.home / f"adapter{seed}"
    write_random_adapter(directory, site.home / "base", rank=rank, seed=seed)
    return directory


async def test_a_publisher_publishes_promotes_and_goes_back(site) -> None:
    acme = await site.publisher("acme")
    base = digest_directory(site.home / "base")
    one, two = adapter(site, 1), adapter(site, 2)
    first, second = digest_directory(one), digest_directory(two)
    path = "/v1/models/acme/support/versions"
    body = {"artifact_uri": f"file://{one}", "base_model": "tiny", "promote_to": "100%"}
    made = await acme.put(f"{path}/1", json=body, headers={"Idempotency-Key": "k1"})
    assert made.status_code == 201, made.text
    assert made.json() == {
        "id": "acme/support@1",
        "model_id": "acme/support",
        "version": "1",
        "adapter_digest": first,
        "base_digest": base,
        "is_promoted": True,
        "rollout_id": "",
    }
    replayed = await acme.put(f"{path}/1", json=body, headers={"Idempotency-Key": "k1"})
    assert (replayed.status_code, replayed.json()) == (201, made.json())
    model = (await acme.get("/v1/models/acme/support")).json()
    assert (model["adapter_digest"], model["release"]) == (first, "1")
    assert (model["owner_tenant_id"], model["pool_id"]) == ("acme", "main")

    assert (await push(acme, two, base)).is_success
    body = {"artifact_uri": f"sha256:{second}", "base_model": "tiny"}
    assert (await acme.put(f"{path}/2", json=body)).status_code == 201
    assert (await acme.get("/v1/models/acme/support")).json() == model, "not promoted"
    listed = (await acme.get("/v1/releases?model_id=acme/support")).json()["data"]
    assert {r["id"]: r["adapter_digest"] for r in listed} == {
        "acme/support@1": first,
        "acme/support@2": second,
    }
    promoted = await acme.put(f"{path}/2", json=body | {"promote_to": "production"})
    assert (promoted.status_code, promoted.json()["is_promoted"]) == (200, True)
    assert (await acme.get("/v1/models/acme/support")).json()["adapter_digest"] == second
    back = await acme.put(
        f"{path}/1",
        json={"artifact_uri": f"sha256:{first}", "base_model": "tiny", "promote_to": "stable"},
    )
    assert back.status_code == 200, back.text
    gone_back = (await acme.get("/v1/models/acme/support")).json()
    assert gone_back == model | {"previous_release": "2"}
    audit = (await site.admin.get("/v1/audit?kind=versions")).json()["data"]
    assert [row["action"] for row in audit] == ["promote", "promote", "publish", "promote"]

    staged = await acme.put(f"{path}/2", json=body | {"promote_to": "staged"})
    assert (staged.status_code, staged.json()["is_promoted"]) == (200, False)
    rollout = (await acme.get(f"/v1/rollouts/{staged.json()['rollout_id']}")).json()
    plan = {"stages": [{"share_percent": 5}, {"share_percent": 100}]}
    refused = await acme.put(f"{path}/3", json=body | {"promote_to": "stable", "plan": plan})
    assert "a plan is of a rollout" in refused.json()["detail"]
    assert (rollout["control"], rollout["canary"], rollout["phase"]) == ("1", "2", "running")
    assert rollout["owner_tenant_id"] == "acme"
    refused = await acme.put(f"{path}/2", json=body | {"promote_to": "100%"})
    assert (refused.status_code, rollout["id"] in refused.text) == (409, True)


async def test_one_file_of_weights_is_an_adapter_with_the_configuration_beside_it(site) -> None:
    acme = await site.publisher("acme")
    directory = adapter(site, 6)
    digest = digest_directory(directory)
    weights = (directory / "adapter_model.safetensors").rename(directory / "v3.safetensors")
    (directory / "optimizer.pt").write_bytes(b"not for serving")
    body = {"artifact_uri": f"file://{weights}", "base_model": "tiny", "promote_to": "stable"}
    made = await acme.put("/v1/models/acme/single/versions/3", json=body)
    assert made.status_code == 201, made.text
    assert made.json()["adapter_digest"] == digest, "as from a directory with these two files"
    assert made.json()["is_promoted"]

    (directory / "adapter_config.json").unlink()
    refused = await acme.put("/v1/models/acme/single/versions/4", json=body)
    assert refused.status_code == 400, refused.text
    assert "keep adapter_config.json beside v3.safetensors" in refused.json()["detail"]


async def test_invalid_versions_are_refused(site) -> None:
    acme, globex = await site.publisher("acme"), await site.publisher("globex")
    base = digest_directory(site.home / "base")
    directory = adapter(site, 3)
    digest = digest_directory(directory)
    assert (await push(acme, directory, base)).is_success
    good = {"artifact_uri": f"sha256:{digest}", "base_model": "tiny", "promote_to": "100%"}
    for who, path, changes, status, param in (
        (acme, "acme/x/versions/1", {"promote_to": ""}, 400, "promote_to"),
        (acme, "acme/x/versions/1", {"promote_to": "50%"}, 400, "promote_to"),
        (acme, "acme/x/versions/1", {"base_model": "none"}, 400, "base_model"),
        (acme, "acme/x/versions/1", {"artifact_uri": "sha256:ab"}, 400, "artifact_uri"),
        (acme, "acme/x/versions/1", {"artifact_uri": f"sha256:{base}"}, 400, "artifact_uri"),
        (acme, "acme/x/versions/1", {"artifact_uri": "file:///etc"}, 400, "source"),
        (acme, "acme/x/versions/1", {"adapter_type": "dora"}, 400, "adapter_type"),
        (acme, "x/versions/1", {}, 403, "model_id"),
        (acme, "tiny/versions/1", {}, 403, None),
        (globex, "globex/x/versions/1", {}, 400, "artifact_uri"),
    ):
        answer = await who.put(f"/v1/models/{path}", json=good | changes)
        assert (answer.status_code, answer.json().get("param")) == (status, param), answer.text
    assert (await acme.get("/v1/models")).json()["data"] == [
        (await acme.get("/v1/models/tiny")).json()
    ]
    assert (await acme.put("/v1/models/acme/x/versions/1", json=good)).status_code == 201
    other = adapter(site, 4)
    assert (await push(acme, other, base)).is_success
    changed = good | {"artifact_uri": f"sha256:{digest_directory(other)}"}
    again = await acme.put("/v1/models/acme/x/versions/1", json=changed)
    assert (again.status_code, again.json()["param"]) == (409, "release")


async def test_the_rank_that_a_pool_serves_decides(site, monkeypatch) -> None:
    """At upload the largest of the base's pools, at publication the pool that serves the model."""
    admin, put, base = site.admin, site.plane.put, digest_directory(site.home / "base")

    async def pool(name: str, **options: str) -> None:
        fields = {"base_digest": base, "engine": "sim", "replicas_wanted": 0}
        await put(f"pools/{name}", **fields, engine_options=options)

    await pool("main", adapter_rank="16")
    directory = adapter(site, 5, rank=32)
    refused = await push(admin, directory, base)
    assert (refused.status_code, refused.json()["code"]) == (400, "adapter_invalid")
    assert "r is 32, ranks from 1 to 16 are served" in refused.json()["detail"]
    await pool("large", adapter_rank="32")
    uploaded = await push(admin, directory, base)
    assert uploaded.status_code == 200, uploaded.text

    version_digest = uploaded.json()["digest"]
    version = {"artifact_uri": f"sha256:{version_digest}", "base_model": "tiny"}
    path = "/v1/models/parrot/versions/1"
    for options, text in (
        ({"adapter_rank": "16"}, "has rank 32, pool main serves ranks up to 16"),
        ({"adapter_slots": "0"}, "has rank 32, pool main serves no adapters"),
    ):
        await pool("main", **options)
        refused = await admin.put(path, json=version | {"promote_to": "100%"})
        assert (refused.status_code, refused.json()["code"]) == (400, "adapter_invalid")
        assert text in refused.json()["detail"]
        model = {"base_digest": base, "pool_id": "main", "adapter_digest": version_digest}
        refused = await admin.put("/v1/models/by-hand", json=model)
        assert (refused.status_code, refused.json()["param"]) == (400, "adapter_digest")
        assert text in refused.json()["detail"]
    await pool("main", adapter_rank="32")
    assert (await admin.put("/v1/models/by-hand", json=model)).is_success
    made = await admin.put(path, json=version | {"promote_to": "100%"})
    assert made.status_code == 201, made.text
    monkeypatch.setenv("SLUICE_ADMIN_URL", str(admin.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)
    for option, text in (("adapter_rank=31", "ranks up to 31"), ("adapter_slots=0", "no adapters")):
        words = ["fleet", "pool", "update", "main", "--option", option]
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
        told = " ".join(done.output.split())
        assert done.exit_code == 1, told
        assert (
            f"pool main would serve {text}, and these need more: by-hand (rank 32), parrot ("
            in told
        )
    assert (await admin.get("/v1/pools/main")).json()["engine_options"] == {"adapter_rank": "32"}
    await _release_in_use(site, base, version_digest)
    await pool("large", adapter_rank="33")
    await pool("large", adapter_rank="32")
    lower = {"base_digest": base, "engine": "sim", "engine_options": {"adapter_rank": "2"}}
    refused = await admin.put("/v1/pools/large", json=lower)
    assert (refused.status_code, refused.json()["param"]) == (409, "engine_options")
    assert "these need more: old@1 (rank 32), shared (rank 32); " in refused.json()["detail"]
    body = {"base_digest": base, "engine": "sim", "engine_options": {"adapter_rank": "0"}}
    wrong = await admin.put("/v1/pools/main", json=body)
    assert (wrong.status_code, "adapter_rank is 0" in wrong.json()["detail"]) == (400, True)


async def _release_in_use(site: Site, base: str, adapter_digest: str) -> None:
    """Pool `large` serves a release that only a pin asks for, and half of a model's requests."""
    put, fields = site.plane.put, {"base_digest": base, "pool_id": "large"}
    for release, digest in (("1", adapter_digest), ("2", "")):
        await put("models/old", **fields, adapter_digest=digest, release=release)
    await put("tiers/ranks", priority=1)
    await put("tenants/ranks", tier_id="ranks", pins={"old": "1"})
    model = {"base_digest": base, "pool_id": "main", "adapter_digest": adapter_digest}
    await put("models/shared", **model)
    small = {"base_digest": base, "engine": "sim", "replicas_wanted": 0}
    await put("pools/small", **small, engine_options={"adapter_rank": "16"})
    listed = {"pools": [{"pool_id": "main"}, {"pool_id": "small"}]}
    refused = await site.admin.put("/v1/model-pools/shared", json=listed)
    assert (refused.status_code, refused.json()["param"]) == (400, "pools")
    assert "has rank 32, pool small serves ranks up to 16" in refused.json()["detail"]
    await put("model-pools/shared", pools=[{"pool_id": "main"}, {"pool_id": "large"}])


async def test_a_base_alone_becomes_a_version_that_the_model_does_not_stand_for(site) -> None:
    admin, put = site.admin, site.plane.put
    old = (await admin.get("/v1/models/tiny")).json()
    write_random_model(site.home / "other", seed=1)
    digest = (await push(admin, site.home / "other")).json()["digest"]
    await put(f"bases/{digest}", context_tokens_max=64)
    await put("pools/other", base_digest=digest, engine="sim", replicas_wanted=0)
    path = "/v1/models/tiny/versions/2"
    body = {"pool_id": "other", "adapter_type": "none"}
    made = await admin.put(path, json=body)
    assert made.status_code == 201, made.text
    assert (made.json()["base_digest"], made.json()["adapter_digest"]) == (digest, "")
    assert (await admin.get("/v1/models/tiny")).json() == old
    plan = {"stages": [{"share_percent": 0.5}, {"share_percent": 100}]}
    staged = await admin.put(path, json=body | {"promote_to": "staged", "plan": plan})
    assert staged.status_code == 200, staged.text
    told = await admin.get(f"/v1/rollouts/{staged.json()['rollout_id']}")
    assert told.status_code == 200, told.text
    assert (told.json()["model_id"], told.json()["canary"]) == ("tiny", "2")


async def test_a_version_is_an_adapter_or_a_base(site) -> None:
    for body in (
        {"adapter_type": "none"},
        {"adapter_type": "none", "pool_id": "nowhere"},
        {"adapter_type": "none", "pool_id": "main", "artifact_uri": "sha256:" + "0" * 64},
        {"pool_id": "main"},
        {"artifact_uri": "sha256:" + "0" * 64},
    ):
        refused = await site.admin.put("/v1/models/tiny/versions/9", json=body)
        assert refused.status_code in {400, 422}, (body, refused.text)
        assert refused.json()["detail"]
