"""Sets of rules on a real PostgreSQL: refused, staged, told to gateways."""

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio

from sluice.watch import ControlWatcher
from sluice.wire.control.v1 import control_pb2 as wire

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

TENANT = "guard-of"
SET = "/v1/guard-sets/guard-pii"
MAIL = {"id": "mail", "action": "rewrite", "named": "email"}


@pytest_asyncio.fixture(loop_scope="session")
async def plane(shared_control_plane) -> Any:
    await shared_control_plane.put("tiers/guard")
    await shared_control_plane.put(f"tenants/{TENANT}", tier_id="guard")
    return shared_control_plane


def _body(*rules: object, **fields: object) -> dict[str, object]:
    return {"owner_tenant_id": TENANT, "rules": list(rules), **fields}


async def test_rules_act_only_after_they_were_in_shadow(plane, eventually) -> None:
    early = await plane.admin.put(SET, json=_body(MAIL, active_version=1))
    assert early.status_code == 409, early.text
    assert "in shadow" in early.json()["detail"]
    made = await plane.admin.put(SET, json=_body(MAIL))
    assert made.status_code == 201, made.text
    assert (made.json()["version"], made.json()["active_version"]) == (1, 0)
    acting = await plane.admin.put(SET, json=_body(MAIL, active_version=1))
    assert (acting.json()["version"], acting.json()["active_version"]) == (1, 1)
    word = {"id": "word", "action": "block", "words": ["secret"], "targets": ["prompt", "answer"]}
    both = await plane.admin.put(SET, json=_body(MAIL, word, active_version=1))
    assert (both.json()["version"], both.json()["active_version"]) == (2, 1)
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "guard")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        sets = lambda: watcher.state.guard_sets.get("guard-pii", wire.GuardSet())  # noqa: E731
        # The first snapshot may be older than the second version.
        await eventually(lambda: len(sets().rules) == 2, "the second version is known")
        told = sets()
        assert [it.id for it in told.rules] == ["mail", "word"]
        assert [it.id for it in told.active_rules] == ["mail"]
        assert (await plane.admin.put(SET, json=_body(MAIL, word))).status_code == 200
        await eventually(lambda: not watcher.state.guard_sets["guard-pii"].active_rules, "none act")
        query = {"kind": "guard-sets", "object_id": "guard-pii"}
        rows = (await plane.admin.get("/v1/audit", params=query)).json()["data"]
        assert "secret" not in json.dumps(rows)  # it has how many rules there are
        assert (await plane.admin.delete(SET)).status_code == 204
        await eventually(lambda: "guard-pii" not in watcher.state.guard_sets, "the set is gone")
        running.cancel()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"action": "rewrite", "expression": "(a"}, "unterminated"),
        ({"action": "rewrite", "expression": "(a{1000}){1000}"}, "make its repeats smaller"),
        ({"action": "rewrite", "expression": "(?=a)b"}, "look-around"),
        ({"action": "rewrite", "named": "hair"}, "not one of"),
        ({"action": "rewrite"}, "exactly one of"),
        ({"action": "rewrite", "words": ["a"], "targets": ["prompt"]}, "block or count prompts"),
        ({"action": "melt", "words": ["a"]}, "block"),
        ({"action": "rewrite", "classifier": "shipped"}, "judges whole sentences"),
        ({"action": "block", "classifier": "shipped", "words": ["a"]}, "exactly one of"),
        ({"action": "block", "classifier": "shipped", "threshold": 0}, "threshold"),
        ({"action": "block", "classifier": "a b"}, "classifier"),
    ],
)
async def test_invalid_guard_rules_are_refused(
    plane, rule: dict[str, object], message: str
) -> None:
    answer = await plane.admin.put(SET, json=_body({"id": "one", **rule}))
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["detail"]


async def test_classifiers_and_their_fence_are_told_to_gateways(plane, eventually) -> None:
    rude = {"id": "rude", "action": "block", "classifier": "shipped", "category": "hate",
            "threshold": 0.7}  # fmt: skip
    path, fields = "/v1/guard-sets/guard-fence", {"fence": "tokens", "fence_tokens": 8}
    made = await plane.admin.put(path, json=_body(rude, **fields, is_closed_on_failure=True))
    assert made.status_code == 201, made.text
    wrong = await plane.admin.put(path, json=_body(rude, fence="wall"))
    assert wrong.status_code == 400, wrong.text
    watcher = ControlWatcher(plane.grpc_address, wire.ROLE_GATEWAY, "guard-fence")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await eventually(lambda: "guard-fence" in watcher.state.guard_sets, "the set is known")
        told = watcher.state.guard_sets["guard-fence"]
        assert (told.fence, told.fence_tokens, told.is_closed_on_failure) == ("tokens", 8, True)
        [rule] = told.rules
        assert (rule.classifier, rule.category, rule.threshold) == ("shipped", "hate", 0.7)
        running.cancel()
    assert (await plane.admin.delete(path)).status_code == 204


async def test_a_set_of_10_mb_is_refused(plane) -> None:
    words = [f"{number:0110}" for number in range(90_000)]
    large = {"id": "large", "action": "count", "words": words}
    answer = await plane.admin.put(SET, json=_body(large))
    assert answer.status_code == 413, answer.text
    bounded = {"id": "large", "action": "count", "words": words[:20_000]}
    answer = await plane.admin.put(SET, json=_body(bounded))
    assert answer.status_code == 400, answer.text
    assert "split the set" in answer.json()["detail"]
