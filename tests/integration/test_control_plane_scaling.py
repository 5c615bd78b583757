"""Scaling in real control planes: routers report, one leader decides, operators have the last word."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub
from tests.integration.conftest import ControlPlane, PostgresServer
from tests.integration.obedient_agent import node
from tests.integration.reporting_router import TOKEN_US, ReportingRouter, reporting
from tests.integration.scaling_cli import Command, scaling_command
from tests.links import trusted_channel
from tests.support.kubernetes_api import StandInApi, kubernetes_api

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

DIGEST = "5c" * 32
INTERVAL_S = 0.5
BOUNDS = {"replicas_min": 1, "replicas_max": 6, "hold_s": 2.0, "minute_worth": 0.0}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StandInApi]:
    async with kubernetes_api(tmp_path_factory.mktemp("api")) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plane(
    postgres_server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
    start_control_plane: Callable[..., Any],
    api: StandInApi,
) -> AsyncIterator[ControlPlane]:
    """A control plane that looks twice a second, and a node with room for everything."""
    await postgres_server.execute(f"CREATE DATABASE scaling TEMPLATE {postgres_server.template}")
    directory = tmp_path_factory.mktemp("scaling")
    actuators = directory / "actuators.json"
    actuators.write_text(json.dumps([api.actuator("gpu", nodes_min=1, nodes_max=4)]))
    async with (
        start_control_plane(
            postgres_server.url("scaling"),
            directory,
            CONTROL_PLANE__SCALING_INTERVAL_S=str(INTERVAL_S),
            CONTROL_PLANE__SCALING_ACTUATORS=str(actuators),
        ) as found,
        node(found, "node-s", "sim-s"),
    ):
        await found.put(f"bases/{DIGEST}", context_tokens_max=2048)
        yield found


async def _pool(plane: ControlPlane, pool_id: str, **bounds: object) -> None:
    await plane.put(f"pools/{pool_id}", base_digest=DIGEST, engine="sim-s", replicas_wanted=1)
    if bounds:
        await plane.put(f"pools/{pool_id}/scaling", **bounds)


async def _row(plane: ControlPlane, pool_id: str) -> dict[str, Any]:
    rows = (await plane.admin.get("/v1/scaling")).json()["data"]
    return next(row for row in rows if row["pool_id"] == pool_id)


async def _ready(plane: ControlPlane, pool_id: str) -> int:
    return (await plane.admin.get(f"/v1/pools/{pool_id}/status")).json()["ready"]


async def _states(plane: ControlPlane, pool_id: str) -> dict[str, str]:
    """Return the states of a pool's replicas, by id."""
    rows = (await plane.admin.get("/v1/replicas")).json()["data"]
    return {row["id"]: row["state"] for row in rows if row["pool_id"] == pool_id}


Eventually = Callable[..., Awaitable[None]]


async def test_demand_takes_a_pool_up_and_down_again(
    plane: ControlPlane, eventually: Eventually
) -> None:
    await _pool(plane, "tide", **BOUNDS)
    async with reporting(plane.grpc_address) as router:
        router.demand["tide-0"] = 0.4

        async def is_measured() -> bool:
            row = await _row(plane, "tide")
            return bool(row["speed"]) and row["demand"] > 0.2

        await eventually(is_measured, "demand is known")
        assert (await _row(plane, "tide"))["wanted"] == 1
        replay, few = "/v1/pools/tide/scaling/replay", 1
        tokens = [int(15 * 3.2e6 / TOKEN_US)] * 120  # work of 3.2 replicas for half an hour
        body = {"prompt_tokens": [0] * 120, "output_tokens": tokens, "replicas_max": few}
        told = (await plane.admin.post(replay, json=body)).json()
        assert (told["hours"], told["asked"]["replicas_most"]) == (0.5, few)
        assert told["present"]["violation_minutes"] < told["asked"]["violation_minutes"]
        uneven = await plane.admin.post(replay, json=body | {"output_tokens": [1]})
        assert (uneven.status_code, "as many numbers" in uneven.text) == (400, True)
        router.demand["tide-0"] = 3.2

        async def has_grown() -> bool:
            return await _ready(plane, "tide") >= 4

        await eventually(has_grown, "the pool has the replicas that its demand needs")
        router.demand["tide-0"] = 0.3

        async def has_shrunk() -> bool:
            return await _ready(plane, "tide") == 1

        await eventually(has_shrunk, "the pool goes back to its minimum")
        changes = (await plane.admin.get("/v1/pools/tide/scaling/changes")).json()["data"]
        assert changes[0]["after"] == 1
        assert max(change["after"] for change in changes) <= BOUNDS["replicas_max"]
        assert set(router.intervals_ms) == {round(INTERVAL_S * 1000 / 3)}


async def test_a_report_that_comes_twice_counts_once_and_nonsense_is_refused(
    plane: ControlPlane, eventually: Eventually
) -> None:
    await _pool(plane, "twice", **BOUNDS)
    router = ReportingRouter("router-twice")
    router.demand["twice-0"], router.requests["twice-0"] = 0.0, 5.0
    async with trusted_channel(plane.grpc_address) as channel:
        stub = ControlServiceStub(channel)
        await stub.ReportDemand(router.report(), timeout=10)
        before = set[str | None]()

        async def is_counted() -> bool:
            before.add((await _row(plane, "twice"))["decided_at"])
            return len(before - {None}) > 2  # the first look may have begun before the report

        await eventually(is_counted, "what was there before is no news")
        router.requests["twice-0"] = 9.0
        told = router.report()
        older = router.report()
        older.cells[0].number = 1
        older.cells[0].tiers[0].requests = 1
        for message in (told, told, older, told):
            await stub.ReportDemand(message, timeout=10)
        looks: dict[str, int] = {}  # requests that came, by the time of the look

        async def is_seen() -> bool:
            row = await _row(plane, "twice")
            looks[row["decided_at"]] = sum(tier[0] for tier in row["tiers"].values())
            return sum(looks.values()) > 0

        await eventually(is_seen, "what came is counted")
        for _ in range(12):
            await is_seen()
            await asyncio.sleep(INTERVAL_S / 4)
        assert sum(looks.values()) == 4
        told.cells[0].speed.output_token_us = float("nan")
        with pytest.raises(grpc.aio.AioRpcError, match="speed of cell twice-0"):
            await stub.ReportDemand(told, timeout=10)


@pytest.fixture
def sluice(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Command:
    return scaling_command(plane, monkeypatch)


async def test_a_number_by_hand_stands_until_it_is_lifted_or_over(
    plane: ControlPlane, eventually: Eventually, sluice: Command, tmp_path: Path
) -> None:
    await _pool(plane, "hand", **BOUNDS)

    async def has(replicas: int) -> bool:
        return await _ready(plane, "hand") == replicas

    await sluice("pin", "hand", "3")
    await eventually(lambda: has(3), "the number by hand is done")
    assert "an operator set 3" in await sluice("explain", "hand")
    # Edited where it was typed before, it stands as well.
    await plane.put("pools/hand", base_digest=DIGEST, engine="sim-s", replicas_wanted=2)
    await eventually(lambda: has(2), "a number that is edited by hand is not ignored")
    assert json.loads(await sluice("pause", "hand", "--json"))["is_paused"]
    assert json.loads(await sluice("resume", "hand", "--json"))["pin"] is None
    await sluice("pin", "hand", "1", "--for", "5s")

    async def is_over() -> bool:
        return (await _row(plane, "hand"))["cause"] != "pin"

    await eventually(lambda: has(1), "the other number is done")
    await eventually(is_over, "its time is over")

    async def is_forgotten() -> bool:
        row = await _row(plane, "hand")
        return (row["pin"], row["pin_until"], row["pinned_by"]) == (None, None, "")

    await eventually(is_forgotten, "a number whose time is over is shown no more")
    for command in (["explain"], ["plan", "--dry-run"], ["history"], ["replay"], ["pin", "2"]):
        text = await sluice(command[0], "typo", *command[1:], status=1)
        assert "there is no pools/typo" in text
        assert "sluice fleet pools" in text
    dry = json.loads(await sluice("plan", "hand", "--dry-run", "--min", "5", "--json"))
    assert dry["wanted"] == 5
    assert (await _row(plane, "hand"))["wanted"] == 1
    assert json.loads(await sluice("history", "hand", "--json"))[0]["after"] == 1
    await sluice("set", "hand", "--min", "7", "--max", "3", status=1)
    assert "less than an hour" in await sluice("replay", "hand", "--max", "3", status=1)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("nothing")
    replayed = await sluice("replay", "hand", "--trace", str(trace), status=2)
    assert "no column TIMESTAMP" in replayed
    await sluice("pin", "hand", "2", "--for", "soon", status=2)
    assert "no role prefill" in await sluice("pin", "hand", "2", "--prefill", "1", status=1)
    told = (await plane.admin.get("/v1/audit", params={"kind": "scaling"})).json()["data"]
    assert {"create", "change"} <= {row["action"] for row in told}
    assert (await plane.admin.delete("/v1/pools/hand/scaling")).status_code == 204
    status = (await plane.admin.get("/v1/pools/hand/status")).json()
    assert (status["replicas_wanted"], status["scaled_replicas"]) == (1, None)


async def test_the_budget_over_all_pools_stands_and_is_told(
    plane: ControlPlane, eventually: Eventually, sluice: Command
) -> None:
    await plane.put("scaling/budget", accelerators=2)
    await plane.put(
        "pools/dear",
        base_digest=DIGEST,
        engine="sim-s",
        replicas_wanted=0,
        needs={"accelerators": 1},
    )
    await plane.put("pools/dear/scaling", **BOUNDS | {"replicas_min": 3, "replicas_max": 4})

    async def is_told() -> bool:
        return any("budget" in text for text in (await _row(plane, "dear"))["warnings"])

    await eventually(is_told, "the budget is below the minimum")
    assert (await _row(plane, "dear"))["wanted"] == 2
    await plane.put(
        "pools/by-hand",
        base_digest=DIGEST,
        engine="sim-s",
        replicas_wanted=2,
        needs={"accelerators": 1},
    )

    async def is_placed_nowhere() -> bool:
        warnings = (await _row(plane, "dear"))["warnings"]
        return any("0 of 2 placed: no node has" in text for text in warnings)

    await eventually(is_placed_nowhere, "the reason why no replica comes is told")
    await sluice("budget", "--unlimited")
    await sluice("budget", "--price", "12")
    await plane.put(
        "pools/dear/scaling", **BOUNDS | {"replicas_min": 3, "replicas_max": 4, "price": 4.0}
    )

    async def is_unpriced() -> bool:
        row = await _row(plane, "dear")
        return row["wanted"] == 3 and any("by-hand" in text for text in row["warnings"])

    await eventually(is_unpriced, "a pool without a price is named")
    await sluice("budget", "--accelerator-price", "2")

    async def is_cut() -> bool:
        return (await _row(plane, "dear"))["wanted"] == 2

    await eventually(is_cut, "the pool sized by hand costs 4 of 12")
    assert "by-hand" not in " ".join((await _row(plane, "dear"))["warnings"])
    await sluice("budget", "--unlimited")
    assert (await plane.admin.delete("/v1/pools/by-hand")).status_code == 204
    assert (await plane.admin.delete("/v1/pools/dear/scaling")).status_code == 204


async def test_prefill_and_decode_replicas_of_a_pool_are_scaled_apart(
    plane: ControlPlane, eventually: Eventually, sluice: Command
) -> None:
    roles = {"prefill": 1, "decode": 1}
    pool = {"base_digest": DIGEST, "engine": "sim-s", "replicas_wanted": 2, "roles": roles}
    await plane.put("pools/split", **pool)
    await sluice("set", "split", "--min", "2", "--max", "8", "--hold", "2s", "--minute-worth", "0")

    async def ready() -> Counter[str]:
        rows = (await plane.admin.get("/v1/replicas", params={"pool_id": "split"})).json()["data"]
        return Counter(
            row["role"] for row in rows if row["state"] == "ready" and not row["is_draining"]
        )

    async def has(**wanted: int) -> bool:
        return await ready() == Counter(wanted)

    async def serves_long_answers() -> bool:
        found = await ready()
        return found["prefill"] == 1 and found["decode"] >= 4  # a surge gets more room

    async with reporting(plane.grpc_address, "router-p") as router:
        router.demand["split-0"], router.prompts["split-0"] = 0.5, 5000.0  # each half a replica

        async def is_measured() -> bool:
            return (await _row(plane, "split"))["demand"] > 0.6

        await eventually(is_measured, "demand is known")
        assert await has(prefill=1, decode=1)
        router.prompts["split-0"] = 25_000.0  # work of 2.5 replicas
        await eventually(lambda: has(prefill=3, decode=1), "long prompts need prefill replicas")
        router.prompts["split-0"], router.demand["split-0"] = 5000.0, 3.4
        await eventually(serves_long_answers, "long answers need decode replicas")
        told = await sluice("explain", "split")
        assert "decode: demand of" in told or "decode: a surge" in told
        assert re.search("1 prefill, [4-7] decode", await sluice("status"))
        changed = json.loads(await sluice("history", "split", "--json"))
        assert {row["role"] for row in changed} == {"prefill", "decode"}
        await sluice("pin", "split", "5", "--prefill", "2")
        await eventually(lambda: has(prefill=2, decode=3), "the numbers by hand are done")
        await sluice("pin", "split", "5", "--prefill", "5", status=1)
        await sluice("resume", "split")
        await sluice("set", "split", "--prefill", "4,6")
        await eventually(lambda: has(prefill=4, decode=4), "the bounds of a role are kept")
        tokens = {"prompt_tokens": [75_000] * 240, "output_tokens": [5000] * 240}
        answer = await plane.admin.post(
            "/v1/pools/split/scaling/replay", json=tokens | {"replicas_max": 3}
        )
        found = answer.raise_for_status().json()
        assert found["asked"]["replicas_most"] <= 3 < found["present"]["replicas_most"]
    assert (await plane.admin.delete("/v1/pools/split/scaling")).status_code == 204


async def test_two_control_planes_scale_once_and_an_outage_changes_nothing(
    plane: ControlPlane,
    postgres_server: PostgresServer,
    eventually: Eventually,
    start_control_plane: Callable[..., Any],
    tmp_path: Path,
) -> None:
    hold_s = 5.0  # longer than reports are fresh, also where looks come late
    await _pool(plane, "lasting", **BOUNDS | {"hold_s": hold_s})
    url = postgres_server.url("scaling")
    interval = {"CONTROL_PLANE__SCALING_INTERVAL_S": str(INTERVAL_S)}

    async def scales(each: ControlPlane) -> bool:
        text = (await each.admin.get("/metrics")).text
        return 'sluice_pool_replicas_wanted{pool="lasting"}' in text

    async with start_control_plane(url, tmp_path, **interval) as other:
        await eventually(lambda: scales(plane), "the first one scales")
        for _ in range(6):
            assert not await scales(other)
            await asyncio.sleep(INTERVAL_S / 2)
        async with reporting(plane.grpc_address, "router-l") as router:
            router.demand["lasting-0"] = 2.4

            async def has_grown() -> bool:
                return (await _row(plane, "lasting"))["wanted"] >= 3

            await eventually(has_grown, "it grows")
    before = (await _row(plane, "lasting"))["wanted"]
    # Its router has left: nobody knows the demand, so the number stays.
    await asyncio.sleep(hold_s + 6 * INTERVAL_S)
    row = await _row(plane, "lasting")
    assert row["wanted"] == before
    assert row["cause"] == "observing"


@pytest.mark.parametrize(("sleepers", "resting"), [(1, ["sleeping"]), (0, [])])
async def test_any_control_plane_wakes_a_pool_with_waiting_work(
    postgres_server: PostgresServer,
    eventually: Eventually,
    start_control_plane: Callable[..., Any],
    tmp_path: Path,
    sleepers: int,
    resting: list[str],
) -> None:
    name = f"waking_{sleepers}"
    await postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_server.template}")
    url, interval = postgres_server.url(name), {"CONTROL_PLANE__SCALING_INTERVAL_S": "3"}
    (tmp_path / "other").mkdir()
    async with (
        start_control_plane(url, tmp_path, **interval) as leader,
        start_control_plane(url, tmp_path / "other", **interval) as other,
        node(leader, "node-w", "sim"),
        reporting(other.grpc_address, "router-w") as router,
    ):
        await leader.put(f"bases/{DIGEST}", context_tokens_max=2048)
        await leader.put("pools/pool-w", base_digest=DIGEST, engine="sim", replicas_wanted=1)
        bounds = BOUNDS | {"replicas_min": 0, "sleepers_min": sleepers, "idle_s": 1.0}
        await leader.put("pools/pool-w/scaling", **bounds)
        router.demand["pool-w-0"] = 0.0

        async def rests() -> bool:
            row = await _row(leader, "pool-w")
            is_idle = bool(row["decided_at"]) and row["wanted"] == 0
            return is_idle and list((await _states(leader, "pool-w")).values()) == resting

        await eventually(rests, "a pool without requests rests")
        decided_at = (await _row(leader, "pool-w"))["decided_at"]

        async def has_decided() -> bool:
            return (await _row(leader, "pool-w"))["decided_at"] != decided_at

        await eventually(has_decided, "a round has just ended, so the next one is 3 s away")
        router.requests["pool-w-0"], router.queued["pool-w-0"] = 5.0, 5

        async def wakes() -> bool:
            return list((await _states(leader, "pool-w")).values()) == ["ready"]

        await eventually(wakes, "a replica serves")
        changes = (await leader.admin.get("/v1/pools/pool-w/scaling/changes")).json()["data"]
        assert "wake" in {change["cause"] for change in changes}


async def test_a_sleeper_wakes_when_work_waits_and_engines_that_cannot_are_refused(
    plane: ControlPlane, eventually: Eventually
) -> None:
    async with node(plane, "node-z", "sim"), reporting(plane.grpc_address, "router-z") as router:
        await plane.put("pools/pool-z", base_digest=DIGEST, engine="sim", replicas_wanted=1)
        bounds = BOUNDS | {"sleepers_min": 1, "hold_s": 60.0}
        await plane.put("pools/pool-z/scaling", **bounds)
        router.demand["pool-z-0"] = 0.4

        async def sleeps() -> bool:
            row = await _row(plane, "pool-z")
            is_asleep = (row["sleepers"], row["asleep"]) == (1, 1)
            return is_asleep and await _ready(plane, "pool-z") == row["wanted"]

        await eventually(sleeps, "a replica that sleeps beside those that serve")
        states = await _states(plane, "pool-z")
        (sleeper,) = [name for name, state in states.items() if state == "sleeping"]
        router.queued["pool-z-0"] = 50

        async def wakes() -> bool:
            return (await _states(plane, "pool-z"))[sleeper] == "ready"

        await eventually(wakes, "the sleeper that serves")
        del router.demand["pool-z-0"]
    await _pool(plane, "pool-y")
    answer = await plane.admin.put("/v1/pools/pool-y/scaling", json=BOUNDS | {"sleepers_min": 1})
    assert answer.status_code == 400
    assert "cannot sleep" in answer.text


async def test_nodes_are_requested_from_kubernetes_and_empty_ones_are_returned(
    plane: ControlPlane,
    eventually: Eventually,
    sluice: Command,
    api: StandInApi,
) -> None:
    api.add("gpu-node", 1)
    needs = {"accelerators": 1, "is_dedicated": True}
    pool = {"base_digest": DIGEST, "engine": "sim-g", "replicas_wanted": 1, "needs": needs}
    await plane.put("pools/grown", **pool)
    await sluice("set", "grown", "--max", "4", "--actuator", "cloud", status=1)
    await sluice("set", "grown", "--max", "4", "--sleepers", "0", "--actuator", "gpu")
    async with AsyncExitStack() as stack:
        running = 0

        async def serves(replicas: int) -> bool:
            nonlocal running
            while running < api.replicas["sluice", "gpu-node"]:
                await stack.enter_async_context(node(plane, f"gpu-node-{running}", "sim-g", 1))
                running += 1
            return await _ready(plane, "grown") == replicas

        await eventually(lambda: serves(1), "the node that is there has a replica")
        await sluice("pin", "grown", "3")
        await eventually(lambda: serves(3), "nodes come, and replicas on them")
        assert api.writes == [3]
        api.trouble = (403, "Forbidden", "statefulsets.apps is forbidden", {})

        async def is_told() -> bool:
            return "statefulsets/scale" in await sluice("explain", "grown")

        await eventually(is_told, "a refusal is a warning")
        await sluice("pin", "grown", "1")
        await eventually(lambda: serves(1), "replicas go, whatever the actuator says")
        assert api.writes == [3]
        api.trouble = None

        async def is_smaller() -> bool:
            return api.replicas["sluice", "gpu-node"] == 1

        await eventually(is_smaller, "empty nodes are given back")
        assert await _ready(plane, "grown") == 1
        asked = json.loads(await sluice("actuators", "--json"))
        assert [(it["name"], it["nodes_wanted"]) for it in asked] == [("gpu", 1)]
    assert (await plane.admin.delete("/v1/pools/grown/scaling")).status_code == 204
