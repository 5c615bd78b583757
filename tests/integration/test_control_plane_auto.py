"""Policies of `auto` on a real PostgreSQL: refused, audited, told to gateways."""

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from sluice.auto.features import SCHEME
from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

TENANT = "auto-of"
POLICY = f"/v1/auto-policies/{TENANT}"
BASE = "a7" * 32
SMALL = {"model": "auto-small", "prompt_price": 0.1, "output_price": 0.4}
LARGE = {"model": "auto-large", "prompt_price": 1, "output_price": 4, "cached_price": 0.1}


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane) -> Any:
    plane = shared_control_plane
    await plane.put("tiers/auto")
    for tenant in (TENANT, "auto-other"):
        await plane.put(f"tenants/{tenant}", tier_id="auto")
    await plane.put(f"bases/{BASE}", context_tokens_max=64)
    await plane.put("pools/auto", base_digest=BASE, engine="sim", replicas_wanted=0)
    for model in ("auto-small", "auto-large"):
        await plane.put(f"models/{model}", base_digest=BASE, pool_id="auto")
    await plane.put(
        "models/auto-secret", base_digest=BASE, pool_id="auto", owner_tenant_id="auto-other"
    )
    return plane


async def test_a_policy_is_told_to_gateways_and_audited(plane, eventually) -> None:
    cell = {"cluster": 0, "model": "auto-small", "release": "r", "good": 3.0, "bad": 1.0}
    made = await plane.admin.put(
        POLICY, json={"candidates": [SMALL, LARGE], "miss_price": 0.01, "cells": [cell]}
    )
    assert made.status_code == 201, made.text
    assert [it["cached_price"] for it in made.json()["candidates"]] == [0.1, 0.1]
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "auto")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await eventually(lambda: TENANT in watcher.state.auto_policies, "the policy is known")
        told = watcher.state.auto_policies[TENANT]
        assert [it.model for it in told.candidates] == ["auto-small", "auto-large"]
        assert (told.miss_price, told.explored_share, told.scheme) == (0.01, 0.01, SCHEME)
        assert (told.cells[0].good, told.cells[0].release) == (3.0, "r")
        rows = await plane.admin.get("/v1/audit", params={"object_id": TENANT})
        assert "auto-policies" in {it["kind"] for it in rows.json()["data"]}
        assert (await plane.admin.delete(POLICY)).status_code == 204
        await eventually(lambda: TENANT not in watcher.state.auto_policies, "it is gone")
        running.cancel()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"candidates": []}, "candidates"),
        ({"candidates": [SMALL, SMALL]}, "twice"),
        ({"candidates": [{"model": "auto-secret"}]}, "may use"),
        ({"candidates": [{"model": "no-such"}]}, "may use"),
        ({"candidates": [SMALL], "pin": "auto-large"}, "no candidate"),
        ({"candidates": [SMALL | {"published": "gpt-0"}]}, "known: llama"),
        ({"candidates": [SMALL], "quality_min": 1.5}, "quality_min"),
        ({"candidates": [SMALL], "price_max": -1}, "price_max"),
        (
            {
                "candidates": [SMALL],
                "scheme": SCHEME + 1,
                "cells": [{"cluster": 0, "model": "auto-small", "good": 1, "bad": 1}],
            },
            "Learn it anew",
        ),
        (
            {
                "candidates": [SMALL],
                "cells": [{"cluster": 99, "model": "auto-small", "good": 1, "bad": 1}],
            },
            "cluster",
        ),
    ],
)
async def test_a_policy_that_cannot_hold_is_refused(plane, body, message: str) -> None:
    answer = await plane.admin.put(POLICY, json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.text
