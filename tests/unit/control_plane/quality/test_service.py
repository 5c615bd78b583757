"""What nodes are told of many tenants' prompts, and what becomes of many answers."""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from control_plane.database import DatabaseDownError
from control_plane.quality.askings import Prompt
from control_plane.quality.metrics import QualityMetrics
from control_plane.quality.service import Quality
from control_plane.quality.shares import NODE_BYTES_MAX, NODE_PROMPTS_MAX, ROUND_S
from control_plane.quality.verdicts import ReplacementBudget
from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.control.v1 import control_pb2 as wire

BASE, ADAPTER = "b" * 64, "a" * 64
TENANTS, PROMPTS = 200, 32


@dataclass
class StubFeed:
    state: ControlState = field(default_factory=ControlState)
    is_loaded: bool = True


class Site:
    """A quality guard without a database, and the time of its clock."""

    def __init__(self) -> None:
        self.feed, self.unix_s = StubFeed(), 1e9
        self.feed.state.pools["p"] = wire.Pool(id="p", base_digest=BASE, engine="sim")
        self.registry = CollectorRegistry()
        meter = QualityMetrics(self.registry)
        feed: Any = self.feed
        database: Any = None
        self.quality: Any = Quality(database, feed, meter, ReplacementBudget(), lambda: self.unix_s)

    def add_tenants(self) -> None:
        for tenant in range(TENANTS):
            name = f"tenant-{tenant:03}/model"
            self.feed.state.models[name] = wire.Model(
                id=name,
                base_digest=BASE,
                adapter_digest=ADAPTER,
                owner_tenant_id=f"tenant-{tenant:03}",
            )
        self.quality._prompts = tuple(
            Prompt(f"golden_{model}_{n}", model, (150_000,) * 512, 16, 60)
            for model in self.feed.state.models
            for n in range(PROMPTS)
        )


def test_however_many_prompts_there_are_a_node_is_told_few_and_in_time_all_tenants() -> None:
    site = Site()
    site.add_tenants()
    seen: set[str] = set()
    slots = NODE_PROMPTS_MAX - 1
    for _ in range(-(-TENANTS // slots) + 1):
        told = agent.SyncResponse(golden_prompts=site.quality.prompts_for([BASE]))
        assert len(told.golden_prompts) == NODE_PROMPTS_MAX
        assert told.ByteSize() <= NODE_BYTES_MAX
        assert told.golden_prompts[0].id.startswith("default/")
        seen |= {one.id.split("/")[0] for one in told.golden_prompts[1:]}
        site.unix_s += ROUND_S
    assert len(seen) == TENANTS, "everybody had a turn"


def test_the_prompts_of_nodes_are_computed_once_per_round() -> None:
    site = Site()
    site.add_tenants()
    first = site.quality.prompts_for([BASE])
    assert site.quality.prompts_for([BASE]) is first
    site.unix_s += ROUND_S
    assert site.quality.prompts_for([BASE]) != first
    assert site.quality.prompts_for(["c" * 64]) == []


def test_answers_to_prompts_of_another_round_still_count() -> None:
    site = Site()
    site.add_tenants()
    told = {one.id for one in site.quality.prompts_for([BASE])}
    other = next(one for one in sorted(site.quality._board.askings) if one not in told)
    message = agent.SyncRequest(node_id="n")
    for prompt_id in (other, "nobody asked"):
        message.golden_results.add(replica_id="r", prompt_id=prompt_id, token_ids=[1])
    site.quality.take(message)
    assert [report.asking.id for report in site.quality._reports.waiting] == [other]


def test_a_change_of_the_state_is_seen_soon() -> None:
    site = Site()
    assert len(site.quality.prompts_for([BASE])) == 1
    site.add_tenants()
    deadline_s = time.monotonic() + 60
    while len(site.quality.prompts_for([BASE])) == 1:
        assert time.monotonic() < deadline_s


def test_answers_with_impossible_ids_are_dropped_and_counted() -> None:
    site = Site()
    (prompt,) = site.quality.prompts_for([BASE])
    message = agent.SyncRequest(node_id="n")
    for replica_id in ("x\0", "", "x" * 200, "r"):
        message.golden_results.add(replica_id=replica_id, prompt_id=prompt.id, token_ids=[1])
    site.quality.take(message)
    message.node_id = "n\0"
    site.quality.take(message)
    assert [report.replica_id for report in site.quality._reports.waiting] == ["r"]
    name = "control_plane_quality_answers_dropped_total"
    assert site.registry.get_sample_value(name, {"reason": "id"}) == 7


async def test_answers_that_cannot_be_written_do_not_keep_others_from_being_judged() -> None:
    site = Site()
    judged: list[Any] = []

    class Idle:
        async def run_singly(self, _: Any) -> Any:
            return {}

    async def refuse() -> None:
        raise DatabaseDownError("a lock is held")

    async def turn(askings: Any) -> list[Any]:
        judged.append(askings)
        return []

    quality = site.quality
    quality._database, quality._mark = Idle(), {}
    quality._reports.write, quality._judge = (
        refuse,
        SimpleNamespace(turn=turn, deferrals=SimpleNamespace(parked=0)),
    )
    await quality._step()
    assert judged == [quality._board.askings]
