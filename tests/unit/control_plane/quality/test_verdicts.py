"""From answers to askings, quarantines, alerts and what people are shown."""

from itertools import count

from control_plane.quality.askings import (
    DEFAULT_TOKENS,
    ROLLOUT_EVERY_S,
    Asking,
    Prompt,
    asking_id,
    by_base,
    current,
)
from control_plane.quality.consensus import Answer, Source, Text, Truth
from control_plane.quality.results import RESULT_FIELDS, results
from control_plane.quality.verdicts import Alert, Kept, Ruling, Serving, rule
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
    told = by_base(found)
    assert [prompt.every_s for prompt in told[BASE]] == [60]


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
    assert by_base(found)[BASE][0].token_ids == list(DEFAULT_TOKENS), "the default first"


ASKING = Asking("default/aa", "default", "", BASE, "", (1,), 4, 60)
GROUP = ("p", ASKING.id)


def ruled(pool: dict[str, list[Text]], known: Truth | None = None, quarantined: int = 0) -> Ruling:
    number = count(1)
    kept = [
        Kept(name, Answer(next(number), text), 1000 + index)
        for name, texts in pool.items()
        for index, text in enumerate(texts)
    ]
    return rule(
        {ASKING.id: ASKING},
        {GROUP: kept, ("p", "of yesterday"): kept},
        [Serving(name, "p", f"node-of-{name}") for name in pool],
        {} if known is None else {GROUP: known},
        {"p": quarantined},
        lambda: "q1",
    )


def test_a_quarantine_says_what_it_rests_on() -> None:
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


def test_who_may_not_be_taken_out_is_an_alert() -> None:
    pool = {"r0": [LIE] * 3, "r1": [RIGHT] * 3, "r2": [RIGHT] * 3}
    ruling = ruled(pool, quarantined=1)
    assert ruling.quarantines == ()
    assert ruling.alerts[GROUP] == {Alert.SPARED: ("r0",)}
    lonely = ruled({"r0": [LIE] * 3}, Truth(RIGHT, Source.HISTORY))
    assert (lonely.quarantines, lonely.alerts[GROUP]) == ((), {Alert.SPARED: ("r0",)})
    split = ruled({"r0": [LIE] * 3, "r1": [LIE] * 3, "r2": [RIGHT] * 3, "r3": [RIGHT] * 3})
    assert (split.quarantines, set(split.alerts[GROUP])) == ((), {Alert.SPLIT})
    changed = ruled(
        {name: [LIE] * 3 for name in ("r0", "r1", "r2")}, Truth(RIGHT, Source.CONSENSUS)
    )
    assert changed.alerts[GROUP] == {Alert.CHANGED: ("p",)}
    assert changed.learned == {}


def test_answers_of_replicas_that_do_not_serve_count_for_nothing() -> None:
    kept = [Kept(name, Answer(n, LIE), 0) for n, name in enumerate(("x", "y", "z", "r0"))]
    ruling = rule({ASKING.id: ASKING}, {GROUP: kept}, [Serving("r0", "p", "n")], {}, {}, str)
    assert (ruling.quarantines, ruling.deviations, ruling.learned) == ((), {}, {})


def test_people_see_the_newest_answers_beside_what_is_right() -> None:
    kept = [
        Kept("r0", Answer(9, LIE), 90),
        Kept("r0", Answer(5, None), 50),
        Kept("r1", Answer(8, RIGHT), 80),
        Kept("r2", Answer(7, None), 70),
    ]
    rows = results({GROUP: kept}, {GROUP: Truth(RIGHT, Source.HISTORY)}, {7: "no such adapter"})
    assert [tuple(row) for row in rows] == [RESULT_FIELDS] * 3
    assert [(row["replica_id"], row["differs_in"]) for row in rows] == [
        ("r0", "tokens"),
        ("r1", None),
        ("r2", None),
    ]
    assert rows[0]["token_ids"] == [1, 9, 9]
    assert rows[0]["right"] == [1, 2, 3]
    assert (rows[2]["token_ids"], rows[2]["error"]) == (None, "no such adapter")
