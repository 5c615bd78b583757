"""The planner, told by hand; and by any order of reports, losses and failures."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from control_plane.distribution.bits import members
from control_plane.distribution.model import (
    STORE,
    Artifact,
    Failure,
    FetchPlan,
    NodePlace,
    NodeReport,
    Order,
    PlannerLimits,
    Priority,
    Trouble,
)
from control_plane.distribution.planner import Planner

MIB = 1024 * 1024
SMALL = Artifact("small", 8, MIB)
LARGE = Artifact("large", 100, MIB)
LIMITS = PlannerLimits(groups_max=32, store_readers_max=4)
HERE, NEAR, FAR = NodePlace("r1", "k1"), NodePlace("r1", "k2"), NodePlace("r2", "k1")


def made(*artifacts: Artifact, limits: PlannerLimits = LIMITS, seed: int = 0) -> Planner:
    planner = Planner(limits, seed)
    for artifact in artifacts:
        planner.add(artifact)
    return planner


def first(node_id: str, place: NodePlace = HERE, boot: str = "1", **held: int) -> NodeReport:
    return NodeReport(node_id, place, boot, held, is_full=True)


def chunks(answer: FetchPlan) -> list[int]:
    return sorted(c for order in answer.orders for c in range(order.start, order.stop))


def sources(answer: FetchPlan) -> set[str]:
    return {order.source for order in answer.orders}


ALL = (1 << SMALL.chunk_count) - 1


def test_an_unheld_artifact_comes_from_the_store_in_disjoint_chunks():
    planner = made(SMALL, limits=replace(LIMITS, seeds=1))
    names = [f"n{i}" for i in range(10)]
    for name in names:
        planner.want(name, "small", Priority.WARMING)
    answers = planner.plan([first(name) for name in names], 0.0)
    asked = [chunk for name in names for chunk in chunks(answers[name])]
    assert sorted(asked) == list(range(8))
    assert sum(bool(answer.orders) for answer in answers.values()) == LIMITS.store_readers_max
    assert all(sources(a) <= {STORE} for a in answers.values())


def test_no_node_is_sent_to_a_silent_peer_until_it_serves():
    planner = made(SMALL)
    planner.want("n", "small", Priority.WARMING)
    silent = replace(first("p", small=ALL), serves=False)
    assert sources(planner.plan([silent, first("n")], 0.0)["n"]) == {STORE}
    assert planner.is_complete("p", "small")
    planner.unwant("n", "small")
    planner.want("n", "small", Priority.WARMING)
    # It is asked for all that it has when that changes, either way.
    changed = NodeReport("p", HERE, "1")
    assert planner.plan([changed], 0.5)["p"].wants_full
    answers = planner.plan([first("p", small=ALL), first("n")], 1.0)
    assert sources(answers["n"]) == {"p"}
    assert planner.plan([replace(changed, serves=False)], 1.5)["p"].wants_full
    answers = planner.plan([silent, first("n")], 2.0)
    assert sources(answers["n"]) == {STORE}


def test_a_peer_of_the_rack_goes_before_one_of_the_region_and_that_before_all_else():
    for others, source in (
        ((HERE, NEAR, FAR), "p0"),
        ((NEAR, FAR), "p0"),
        ((FAR,), "p0"),
        ((), STORE),
    ):
        planner = made(SMALL)
        planner.want("n", "small", Priority.WARMING)
        peers = [first(f"p{i}", place, small=ALL) for i, place in enumerate(others)]
        answer = planner.plan([*peers, first("n", HERE)], 0.0)["n"]
        assert sources(answer) == {source}
        # From afar only a share: others of the region fetch the rest.
        assert len(chunks(answer)) == (8 if {HERE, NEAR} & set(others) else 4)


def test_a_group_that_is_partly_there_is_asked_for_and_not_served():
    planner = made(LARGE)  # groups of 4 chunks
    planner.want("n", "large", Priority.WARMING)
    planner.want("m", "large", Priority.WARMING)
    almost = ((1 << 100) - 1) & ~(1 << 41)
    answers = planner.plan([first("n", large=almost), first("m", NEAR)], 0.0)
    assert answers["n"].orders == (Order("large", 40, 44, STORE, Priority.WARMING),)
    assert all(o.source != "n" or o.start != 40 for o in answers["m"].orders)


def test_the_last_group_may_be_shorter():
    planner = made(Artifact("odd", 98, MIB))
    planner.want("n", "odd", Priority.WARMING)
    planner.want("m", "odd", Priority.WARMING)
    answers = planner.plan([first("n", odd=(1 << 98) - 1), first("m", odd=(1 << 96) - 1)], 0.0)
    assert answers["n"] == FetchPlan()
    assert planner.is_complete("n", "odd")
    assert answers["m"].orders == (Order("odd", 96, 98, "n", Priority.WARMING),)


def test_the_rarest_group_goes_first():
    planner = made(SMALL, limits=replace(LIMITS, downloads_max=1))
    planner.want("n", "small", Priority.WARMING)
    peers = [first(f"p{i}", small=ALL if i == 3 else ALL & ~(1 << 5)) for i in range(6)]
    assert chunks(planner.plan([*peers, first("n")], 0.0)["n"]) == [5]


def test_a_corrupt_source_is_left_at_once_by_everybody():
    planner = made(SMALL)
    for name in ("n", "m"):
        planner.want(name, "small", Priority.WARMING)
    answers = planner.plan([first("bad", small=ALL), first("n"), first("m")], 0.0)
    assert sources(answers["n"]) == sources(answers["m"]) == {"bad"}
    failure = Failure("small", 3, "bad", Trouble.CORRUPT)
    answers = planner.plan(
        [NodeReport("n", HERE, "1", {}, (failure,)), NodeReport("m", HERE, "1")], 0.5
    )
    assert sources(answers["n"]) | sources(answers["m"]) == {STORE}
    assert len(chunks(answers["n"])) == len(chunks(answers["m"])) == 4


def test_a_lost_node_gets_no_more_readers():
    planner = made(SMALL)
    planner.want("n", "small", Priority.WARMING)
    assert sources(planner.plan([first("p", small=ALL), first("n")], 0.0)["n"]) == {"p"}
    assert sources(planner.plan([NodeReport("n", HERE, "1")], 4.0)["n"]) == {"p"}
    assert sources(planner.plan([NodeReport("n", HERE, "1")], 5.0)["n"]) == {STORE}
    assert planner.plan([NodeReport("p", HERE, "1")], 6.0)["p"].wants_full
    planner.plan([first("p", small=ALL)], 6.5)
    assert planner.is_complete("p", "small")


def test_a_restart_keeps_the_chunks_that_are_there_and_forgets_the_orders():
    planner = made(SMALL)
    planner.want("n", "small", Priority.WARMING)
    planner.plan([first("p", small=ALL), first("n")], 0.0)
    answer = planner.plan([first("n", boot="2", small=0b111)], 1.0)["n"]
    assert chunks(answer) == [3, 4, 5, 6, 7]
    planner.plan([NodeReport("n", HERE, "2", {"small": ALL})], 2.0)
    assert planner.is_complete("n", "small")
    assert planner.plan([NodeReport("n", HERE, "2")], 3.0)["n"] == FetchPlan()


def test_a_planner_that_knows_nothing_asks_for_everything():
    planner = made(SMALL)
    assert planner.plan([NodeReport("n", HERE, "1", {"small": 1})], 0.0) == {
        "n": FetchPlan(wants_full=True)
    }


def test_a_lost_answer_is_repeated_and_an_old_order_is_taken_back():
    planner = made(SMALL)
    planner.want("n", "small", Priority.WARMING)
    answer = planner.plan([first("p", small=ALL), first("n")], 0.0)["n"]
    assert planner.plan([NodeReport("n", HERE, "1")], 0.5)["n"] == answer
    for second in range(1, 31):
        again = planner.plan([NodeReport("p", HERE, "1"), NodeReport("n", HERE, "1")], second)["n"]
        assert chunks(again) == list(range(8))


def test_the_needed_go_before_the_warming_and_prefetch_leaves_room():
    limits = replace(LIMITS, down_bytes_s=8 * MIB, up_bytes_s=80 * MIB, horizon_s=1.0)
    names = ("prefetched", "warming", "needed")
    artifacts = [Artifact(name, 16, MIB) for name in names]
    planner = made(*artifacts, limits=limits)
    whole = (1 << 16) - 1
    peer = first("p", **dict.fromkeys(names, whole))
    planner.want("n", "prefetched", Priority.PREFETCH)
    answer = planner.plan([peer, first("n")], 0.0)["n"]
    assert len(answer.orders) == 4
    planner.want("n", "warming", Priority.WARMING)
    planner.want("n", "needed", Priority.NEEDED)
    answer = planner.plan([NodeReport("n", HERE, "1")], 0.5)["n"]
    assert [order.digest for order in answer.orders] == ["needed"] * 4 + ["prefetched"] * 4
    planner.unwant("n", "prefetched")
    answer = planner.plan([NodeReport("n", HERE, "1")], 1.0)["n"]
    assert [order.digest for order in answer.orders] == ["needed"] * 8


def test_artifacts_of_one_priority_share_a_link():
    limits = replace(LIMITS, down_bytes_s=8 * MIB, up_bytes_s=80 * MIB, horizon_s=1.0)
    planner = made(Artifact("a", 16, MIB), Artifact("b", 16, MIB), limits=limits)
    for digest in ("a", "b"):
        planner.want("n", digest, Priority.WARMING)
    whole = (1 << 16) - 1
    answer = planner.plan([first("p", a=whole, b=whole), first("n")], 0.0)["n"]
    assert sorted(order.digest for order in answer.orders) == ["a"] * 4 + ["b"] * 4


def test_looks_in_vain_for_a_busy_source_leave_some_for_others():
    few = replace(LIMITS, uploads_max=1, tries_max=40)
    planner = made(SMALL, LARGE, limits=few)
    names = [f"n{i}" for i in range(30)]
    for name in names:
        planner.want(name, "small", Priority.WARMING)
    planner.want("last", "large", Priority.PREFETCH)
    holders = [first("busy", small=ALL), first("also", NEAR, small=ALL), first("idle", large=1)]
    planner.plan(holders, 0.0)
    asking = [first(name) for name in names]
    answers = planner.plan([*asking, first("last")], 0.1)
    assert sum(len(answers[name].orders) for name in names) == 2
    assert answers["last"].orders


def test_it_follows_from_the_seed_alone():
    def answers(seed: int, *, is_reversed: bool = False) -> dict[str, FetchPlan]:
        planner = made(LARGE, seed=seed)
        names = [f"n{i}" for i in range(40)]
        for name in names:
            planner.want(name, "large", Priority.WARMING)
        reports = [first(name) for name in names]
        planner.plan(reports[::-1] if is_reversed else reports, 0.0)
        held = [NodeReport(name, HERE, "1", {"large": 0xFF << i}) for i, name in enumerate(names)]
        return planner.plan(held[::-1] if is_reversed else held, 0.5)

    assert answers(1) == answers(1, is_reversed=True)
    assert answers(1) != answers(2)


NAMES = st.sampled_from([f"n{i}" for i in range(6)])
PLACES = {f"n{i}": (HERE, NEAR, FAR)[i % 3] for i in range(6)}


class Fleet(RuleBasedStateMachine):
    """Nodes obey, fail, restart and vanish as they like; what is planned stays within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = replace(LIMITS, downloads_max=5, uploads_max=4, store_readers_max=2)
        self.planner = made(SMALL, LARGE, limits=self.limits)
        self.now_s = 0.0
        self.held = {name: {"small": 0, "large": 0} for name in PLACES}
        self.boots = dict.fromkeys(PLACES, 0)
        self.answers: dict[str, FetchPlan] = {}
        self.full = set(PLACES)
        for name in PLACES:
            self.planner.want(name, "large", Priority.PREFETCH)
            self.planner.want(name, "small", Priority.WARMING)

    def report(self, names: set[str], failures: dict[str, tuple[Failure, ...]]) -> None:
        reports = [
            NodeReport(
                name,
                PLACES[name],
                str(self.boots[name]),
                dict(self.held[name]),
                failures.get(name, ()),
                is_full=name in self.full,
            )
            for name in names
        ]
        answers = self.planner.plan(reports, self.now_s)
        assert answers.keys() == names
        self.full = (self.full - names) | {n for n, a in answers.items() if a.wants_full}
        self.answers.update(answers)

    @rule(names=st.sets(NAMES), seconds=st.sampled_from([0.1, 0.5, 6.0, 40.0]))
    def time(self, names: set[str], seconds: float) -> None:
        self.now_s += seconds
        self.report(names, {})

    @rule(name=NAMES, count=st.integers(1, 5))
    def fetch(self, name: str, count: int) -> None:
        for order in self.answers.get(name, FetchPlan()).orders[:count]:
            self.held[name][order.digest] |= (1 << order.stop) - (1 << order.start)
        self.report({name}, {})

    @precondition(lambda self: any(answer.orders for answer in self.answers.values()))
    @rule(name=NAMES, trouble=st.sampled_from(list(Trouble)))
    def fail(self, name: str, trouble: Trouble) -> None:
        orders = self.answers.get(name, FetchPlan()).orders[:2]
        failures = tuple(Failure(o.digest, o.start, o.source, trouble) for o in orders)
        self.report({name}, {name: failures})

    @rule(name=NAMES)
    def restart(self, name: str) -> None:
        self.boots[name] += 1
        self.full.add(name)
        self.answers.pop(name, None)

    @rule(name=NAMES, chunk=st.integers(0, 7))
    def evict(self, name: str, chunk: int) -> None:
        self.held[name]["small"] &= ~(1 << chunk)

    @invariant()
    def orders_are_within_bounds(self) -> None:
        for name, answer in self.answers.items():
            assert len(answer.orders) <= self.limits.downloads_max
            assert len({(o.digest, o.start) for o in answer.orders}) == len(answer.orders)
            assert name not in sources(answer)

    def teardown(self) -> None:
        for _ in range(400):
            self.now_s += 1.0
            for name, answer in self.answers.items():
                for order in answer.orders:
                    self.held[name][order.digest] |= (1 << order.stop) - (1 << order.start)
            self.report(set(PLACES), {})
            if all(
                len(list(members(held["large"]))) == LARGE.chunk_count and held["small"] == ALL
                for held in self.held.values()
            ):
                return
        raise AssertionError("not everybody has everything")


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=30, stateful_step_count=30)
