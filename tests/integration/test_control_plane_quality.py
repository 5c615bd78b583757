"""Golden prompts over real Sync: a replica that lies is taken out with evidence, and replaced."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from control_plane.database import Database
from control_plane.quality.repository import golden_counts
from sluice.ids import new_id
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.agent.v1.agent_pb2_grpc import AgentServiceStub
from sluice.wire.control.v1 import control_pb2 as control
from tests.links import trusted_channel

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DEADLINE_S = 60.0
RIGHT, WRONG = [7, 8, 9, 10], [7, 8, 666, 10]
Answers = Callable[[str, agent.GoldenPrompt], list[int] | None]


class Node:
    """An agent's side of Sync, whose replicas are ready at once and answer what they are asked."""

    def __init__(self, node_id: str, engine: str, answers: Answers) -> None:
        self.node_id, self.answers = node_id, answers
        self.facts = agent.NodeFacts(cpu_count=2, memory_bytes=8 << 30, engines=[engine])
        self.desired = agent.SyncResponse()

    async def run(self, address: str) -> None:
        async with trusted_channel(address) as channel, asyncio.TaskGroup() as tasks:
            call = AgentServiceStub(channel).Sync()
            tasks.create_task(self._read(call))
            while True:
                await call.write(self._report())
                await asyncio.sleep(0.3)

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            assert isinstance(message, agent.SyncResponse), "the stream ended"
            self.desired = message

    def _report(self) -> agent.SyncRequest:
        report = agent.SyncRequest(node_id=self.node_id, facts=self.facts)
        for wanted in self.desired.replicas:
            if wanted.is_draining:
                continue  # it has ended already
            report.replicas.add(
                replica_id=wanted.replica_id,
                state=control.REPLICA_STATE_READY,
                grpc_address="127.0.0.1:9",
            )
            for prompt in self.desired.golden_prompts:
                if prompt.base_digest == wanted.base_digest:
                    report.golden_results.add(
                        replica_id=wanted.replica_id,
                        prompt_id=prompt.id,
                        token_ids=self.answers(wanted.replica_id, prompt) or (),
                        asked_at_unix_ms=int(time.time() * 1000),
                    )
        return report


@asynccontextmanager
async def nodes(plane: Any, engine: str, count: int, answers: Answers) -> AsyncIterator[list[Node]]:
    found = [Node(new_id("node"), engine, answers) for _ in range(count)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(node.run(plane.grpc_address)) for node in found]
        try:
            yield found
        finally:
            for task in running:
                task.cancel()


async def _pool(plane: Any, engine: str, replicas: int) -> tuple[str, str]:
    """A pool with a base of its own."""
    pool_id, digest = new_id("pool"), new_id("d").encode().hex()[:64].rjust(64, "0")
    await plane.put(f"bases/{digest}", context_tokens_max=2048)
    await plane.put(f"pools/{pool_id}", base_digest=digest, engine=engine, replicas_wanted=replicas)
    return pool_id, digest


async def _ready(plane: Any, pool_id: str) -> list[str]:
    found = (await plane.admin.get("/v1/replicas")).json()["data"]
    return [
        replica["id"]
        for replica in found
        if replica["pool_id"] == pool_id
        and replica["state"] == "ready"
        and not replica["is_draining"]
    ]


async def _quarantines(plane: Any, pool_id: str) -> list[dict[str, Any]]:
    found = (await plane.admin.get("/v1/quarantines")).json()["data"]
    return [one for one in found if one["pool_id"] == pool_id]


async def test_a_liar_of_a_pool_of_two_stays_and_its_node_is_told(
    shared_control_plane, eventually
) -> None:
    plane, engine = shared_control_plane, new_id("sim")
    liars: set[str] = set()
    answered = Counter[str]()

    def answers(replica_id: str, _: agent.GoldenPrompt) -> list[int]:
        answered[replica_id] += 1
        return WRONG if replica_id in liars else RIGHT

    async with nodes(plane, engine, 1, answers) as (node,):
        pool_id, _ = await _pool(plane, engine, 2)

        async def are_known() -> bool:  # three equal answers of each are the right answer
            return min((answered[it] for it in await _ready(plane, pool_id)), default=0) > 10

        await eventually(are_known, "two replicas have answered", DEADLINE_S)
        liar = (await _ready(plane, pool_id))[0]
        liars.add(liar)

        async def is_told() -> bool:
            told = {it.replica_id: it.suspected_at_unix_ms for it in node.desired.replicas}
            return len(told) == 2 and {it for it, at in told.items() if at} == {liar}

        await eventually(is_told, "the node knows which base to read", DEADLINE_S)
        assert not await _quarantines(plane, pool_id)
        first = {it.replica_id: it.suspected_at_unix_ms for it in node.desired.replicas}
        before = answered[liar]
        await eventually(lambda: answered[liar] > before + 5, "it deviates again", DEADLINE_S)
        again = {it.replica_id: it.suspected_at_unix_ms for it in node.desired.replicas}
        assert again == first, "a base is read once an hour at most"


async def test_a_liar_is_taken_out_with_evidence_and_replaced(
    shared_control_plane, eventually
) -> None:
    plane, engine = shared_control_plane, new_id("sim")
    liars: set[str] = set()

    def answers(replica_id: str, _: agent.GoldenPrompt) -> list[int]:
        return WRONG if replica_id in liars else RIGHT

    async with nodes(plane, engine, 3, answers):
        pool_id, digest = await _pool(plane, engine, 3)

        async def are_ready() -> bool:
            return len(await _ready(plane, pool_id)) == 3

        await eventually(are_ready, "three replicas are ready", DEADLINE_S)
        liar = (await _ready(plane, pool_id))[0]
        liars.add(liar)

        async def is_out() -> bool:
            return [q["replica_id"] for q in await _quarantines(plane, pool_id)] == [liar]

        await eventually(is_out, "the liar is in quarantine", DEADLINE_S)
        (case,) = await _quarantines(plane, pool_id)
        evidence = case["evidence"]
        assert (case["reason"], case["prompt_id"], case["base_digest"]) == (
            "tokens",
            "default",
            digest,
        )
        assert evidence["right"]["token_ids"] == RIGHT
        assert evidence["right"]["source"] == "consensus"
        assert (evidence["agreeing"], evidence["asked"]) == (2, 3)
        assert evidence["answers"][0]["token_ids"] == WRONG
        assert evidence["deviations"] >= 2

        async def is_replaced() -> bool:
            ready = await _ready(plane, pool_id)
            return len(ready) == 3 and liar not in ready

        await eventually(is_replaced, "another replica serves instead", DEADLINE_S)
        assert await is_out(), "nobody else"
        told = (await plane.admin.get("/v1/golden-results", params={"pool_id": pool_id})).json()
        assert {one["replica_id"] for one in told["data"]} <= {
            liar,
            *await _ready(plane, pool_id),
        }
        metrics = (await plane.admin.get("/metrics")).text
        assert 'control_plane_quality_deviations_total{difference="tokens"}' in metrics
        path = f"/v1/quarantines/{case['id']}"
        released = await plane.admin.post(f"{path}/release", json={"reason": "a test"})
        assert released.status_code == 200, released.text
        assert released.json()["released_by"]
        assert (await plane.admin.get(path)).json()["released_at"]
        assert (await plane.admin.post(f"{path}/release", json={})).status_code == 409
        forgotten = await plane.admin.post(f"/v1/pools/{pool_id}/forget-answers")
        assert forgotten.status_code == 200, forgotten.text
        missing = await plane.admin.post("/v1/pools/no-such-pool/forget-answers")
        assert missing.status_code == 404


async def _counts(server: Any, model: str) -> dict[str, tuple[int, int]]:
    """What the loop of rollouts reads."""
    database = Database(server.url("shared"))
    try:
        until_ms = int(time.time() * 1000) + 5000
        return await database.run(
            lambda connection: golden_counts(connection, model, ["v1", "v2", "v3"], 0, until_ms)
        )
    finally:
        await database.close()


async def test_prompts_of_a_model_are_asked_of_both_releases_and_counted(
    shared_control_plane, eventually, postgres_server
) -> None:
    plane, engine = shared_control_plane, new_id("sim")
    asked: set[tuple[str, int]] = set()
    canary = "ca" * 32

    def answers(_: str, prompt: agent.GoldenPrompt) -> list[int]:
        if list(prompt.token_ids) == [1, 2, 3]:
            asked.add((prompt.adapter_digest, prompt.every_s))
        return WRONG if prompt.adapter_digest == canary else RIGHT

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(nodes(plane, engine, 1, answers))
        pool_id, digest = await _pool(plane, engine, 1)
        model = new_id("model")
        release = {"base_digest": digest, "pool_id": pool_id}
        await plane.put(f"models/{model}", **release, adapter_digest=canary, release="v2")
        await plane.put(f"models/{model}", **release, release="v1")
        body = {"token_ids": [1, 2, 3], "expected_token_ids": RIGHT[:3], "every_s": 30}
        path = f"/v1/models/{model}/golden-prompts"
        made = await plane.admin.post(path, json=body)
        assert made.status_code == 201, made.text
        prompt = made.json()
        assert (await plane.admin.get(path)).json()["data"] == [prompt]
        assert (await plane.admin.post(path, json=body | {"every_s": 1})).status_code == 400
        await eventually(lambda: ("", 30) in asked, "the control release is asked", DEADLINE_S)
        columns = "id, rollout_id, control, canary, share, salt"
        values = f"'{model}', 'rollout-1', 'v1', 'v2', 100, 'salt'"
        await postgres_server.execute(f"INSERT INTO splits ({columns}) VALUES ({values})", "shared")
        wanted = {("", 5), (canary, 5)}
        await eventually(lambda: wanted <= asked, "both are asked, and often", DEADLINE_S)

        async def are_counted() -> bool:
            found = await _counts(postgres_server, model)
            return found.keys() == {"v1", "v2"} and all(runs > 1 for runs, _ in found.values())

        await eventually(are_counted, "runs are counted", DEADLINE_S)
        found = await _counts(postgres_server, model)
        assert found["v1"][1] == 0
        assert found["v2"][1] == found["v2"][0]
        await postgres_server.execute(f"DELETE FROM splits WHERE id = '{model}'", "shared")
        answer = await plane.admin.delete(f"/v1/golden-prompts/{prompt['id']}")
        assert answer.status_code == 204, answer.text
        assert (await plane.admin.get(path)).json()["data"] == []


async def _owned_model(plane: Any, tenant: str, digest: str, pool_id: str) -> str:
    model = f"{tenant}/{new_id('model')}"
    about = {"base_digest": digest, "pool_id": pool_id, "adapter_digest": "ad" * 32}
    await plane.put(f"models/{model}", **about, owner_tenant_id=tenant)
    return model


async def test_a_tenants_prompt_quarantines_no_replica_and_the_platforms_does(
    shared_control_plane, eventually
) -> None:
    plane, engine, tenant = shared_control_plane, new_id("sim"), new_id("tenant")
    lies: dict[str, bool] = {}  # whether also about what the platform asks

    def answers(replica_id: str, prompt: agent.GoldenPrompt) -> list[int]:
        is_lie = replica_id in lies and (bool(prompt.adapter_digest) or lies[replica_id])
        return WRONG if is_lie else RIGHT

    await plane.put("tiers/quality", priority=1)
    await plane.put(f"tenants/{tenant}", tier_id="quality")
    async with nodes(plane, engine, 3, answers):
        pool_id, digest = await _pool(plane, engine, 3)
        model = await _owned_model(plane, tenant, digest, pool_id)
        made = await plane.admin.post(
            f"/v1/models/{model}/golden-prompts", json={"token_ids": [4, 5, 6]}
        )
        assert made.status_code == 201, made.text

        async def are_ready() -> bool:
            return len(await _ready(plane, pool_id)) == 3

        await eventually(are_ready, "three replicas are ready", DEADLINE_S)
        liar = (await _ready(plane, pool_id))[0]
        lies[liar] = False

        async def deviates() -> bool:
            params = {"pool_id": pool_id}
            found = (await plane.admin.get("/v1/golden-results", params=params)).json()["data"]
            return any(
                one["replica_id"] == liar
                and one["asking_id"].startswith(made.json()["id"])
                and one["deviations"] >= 3
                for one in found
            )

        await eventually(deviates, "the liar lies to the tenant", DEADLINE_S)

        async def is_told() -> bool:
            metrics = (await plane.admin.get("/metrics")).text
            name = 'control_plane_quality_alerts_count{alert="tenant"}'
            return name in metrics and f"{name} 0.0" not in metrics

        await eventually(is_told, "that is an alert", DEADLINE_S)
        assert await _quarantines(plane, pool_id) == []
        lies[liar] = True

        async def is_out() -> bool:
            found = await _quarantines(plane, pool_id)
            return [(q["replica_id"], q["prompt_id"]) for q in found] == [(liar, "default")]

        await eventually(is_out, "the platform's prompt finds the liar", DEADLINE_S)


async def test_a_tenant_has_so_many_prompts_and_no_longer_ones(
    shared_control_plane, postgres_server
) -> None:
    plane, tenant = shared_control_plane, new_id("tenant")
    await plane.put("tiers/quality", priority=1)
    await plane.put(f"tenants/{tenant}", tier_id="quality")
    pool_id, digest = await _pool(plane, new_id("sim"), 0)
    full = await _owned_model(plane, tenant, digest, pool_id)
    model = await _owned_model(plane, tenant, digest, pool_id)
    path = f"/v1/models/{model}/golden-prompts"
    long = await plane.admin.post(path, json={"token_ids": [1] * 513})
    assert long.status_code == 400
    assert "513 tokens; a golden prompt has at most 512" in long.text
    assert "shorten it" in long.text
    await postgres_server.execute(
        "INSERT INTO golden_prompts (id, model_id, token_ids, output_tokens_max, every_s)"
        f" SELECT '{tenant}-' || n, '{full}', '{{1}}', 1, 3600 FROM generate_series(1, 255) n",
        "shared",
    )
    both = [plane.admin.post(path, json={"token_ids": [1] * 512, "every_s": 3600}) for _ in "12"]
    made = await asyncio.gather(*both)
    assert sorted(answer.status_code for answer in made) == [201, 409], "not both the last one"
    refused = next(answer for answer in made if answer.status_code == 409)
    assert f"tenant {tenant} has 256 golden prompts: delete some" in refused.text
    other = new_id("model")
    await plane.put(f"models/{other}", base_digest=digest, pool_id=pool_id)
    body = {"token_ids": [1], "every_s": 3600}
    free = await plane.admin.post(f"/v1/models/{other}/golden-prompts", json=body)
    assert free.status_code == 201, "a tenant's prompts take nothing from others"
    for key in (full, model, other):
        removed = await plane.admin.delete(f"/v1/models/{key}")
        assert removed.status_code == 204, removed.text
