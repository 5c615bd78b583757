"""Uploads of artifacts to a control plane as a process, on a real PostgreSQL and a real store."""

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.artifacts.model import ATTEMPTS_MAX
from sluice.artifacts import digest_directory
from sluice.manifests import CHUNK_BYTES, manifest_of_directory
from tests.integration.artifact_site import (
    UPLOADS,
    Site,
    artifact_site,
    begin,
    contents,
    push,
    send,
    sha,
)
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

SEEDS = iter(range(1000, 2000))


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the platform; its weights are three chunks."""
    directory = tmp_path_factory.mktemp("artifacts") / "base"
    write_random_model(directory, changes={"intermediate_size": 6000})
    assert (directory / "model.safetensors").stat().st_size > 2 << 22
    return directory


@pytest.fixture
def adapter_dir(base_dir: Path, tmp_path: Path) -> Path:
    write_random_adapter(tmp_path / "adapter", base_dir, rank=4, seed=next(SEEDS))
    return tmp_path / "adapter"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(
    postgres_server, tmp_path_factory, start_control_plane, base_dir
) -> AsyncIterator[tuple[Site, str]]:
    await postgres_server.execute(f"CREATE DATABASE artifacts TEMPLATE {postgres_server.template}")
    url, directory = postgres_server.url("artifacts"), tmp_path_factory.mktemp("site")
    async with artifact_site(start_control_plane, url, directory) as site:
        ready = await push(site.admin, base_dir)
        assert ready.status_code == 200, ready.text
        yield site, ready.json()["digest"]


@pytest_asyncio.fixture(loop_scope="session")
async def site(shared: tuple[Site, str]) -> Site:
    return shared[0]


@pytest_asyncio.fixture(loop_scope="session")
async def base(shared: tuple[Site, str]) -> str:
    return shared[1]


@pytest_asyncio.fixture(loop_scope="session")
async def acme(site: Site) -> httpx.AsyncClient:
    return await site.publisher("acme")


async def test_an_adapter_is_uploaded_accepted_and_read_back(site, base, acme, adapter_dir) -> None:
    begun = await begin(acme, adapter_dir, base)
    assert begun.status_code == 201, begun.text
    upload = begun.json()
    digest = digest_directory(adapter_dir)
    assert (upload["state"], upload["tenant_id"], upload["digest"]) == ("uploading", "acme", digest)
    held = contents(adapter_dir, manifest_of_directory(adapter_dir))
    assert {chunk["sha256"] for chunk in upload["missing"]} == set(held)
    assert (await acme.get(f"/v1/artifacts/{digest}")).status_code == 404

    early = await acme.post(f"{UPLOADS}/{upload['id']}/complete")
    assert (early.status_code, early.json()["code"]) == (409, "conflict")
    assert "2 chunks are missing" in early.json()["detail"]

    await send(acme, upload, adapter_dir)
    done = await acme.post(f"{UPLOADS}/{upload['id']}/complete")
    assert (done.status_code, done.json()["state"]) == (200, "ready"), done.text
    again = await acme.post(f"{UPLOADS}/{upload['id']}/complete")
    assert (again.status_code, again.json()["state"]) == (200, "ready")

    found = (await acme.get(f"/v1/artifacts/{digest}")).json()
    assert (found["kind"], found["base_digests"], found["file_count"]) == ("adapter", [base], 2)
    assert found in (await acme.get("/v1/artifacts?kind=adapter")).json()["data"]
    assert found not in (await acme.get("/v1/artifacts?kind=base")).json()["data"]
    manifest = (await acme.get(f"/v1/artifacts/{digest}/manifest")).json()
    assert manifest == manifest_of_directory(adapter_dir).document()
    for sha256, content in held.items():
        answer = await acme.get(f"/v1/artifacts/chunks/{sha256}")
        assert (answer.status_code, answer.content) == (200, content)
    rows = (await site.admin.get(f"/v1/audit?kind=uploads&object_id={upload['id']}")).json()["data"]
    assert [(row["action"], row["outcome"]) for row in rows] == [
        *[("complete", "done")] * 2,
        ("post", "conflict"),
        ("create", "done"),
    ]


async def test_an_upload_is_resumed_where_it_was_left(acme, base, base_dir, tmp_path) -> None:
    write_random_model(tmp_path / "own", seed=5, changes={"intermediate_size": 9000})
    begun = (await begin(acme, tmp_path / "own")).json()
    lacking = sorted(chunk["sha256"] for chunk in begun["missing"])
    assert len(lacking) > 4
    # The tokenizer is that of a base which everybody may see.
    shared = set(contents(base_dir, manifest_of_directory(base_dir)))
    own = set(contents(tmp_path / "own", manifest_of_directory(tmp_path / "own")))
    assert own - set(lacking) == own & shared
    assert own & shared

    await send(acme, begun, tmp_path / "own", only=lacking[:2])
    await send(acme, begun, tmp_path / "own", only=lacking[:1])
    again = await begin(acme, tmp_path / "own")
    assert (again.status_code, again.json()["id"]) == (200, begun["id"])
    seen = (await acme.get(f"{UPLOADS}/{begun['id']}")).json()
    for upload in (again.json(), seen):
        assert sorted(chunk["sha256"] for chunk in upload["missing"]) == lacking[2:]
    assert (await push(acme, tmp_path / "own")).json()["state"] == "ready"


async def test_other_tenants_artifacts_stay_hidden(site, base, acme, adapter_dir) -> None:
    globex = await site.publisher("globex")
    assert (await push(acme, adapter_dir, base)).status_code == 200
    digest = digest_directory(adapter_dir)
    chunks = set(contents(adapter_dir, manifest_of_directory(adapter_dir)))
    for path in (digest, f"{digest}/manifest", *(f"chunks/{sha256}" for sha256 in chunks)):
        assert (await globex.get(f"/v1/artifacts/{path}")).status_code == 404
    assert digest not in (await globex.get("/v1/artifacts")).text

    begun = (await begin(globex, adapter_dir, base)).json()
    assert {chunk["sha256"] for chunk in begun["missing"]} == chunks
    theirs = (await begin(acme, adapter_dir, base)).json()
    assert theirs["missing"] == []
    assert (await globex.get(f"{UPLOADS}/{theirs['id']}")).status_code == 404
    assert theirs["id"] not in (await globex.get(UPLOADS)).text
    one = next(iter(chunks))
    for method, path in (("PUT", f"chunks/{one}"), ("POST", "complete")):
        answer = await globex.request(method, f"{UPLOADS}/{theirs['id']}/{path}", content=b"")
        assert answer.status_code == 404, answer.text
    assert (await push(globex, adapter_dir, base)).json()["state"] == "ready"
    assert (await globex.get(f"/v1/artifacts/{digest}")).status_code == 200
    assert (await site.admin.get(f"/v1/artifacts/{digest}")).status_code == 200
    refused = await begin(globex, adapter_dir, base, tenant_id="acme")
    assert refused.status_code == 403


async def test_chunks_that_lie_are_refused(site, base, acme, adapter_dir) -> None:
    upload = (await begin(acme, adapter_dir, base)).json()
    held = contents(adapter_dir, manifest_of_directory(adapter_dir))
    sha256 = max(held, key=lambda name: len(held[name]))
    content = held[sha256]
    changed = content[:-1] + bytes([content[-1] ^ 1])

    async def slowly(pieces):
        for piece in pieces:
            yield piece

    for body, text in (
        (changed, "has another SHA-256"),
        (content[:-1], "bytes, not"),
        (content + b"x", "bytes, not"),
        (slowly([content, b"x"]), "more were sent"),
        (slowly([content[:-1]]), "bytes, not"),
    ):
        answer = await acme.put(f"{UPLOADS}/{upload['id']}/chunks/{sha256}", content=body)
        assert (answer.status_code, answer.json()["param"]) == (400, "chunk"), answer.text
        assert text in answer.json()["detail"]
    unknown = await acme.put(f"{UPLOADS}/{upload['id']}/chunks/{sha(b'?')}", content=b"?")
    assert unknown.status_code == 404
    assert sha256 not in site.blobs()
    seen = (await acme.get(f"{UPLOADS}/{upload['id']}")).json()
    assert sha256 in {chunk["sha256"] for chunk in seen["missing"]}


async def test_a_bad_adapter_is_refused_with_all_reasons(site, base, acme, adapter_dir) -> None:
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    (adapter_dir / "adapter_config.json").write_text(json.dumps(config | {"r": 500}))
    (adapter_dir / "adapter_model.bin").write_bytes(b"\x80\x04.")
    answer = await push(acme, adapter_dir, base)
    assert (answer.status_code, answer.json()["code"]) == (400, "adapter_invalid")
    reasons = answer.json()["detail"].split("\n")
    assert len(reasons) == 2
    assert "adapter_model.bin may hold pickled objects" in reasons[0]
    assert "r is 500, ranks from 1 to 64 are served" in reasons[1]
    digest = digest_directory(adapter_dir)
    assert (await acme.get(f"/v1/artifacts/{digest}")).status_code == 404
    uploads = (await acme.get(UPLOADS)).json()["data"]
    (ended,) = [upload for upload in uploads if upload["digest"] == digest]
    assert (ended["state"], ended["reasons"]) == ("refused", reasons)
    late = await acme.put(f"{UPLOADS}/{ended['id']}/chunks/{sha(b'')}", content=b"")
    assert late.status_code == 409


async def test_a_manifest_that_lies_about_a_file_is_refused(acme, tmp_path) -> None:
    directory = tmp_path / "base"
    write_random_model(directory, seed=7, changes={"intermediate_size": 6000})
    document = manifest_of_directory(directory).document()
    (weights,) = [file for file in document["files"] if file["name"] == "model.safetensors"]
    weights["sha256"] = "ab" * 32
    begun = await acme.post(UPLOADS, json={"kind": "base", "manifest": document})
    assert begun.status_code == 201, begun.text
    await send(acme, begun.json(), directory)
    answer = await acme.post(f"{UPLOADS}/{begun.json()['id']}/complete")
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("model.safetensors has another SHA-256")


async def test_broken_bases_are_refused(acme, tmp_path) -> None:
    directory = tmp_path / "base"
    write_random_model(directory, seed=8)
    (directory / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{"}))
    answer = await push(acme, directory)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert [line.partition(":")[0].split()[0] for line in answer.json()["detail"].split("\n")] == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


async def test_requests_that_make_no_sense(site, base, acme, adapter_dir) -> None:
    manifest = manifest_of_directory(adapter_dir).document()
    good = {"kind": "adapter", "base_digest": base, "manifest": manifest}
    for changes, param in (
        ({"kind": "engine"}, "kind"),
        ({"base_digest": ""}, None),
        ({"base_digest": "cd" * 32}, "base_digest"),
        ({"manifest": {}}, "manifest"),
        ({"manifest": manifest | {"files": []}}, "manifest"),
        ({"signatures": {"k": "x"}}, "signatures.k"),
        ({"tenant_id": "not there"}, "tenant_id"),
    ):
        answer = await site.admin.post(UPLOADS, json=good | changes)
        assert (answer.status_code, answer.json().get("param")) == (400, param), answer.text
    for path in (f"{UPLOADS}/none", "/v1/artifacts/" + "0" * 64):
        assert (await acme.get(path)).status_code == 404
    assert (await acme.get("/v1/artifacts/xyz")).status_code == 400
    assert (await acme.post(f"{UPLOADS}/none/complete")).status_code == 404


async def test_a_tenant_has_a_quota(site, base, tmp_path) -> None:
    hoarder = await site.publisher("hoarder")
    states: list[int] = []
    for seed in range(6):
        directory = tmp_path / str(seed)
        write_random_model(directory, seed=seed, changes={"intermediate_size": 9000})
        states.append((await begin(hoarder, directory)).status_code)
    assert states[0] == 201
    assert states[-1] == 413
    assert states == sorted(states)
    for number in range(3):
        write_random_adapter(tmp_path / f"a{number}", tmp_path / "0", rank=1, seed=number)
    free = await begin(site.admin, tmp_path / "5")
    assert free.status_code == 201, "what is everybody's has no quota"


async def test_many_at_once_leave_one_artifact(site, base, adapter_dir) -> None:
    """The same artifact, by two tenants and several clients each, in any order."""
    clients = [await site.publisher(tenant) for tenant in ("acme", "globex")] * 3
    answers = await asyncio.gather(*(push(client, adapter_dir, base) for client in clients))
    assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers]
    digest = digest_directory(adapter_dir)
    for client in clients:
        listed = (await client.get("/v1/artifacts?kind=adapter")).json()["data"]
        assert [item["digest"] for item in listed].count(digest) == 1


async def test_the_largest_files_come_in_pieces_in_any_order(site, acme, tmp_path) -> None:
    directory = tmp_path / "base"
    write_random_model(directory, seed=9, changes={"intermediate_size": 9000})
    begun = (await begin(acme, directory)).json()
    lacking = [chunk["sha256"] for chunk in begun["missing"]]
    random.Random(1).shuffle(lacking)
    for sha256 in lacking:
        await send(acme, begun, directory, only=[sha256])
    assert (await acme.post(f"{UPLOADS}/{begun['id']}/complete")).status_code == 200


async def test_a_chunk_that_another_client_was_faster_with_is_taken(site, acme, tmp_path) -> None:
    directory = tmp_path / "base"
    write_random_model(directory, seed=11)
    begun = (await begin(acme, directory)).json()
    await send(acme, begun, directory)
    assert (await acme.post(f"{UPLOADS}/{begun['id']}/complete")).status_code == 200
    await send(acme, begun, directory)  # 204 each


async def test_signatures_are_checked_and_may_be_required(
    site, base, acme, adapter_dir, database_url, tmp_path, start_control_plane, base_dir
) -> None:
    key, digest = Ed25519PrivateKey.generate(), digest_directory(adapter_dir)
    public_key = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    signature = base64.b64encode(key.sign(digest.encode())).decode()
    other = base64.b64encode(key.sign(b"something else")).decode()
    body = {"public_key": public_key, "owner_tenant_id": "acme"}
    forged = await acme.put("/v1/signing-keys/acme/ci", json=body)
    assert forged.status_code in {403, 404}, "publishers do not register keys"
    await site.plane.put("signing-keys/acme-ci", **body)
    await site.publisher("globex")
    await site.plane.put("signing-keys/globex-ci", **(body | {"owner_tenant_id": "globex"}))
    for signatures, text in (
        ({"acme-ci": other}, "is not of digest"),
        ({"globex-ci": signature}, "no such key counts"),
        ({"acme-ci": signature, "nobody": signature}, "by nobody"),
    ):
        answer = await push(acme, adapter_dir, base, signatures=signatures)
        assert (answer.status_code, text in answer.json()["detail"]) == (400, True), answer.text
    assert (await push(acme, adapter_dir, base, signatures={"acme-ci": signature})).is_success

    required = {"CONTROL_PLANE__ARTIFACT_SIGNATURES_REQUIRED": "true"}
    async with artifact_site(start_control_plane, database_url, tmp_path, **required) as strict:
        answer = await push(strict.admin, base_dir)
        assert "a signature is required" in answer.json()["detail"]
        await strict.plane.put("signing-keys/ci", public_key=public_key)
        signed = base64.b64encode(key.sign(digest_directory(base_dir).encode())).decode()
        assert (await push(strict.admin, base_dir, signatures={"ci": signed})).is_success


async def test_the_manifest_of_a_base_of_140_gb_is_taken(site) -> None:
    count = 35_000
    chunks = [sha(str(number).encode()) for number in range(count)]
    weights = {
        "name": "model.safetensors",
        "size_bytes": count * CHUNK_BYTES,
        "sha256": "ab" * 32,
        "chunks": chunks,
    }
    manifest = {"format": 1, "chunk_bytes": CHUNK_BYTES, "files": [weights]}
    body = {"kind": "base", "manifest": manifest}
    begun = await site.admin.post(UPLOADS, json=body)
    assert begun.status_code == 201, begun.text
    again = await site.admin.post(UPLOADS, json=body)
    assert (again.status_code, again.json()["id"]) == (200, begun.json()["id"])
    assert [chunk["sha256"] for chunk in again.json()["missing"]] == sorted(chunks)
    assert {chunk["size_bytes"] for chunk in again.json()["missing"]} == {CHUNK_BYTES}


def claimed(directory: Path, name: str, more_bytes: int) -> dict[str, Any]:
    """The manifest of a directory that claims another size of one of its files."""
    document = manifest_of_directory(directory).document()
    (file,) = [file for file in document["files"] if file["name"] == name]
    file["size_bytes"] += more_bytes
    return document


async def test_sizes_are_compared_with_the_stored_ones(acme, base, adapter_dir, tmp_path) -> None:
    assert (await push(acme, adapter_dir, base)).status_code == 200
    size = (adapter_dir / "adapter_config.json").stat().st_size
    (adapter_dir / "README.md").write_text("another one")
    lie = claimed(adapter_dir, "adapter_config.json", 1)
    answer = await begin(acme, adapter_dir, base, manifest=lie)
    assert (answer.status_code, answer.json()["param"]) == (400, "manifest"), answer.text
    assert f"has {size} bytes, not {size + 1}" in answer.json()["detail"]
    assert (await push(acme, adapter_dir, base)).json()["state"] == "ready"


async def test_a_false_manifest_delays_no_other_upload(acme, base, adapter_dir) -> None:
    """The chunk is not stored yet, so no size of it is known; the digest says nothing of sizes."""
    lie = claimed(adapter_dir, "adapter_model.safetensors", 1)
    lying = await begin(acme, adapter_dir, base, manifest=lie)
    assert lying.status_code == 201, lying.text
    honest = await push(acme, adapter_dir, base)
    assert (honest.status_code, honest.json()["state"]) == (200, "ready"), honest.text
    assert honest.json()["id"] != lying.json()["id"]
    assert honest.json()["digest"] == lying.json()["digest"]


async def test_an_upload_is_cancelled(site, acme, base, adapter_dir) -> None:
    begun = (await begin(acme, adapter_dir, base)).json()
    one = f"{UPLOADS}/{begun['id']}"
    globex = await site.publisher("globex")
    assert (await globex.post(f"{one}/cancel")).status_code == 404
    for _ in range(2):
        cancelled = await acme.post(f"{one}/cancel")
        assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    chunk = begun["missing"][0]["sha256"]
    for answer in (
        await acme.put(f"{one}/chunks/{chunk}", content=b""),
        await acme.post(f"{one}/complete"),
    ):
        assert (answer.status_code, "is cancelled" in answer.json()["detail"]) == (409, True)
    again = await push(acme, adapter_dir, base)
    assert (again.status_code, again.json()["id"] != begun["id"]) == (200, True)
    late = await acme.post(f"{UPLOADS}/{again.json()['id']}/cancel")
    assert (late.status_code, "is ready" in late.json()["detail"]) == (409, True), late.text


async def test_an_inspection_that_cannot_read_its_chunks_ends(
    acme, site, base, adapter_dir, postgres_server, eventually
) -> None:
    """A chunk is lost in the store: that may pass, but not for ever."""
    upload = (await begin(acme, adapter_dir, base)).json()
    await send(acme, upload, adapter_dir)
    for path in list(site.store.rglob(upload["missing"][0]["sha256"])):
        path.unlink()
    one = f"{UPLOADS}/{upload['id']}"
    async with asyncio.TaskGroup() as tasks:
        completed = tasks.create_task(acme.post(f"{one}/complete"))

        async def is_looked_at() -> bool:
            return (await acme.get(one)).json()["state"] == "validating"

        await eventually(is_looked_at, "somebody looks at the upload")
        spent = f"UPDATE artifact_uploads SET attempts = {ATTEMPTS_MAX} WHERE id = '{upload['id']}'"
        await postgres_server.execute(spent, "artifacts")
    assert completed.result().status_code in {202, 400}

    async def is_refused() -> bool:
        return (await acme.get(one)).json()["state"] == "refused"

    await eventually(is_refused, "it is given up")
    (reason,) = (await acme.get(one)).json()["reasons"]
    assert f"in {ATTEMPTS_MAX} attempts" in reason
    assert (await push(acme, adapter_dir, base)).json()["state"] == "ready"


async def test_a_wrong_size_that_was_taken_is_an_end(
    acme, base, adapter_dir, postgres_server
) -> None:
    """As a control plane that compares none may have left it."""
    upload = (await begin(acme, adapter_dir, base)).json()
    await send(acme, upload, adapter_dir)
    own = f"upload_id = '{upload['id']}'"
    longer = f"UPDATE artifact_upload_chunks SET size_bytes = size_bytes + 1 WHERE {own}"
    await postgres_server.execute(longer, "artifacts")
    answer = await acme.post(f"{UPLOADS}/{upload['id']}/complete")
    assert (answer.status_code, "bytes, not" in answer.json()["detail"]) == (400, True), answer.text
