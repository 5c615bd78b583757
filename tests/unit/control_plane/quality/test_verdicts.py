"""From answers to askings, quarantines, alerts and what people are shown."""

from collections import Counter
from dataclasses import replace
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.quality import verdicts
from control_plane.quality.askings import (
    DEFAULT_TOKENS,
    ROLLOUT_EVERY_S,
    Asking,
    Prompt,
    asking_id,
    current,
)
from control_plane.quality.judgement import Answer, RightAnswerSource, Truth
from control_plane.quality.results import RESULT_FIELDS, results
from control_plane.quality.verdicts import (
    Alert,
    HeldReplica,
    RecordedAnswer,
    ReplacementBudget,
    Ruling,
    Serving,
    Spent,
    examine,
    rule,
)
from sluice.detector.consensus import Text
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

BASE, OTHER, V1, V2 = (letter * 64 for letter in "abcd")
RIGHT, LIE = Text((1, 2, 3), (-0.1, -0.1, -0.1)), Text((1, 9, 9), (-0.1, -0.1, -0.1))


def a_state() -> ControlState:
    state = ControlState()
    for pool_id, base, engine in (("p", BASE, "sim"), ("q", OTHER, "sim"), ("e", V1, "embed")):
        state.pools[pool_id] = wire.Pool(id=pool_id, base_digest=base, engine=engine)
    state.models["m"] = wire.Model(id="m", base_digest=BASE, adapter_digest=V1, release="v1")
    for name, digest in (("v1", V1), ("v2", V2)):
        key = f"m@{name}"
        state.releases[key] = wire.Release(
            id=key, model_id="m", base_digest=BASE, adapter_digest=digest
        )
    return state


def test_every_base_that_generates_text_is_asked_without_set_up() -> None:
    found = current(a_state(), ())
    assert {one.base_digest for one in found.values()} == {BASE, OTHER}
    assert {one.token_ids for one in found.values()} == {DEFAULT_TOKENS}
    assert max(DEFAULT_TOKENS) < 256
    assert {(one.every_s, one.owner) for one in found.values()} == {(60, "")}


def test_a_base_with_a_known_tokenizer_is_asked_in_words() -> None:
    found = current(a_state(), (), {BASE: ((1, 2), (3,))})
    asked = {(one.id, one.token_ids) for one in found.values() if one.base_digest == BASE}
    assert asked == {
        (asking_id("default-1", BASE, ""), (1, 2)),
        (asking_id("default-2", BASE, ""), (3,)),
    }
    assert {one.prompt_id for one in found.values()} == {"default"}


def test_a_models_prompts_follow_its_releases() -> None:
    state = a_state()
    prompts = [
        Prompt("g1", "m", (5, 6), 4, 60, expected=(7,)),
        Prompt("g2", "m", (5, 6), 4, 60),
        Prompt("g3", "gone", (5, 6), 4, 60),
    ]
    only_v1 = {asking_id(prompt, BASE, V1) for prompt in ("g1", "g2")}
    found = current(state, prompts)
    assert {one for one in found if one.startswith("g")} == only_v1
    state.splits["m"] = wire.Split(id="m", control="v1", canary="v2", share=100)
    found = current(state, prompts)
    both = {asking_id(prompt, BASE, digest) for prompt in ("g1", "g2") for digest in (V1, V2)}
    assert {one for one in found if one.startswith("g")} == both
    assert found[asking_id("g1", BASE, V2)].every_s == ROLLOUT_EVERY_S
    assert found[asking_id("g2", BASE, V2)].every_s == 60, "nothing is expected of it"
    waited_for = {one.id for one in found.values() if one.is_rollout}
    assert waited_for == {asking_id("g1", BASE, digest) for digest in (V1, V2)}
    assert {one.owner for one in found.values()} == {""}
    state.models["m"].owner_tenant_id = "acme"
    found = current(state, prompts)
    assert {one.owner for one in found.values() if one.prompt_id != "default"} == {"acme"}


ASKING = Asking("default/aa", "default", "", BASE, "", (1,), 4, 60)
GROUP = ("p", ASKING.id)


NOTHING = Spent({}, {})


def ruled(
    pool: dict[str, list[Text]],
    known: Truth | None = None,
    quarantined: int = 0,
    *,
    asking: Asking = ASKING,
    spent: Spent = NOTHING,
    node: str = "",
) -> Ruling:
    number = count(1)
    kept = [
        RecordedAnswer(name, Answer(next(number), text), 1000 + index)
        for name, texts in pool.items()
        for index, text in enumerate(texts)
    ]
    serving = [Serving(name, "p", node or f"node-of-{name}") for name in pool]
    all_ = {GROUP: kept, ("p", "of yesterday"): kept}
    truths = {} if known is None else {GROUP: known}
    cases, failures = examine({asking.id: asking}, all_, serving, truths)
    assert not failures
    new_id = (f"q{number}" for number in count(1)).__next__
    return rule(cases, all_, serving, {"p": quarantined}, spent, ReplacementBudget(2, 3), new_id)


def test_a_quarantine_names_its_evidence() -> None:
    ruling = ruled({"r0": [LIE, LIE, RIGHT], "r1": [RIGHT] * 3, "r2": [RIGHT] * 3})
    (case,) = ruling.quarantines
    assert (case.replica_id, case.node_id, case.reason) == ("r0", "node-of-r0", "tokens")
    evidence = case.evidence
    assert evidence["right"] == {
        "token_ids": [1, 2, 3],
        "logprobs": [-0.1, -0.1, -0.1],
        "source": "consensus",
    }
    assert (evidence["agreeing"], evidence["asked"], evidence["deviations"]) == (2, 3, 2)
    assert [answer["differs_in"] for answer in evidence["answers"]] == ["tokens", "tokens", None]
    assert evidence["answers"][0]["asked_at_unix_ms"] == 1000
    assert ruling.deviations == {"tokens": 2}
    assert ruling.alerts[GROUP] == {}
    assert ruling.learned[GROUP].text.token_ids == (1, 2, 3)


def test_a_replica_that_must_stay_is_an_alert() -> None:
    pool = {"r0": [LIE] * 3, "r1": [RIGHT] * 3, "r2": [RIGHT] * 3}
    ruling = ruled(pool, quarantined=1)
    assert ruling.quarantines == ()
    assert ruling.alerts[GROUP] == {Alert.SPARED: ("r0",)}
    lonely = ruled({"r0": [LIE] * 3}, Truth(RIGHT, RightAnswerSource.HISTORY))
    assert (lonely.quarantines, lonely.alerts[GROUP]) == ((), {Alert.SPARED: ("r0",)})
    split = ruled({"r0": [LIE] * 3, "r1": [LIE] * 3, "r2": [RIGHT] * 3, "r3": [RIGHT] * 3})
    assert (split.quarantines, set(split.alerts[GROUP])) == ((), {Alert.SPLIT})
    changed = ruled(
        {name: [LIE] * 3 for name in ("r0", "r1", "r2")}, Truth(RIGHT, RightAnswerSource.CONSENSUS)
    )
    assert changed.alerts[GROUP] == {Alert.CHANGED: ("p",)}
    assert changed.learned == {}


def pool_of(liars: int, honest: int) -> dict[str, list[Text]]:
    pool = {f"liar-{number}": [LIE] * 3 for number in range(liars)}
    return pool | {f"honest-{number}": [RIGHT] * 3 for number in range(honest)}


def test_a_tenants_prompts_quarantine_no_replica() -> None:
    owned = replace(ASKING, owner="acme", model_id="acme/model")
    ruling = ruled(pool_of(1, 5), asking=owned)
    assert (ruling.quarantines, ruling.held) == ((), ())
    assert ruling.alerts[GROUP] == {Alert.TENANT: ("liar-0",)}
    assert ruling.deviations == {"tokens": 3}, "told all the same"
    assert ruling.learned[GROUP].text == RIGHT
    expecting = replace(owned, expected=(7,))
    assert set(ruled(pool_of(0, 3), asking=expecting).alerts[GROUP]) == {Alert.TENANT}
    split = ruled({"r0": [LIE], "r1": [RIGHT], "r2": [Text((4,))]}, asking=owned)
    assert split.alerts[GROUP] == {Alert.TENANT: ("p",)}
    assert ruled(pool_of(0, 3), asking=owned).alerts[GROUP] == {}


def test_wrong_replicas_leave_beyond_the_budget_of_a_pool_and_are_not_replaced() -> None:
    assert ruled(pool_of(2, 10)).held == ()
    ruling = ruled(pool_of(3, 10))
    assert [case.replica_id for case in ruling.quarantines] == ["liar-0", "liar-1", "liar-2"]
    assert ruling.held == (HeldReplica("liar-2", "p", "node-of-liar-2", "pool"),)
    assert ruling.alerts[GROUP] == {Alert.HELD: ("liar-2",)}
    assert len(ruled(pool_of(1, 5), spent=Spent({"p": 5}, {})).held) == 1
    assert ruled(pool_of(1, 5), spent=Spent({"another": 5}, {})).held == ()


def test_wrong_replicas_leave_beyond_the_budget_of_a_node() -> None:
    ruling = ruled(pool_of(2, 10), node="n", spent=Spent({}, {"n": 2}))
    assert len(ruling.quarantines) == 2
    assert ruling.held == (HeldReplica("liar-1", "p", "n", "node"),)


def test_a_release_returns_its_place_in_the_budget() -> None:
    budget = ReplacementBudget(pool_hour=3, node_day=3)
    of_pool, of_node = {"p": 5, "q": 3}, {"n": 4, "m": 3}
    held = Spent(of_pool, of_node, of_pool, of_node).holdback(budget)
    assert (held.pools, held.nodes) == ({"p": 2}, {"n"})
    held = Spent(of_pool, of_node, {"p": 1}, {"n": 3}).holdback(budget)
    assert (held.pools, held.nodes) == ({"p": 1}, frozenset())
    assert Spent(of_pool, of_node).holdback(budget).pools == {}


@settings(max_examples=60)
@given(
    liars=st.integers(0, 12),
    honest=st.integers(0, 12),
    quarantined=st.integers(0, 8),
    of_pool=st.integers(0, 4),
    nodes=st.integers(1, 4),
)
def test_every_limit_holds_at_once(liars, honest, quarantined, of_pool, nodes) -> None:
    pool, truth = pool_of(liars, honest), Truth(RIGHT, RightAnswerSource.HISTORY)
    serving = [Serving(name, "p", f"n{index % nodes}") for index, name in enumerate(pool)]
    number = count(1)
    kept = [
        RecordedAnswer(name, Answer(next(number), t), 0) for name, ts in pool.items() for t in ts
    ]
    cases, _ = examine({ASKING.id: ASKING}, {GROUP: kept}, serving, {GROUP: truth})
    spent = Spent({"p": of_pool}, {"n0": 1})
    ruling = rule(
        cases, {GROUP: kept}, serving, {"p": quarantined}, spent, ReplacementBudget(2, 2), str
    )
    taken = [case.replica_id for case in ruling.quarantines]
    assert not taken or quarantined + len(taken) <= (len(pool) + quarantined) // 3
    assert len(taken) < max(1, len(pool)), "never the last one"
    at = Counter({"n0": 1}) + Counter(case.node_id for case in ruling.quarantines)
    held = [one for one in ruling.held if one.budget == "node"]
    assert len(held) == sum(max(0, many - 2) for many in at.values())
    assert {one.replica_id for one in ruling.held} <= set(taken)
    assert len(taken) - len(ruling.held) <= max(0, 2 - of_pool)


def test_one_group_that_cannot_be_judged_leaves_the_others_alone(monkeypatch) -> None:
    honest = verdicts.judge

    def judge(answers, known, expected, **options):
        if expected == (666,):
            raise ZeroDivisionError
        return honest(answers, known, expected, **options)

    monkeypatch.setattr(verdicts, "judge", judge)
    bad = replace(ASKING, id="bad", expected=(666,))
    kept = [RecordedAnswer("r0", Answer(1, RIGHT), 0)]
    askings = {ASKING.id: ASKING, "bad": bad}
    groups = {("p", "bad"): kept, GROUP: kept}
    cases, failures = examine(askings, groups, [Serving("r0", "p", "n")], {})
    assert set(cases) == {GROUP}
    assert {group: type(error) for group, error in failures.items()} == {
        ("p", "bad"): ZeroDivisionError
    }


def test_answers_of_replicas_that_do_not_serve_count_for_nothing() -> None:
    kept = [RecordedAnswer(name, Answer(n, LIE), 0) for n, name in enumerate(("x", "y", "z", "r0"))]
    all_, serving = {GROUP: kept}, [Serving("r0", "p", "n")]
    cases, _ = examine({ASKING.id: ASKING}, all_, serving, {})
    ruling = rule(cases, all_, serving, {}, NOTHING, ReplacementBudget(), str)
    assert (ruling.quarantines, ruling.deviations, ruling.learned) == ((), {}, {})


def test_operators_see_the_newest_answers_beside_the_right_one() -> None:
    kept = [
        RecordedAnswer("r0", Answer(9, LIE), 90),
        RecordedAnswer("r0", Answer(5, None), 50),
        RecordedAnswer("r1", Answer(8, RIGHT), 80),
        RecordedAnswer("r2", Answer(7, None), 70),
    ]
    rows = results(
        {GROUP: kept}, {GROUP: Truth(RIGHT, RightAnswerSource.HISTORY)}, {7: "no such adapter"}
    )
    assert [tuple(row) for row in rows] == [RESULT_FIELDS] * 3
    assert [(row["replica_id"], row["differs_in"]) for row in rows] == [
        ("r0", "tokens"),
        ("r1", None),
        ("r2", None),
    ]
    assert rows[0]["token_ids"] == [1, 9, 9]
    assert rows[0]["right"] == [1, 2, 3]
    assert (rows[2]["token_ids"], rows[2]["error"]) == (None, "no such adapter")
