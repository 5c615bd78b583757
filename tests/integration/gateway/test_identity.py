"""Keys and names through the public HTTP: what a caller sees of what it may and may not use."""

import hashlib

import httpx
import openai
import pytest

from gateway.app import running_gateway
from gateway.settings import GatewaySettings
from sluice.process import free_port
from sluice.wire.control.v1 import control_pb2 as control
from tests.integration.gateway.conftest import DEAD_KEY, KEY, OTHER_KEY
from tests.integration.gateway.test_workers import plain_settings

pytestmark = pytest.mark.real

ADAPTER = "ad" * 32
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def a_key(secret: str, **fields: object) -> control.ApiKey:
    digest = hashlib.sha256(secret.encode()).digest()
    return control.ApiKey(id=f"key-{secret}", tenant_id="one", secret_sha256=digest, **fields)


class Tenancy:
    """The objects of a world, and more of them."""

    def __init__(self, world) -> None:
        self.world = world
        objects = self.objects = world.objects(
            world.gateway.watcher.state.cells["cell"].router_address
        )
        objects.models.add(
            id="two/own", base_digest=world.digest, pool_id="pool", owner_tenant_id="two"
        )
        objects.releases.add(
            id="tiny@0",
            model_id="tiny",
            base_digest=world.digest,
            adapter_digest=ADAPTER,
            pool_id="pool",
        )
        for name, target in (("best", "tiny"), ("first", "tiny@0"), ("theirs", "two/own")):
            objects.aliases.add(id=name, target=target)
        objects.keys.extend(
            [
                a_key("sk-chat", scopes=["chat"]),
                a_key("sk-list", scopes=["models"]),
                a_key("sk-some", models=["best", "one/*"]),
                a_key("sk-old", expires_at_unix_ms=1),
            ]
        )

    def send(self) -> None:
        """Tell the gateway."""
        self.world.feed.replace(self.objects)

    async def chat(self, key: str, model: str) -> httpx.Response:
        async with self.world.http(key) as http:
            return await http.post("/v1/chat/completions", json=HELLO | {"model": model})

    async def names(self, key: str) -> set[str]:
        async with self.world.sdk(key) as sdk:
            return {model.id for model in (await sdk.models.list()).data}


@pytest.fixture
async def tenancy(world, eventually):
    async with world() as started:
        made = Tenancy(started)
        made.send()
        state = started.gateway.watcher.state
        await eventually(lambda: "theirs" in state.aliases)
        yield made


async def test_a_release_and_an_alias_answer_under_their_targets_name(tenancy) -> None:
    submits = tenancy.world.router.submits
    for name, adapter in (("tiny", ""), ("best", ""), ("tiny@0", ADAPTER), ("first", ADAPTER)):
        answer = await tenancy.chat(KEY, name)
        assert answer.status_code == 200, answer.text
        assert submits[-1].adapter_digest == adapter, name
    assert submits[0].block_hashes == submits[1].block_hashes


async def test_another_tenants_model_answers_like_a_missing_one(tenancy) -> None:
    told = set()
    for name in ("missing", "two/own", "theirs", "two/own@1", "tiny@9"):
        answer = await tenancy.chat(KEY, name)
        headers = sorted(set(answer.headers) - {"date", "content-length", "x-request-id"})
        told.add((answer.status_code, answer.text.replace(name, "N"), *headers))
    assert [status for status, *_ in told] == [404]
    assert (await tenancy.chat(OTHER_KEY, "theirs")).status_code == 200
    for name, status in (("best", 200), ("one/own", 200), ("tiny", 404), ("first", 404)):
        assert (await tenancy.chat("sk-some", name)).status_code == status, name
    for key, names in (
        (KEY, {"tiny", "nowhere", "best", "first", "one/own"}),
        (OTHER_KEY, {"tiny", "nowhere", "best", "first", "two/own", "theirs"}),
        ("sk-some", {"best", "one/own"}),
    ):
        assert await tenancy.names(key) == names


async def test_every_refused_key_gets_the_same_answer(tenancy) -> None:
    answers = [await tenancy.chat(key, "tiny") for key in ("sk-never", DEAD_KEY, "sk-old")]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1


async def test_a_key_is_for_its_scopes(tenancy) -> None:
    assert (await tenancy.chat("sk-chat", "tiny")).status_code == 200
    assert "tiny" in await tenancy.names("sk-list")
    with pytest.raises(openai.PermissionDeniedError, match="may not use 'models', only: chat"):
        await tenancy.names("sk-chat")
    refused = await tenancy.chat("sk-list", "missing")
    assert refused.status_code == 403, "before anything about models is told"
    assert refused.json()["error"]["code"] == "permission_denied"


async def test_a_key_that_is_disabled_is_refused_from_then_on(tenancy, eventually) -> None:
    assert (await tenancy.chat("sk-chat", "tiny")).status_code == 200
    for key in tenancy.objects.keys:
        key.is_disabled = key.id == "key-sk-chat"
    tenancy.send()
    state = tenancy.world.gateway.watcher.state
    await eventually(lambda: state.keys["key-sk-chat"].is_disabled)
    assert (await tenancy.chat("sk-chat", "tiny")).status_code == 401
    assert (await tenancy.chat(KEY, "tiny")).status_code == 200


async def test_a_gateway_that_knows_no_keys_yet_refuses_none_of_them(tmp_path) -> None:
    """A good key that is called wrong is thrown away."""
    address = f"127.0.0.1:{free_port()}"
    settings = GatewaySettings(**plain_settings(tmp_path, address), flush_s=0.0)
    async with (
        running_gateway(settings),
        httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http,
    ):
        good = await http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert (good.status_code, good.json()["error"]["code"]) == (503, "unavailable")
        assert good.headers["retry-after"] == "1"
        assert (await http.get("/v1/models")).status_code == 401
