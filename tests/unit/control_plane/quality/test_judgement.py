"""Who answers otherwise: honest pools are left alone, corrupt replicas are found."""

import random
from math import nan

from hypothesis import given
from hypothesis import strategies as st

from control_plane.quality.judgement import (
    ASKINGS,
    Answer,
    Judgement,
    RightAnswerSource,
    Truth,
    decide,
    judge,
)
from sluice.detector.consensus import Difference, Text, difference
from tests.support.answers import SEEDS, SURE, TOKENS, corrupt, honest


def asked(pool: dict[str, list[Text]]) -> dict[str, list[Answer]]:
    """Answers, oldest first, as they are judged."""
    number = iter(range(1, 10_000))
    return {
        name: [Answer(next(number), text) for text in texts][::-1] for name, texts in pool.items()
    }


@given(seed=SEEDS, replicas=st.integers(1, 9), fork=st.none() | st.integers(0, len(TOKENS) - 1))
def test_an_honest_pool_is_never_suspected(seed, replicas, fork) -> None:
    rng = random.Random(seed)
    pool = {f"r{n}": [honest(rng, fork) for _ in range(ASKINGS)] for n in range(replicas)}
    found = judge(asked(pool))
    again = judge(asked(pool), found.learned)
    for judgement in (found, again):
        assert judgement.findings == ()
        assert not judgement.deviating
        assert not judgement.is_split
        assert not judgement.is_changed


@given(seed=SEEDS, replicas=st.integers(3, 9), fork=st.none() | st.integers(1, len(TOKENS) - 1))
def test_a_corrupt_replica_is_found_within_the_askings_that_count(seed, replicas, fork) -> None:
    rng = random.Random(seed)
    pool = {f"r{n}": [honest(rng, fork) for _ in range(ASKINGS)] for n in range(replicas)}
    pool["r0"] = []
    for number in range(ASKINGS):
        pool["r0"].append(corrupt(rng))
        findings = judge(asked(pool)).findings
        assert [f.replica_id for f in findings] == (["r0"] if number + 1 >= 2 else [])


@given(seed=SEEDS, is_same_lie=st.booleans())
def test_two_corrupt_of_five_are_found(seed, is_same_lie) -> None:
    rng = random.Random(seed)
    lie = corrupt(rng)
    pool = {f"r{n}": [honest(rng, None) for _ in range(ASKINGS)] for n in range(5)}
    for name in ("r1", "r3"):
        pool[name] = [lie if is_same_lie else corrupt(rng) for _ in range(ASKINGS)]
    judgement = judge(asked(pool))
    assert [f.replica_id for f in judgement.findings] == ["r1", "r3"]
    assert judgement.deviating is not None
    assert len(judgement.deviating) == 2 * ASKINGS
    assert judgement.truth is not None
    assert judgement.truth.text.token_ids == TOKENS
    assert decide(["r1", "r3"], pool, 0).quarantine == ("r1",)


@given(seed=SEEDS, half=st.integers(2, 4))
def test_a_split_vote_suspects_no_replica(seed, half) -> None:
    rng = random.Random(seed)
    lie = corrupt(rng)
    pool = {f"a{n}": [Text(TOKENS, SURE)] * 3 for n in range(half)}
    pool |= {f"b{n}": [lie] * 3 for n in range(half)}
    judgement = judge(asked(pool))
    assert (judgement.is_split, judgement.findings, judgement.truth) == (True, (), None)


def test_drift_of_logprobs_counts_and_not_numbers_alone_make_it() -> None:
    right = Text(TOKENS, SURE)
    assert difference(Text(TOKENS, tuple(v - 0.4 for v in SURE)), right) is None
    one = Text((*TOKENS[:1], 999, *TOKENS[2:]), (SURE[0] - 0.2, -1.0, *SURE[2:]))
    beside = Text(TOKENS, (SURE[0], -1.1, *SURE[2:]))
    assert difference(one, beside) is None, "one token before a near tie may be off by more"
    assert difference(Text(TOKENS, tuple(v - 0.6 for v in SURE)), right) is Difference.LOGPROBS
    assert difference(Text(TOKENS, (nan, *SURE[1:])), right) is Difference.LOGPROBS
    assert difference(right, Text(TOKENS, (nan, *SURE[1:]))) is None, "nothing to compare with"
    assert difference(Text(TOKENS), right) is None
    drifting = Text(TOKENS, tuple(v - 2.0 for v in SURE))
    pool = {"r0": [drifting] * 3, "r1": [right] * 3, "r2": [right] * 3}
    (finding,) = judge(asked(pool)).findings
    assert (finding.replica_id, finding.difference) == ("r0", Difference.LOGPROBS)


def test_one_deviation_and_missing_answers_are_no_case() -> None:
    right, lie = Text(TOKENS, SURE), corrupt(random.Random(1))
    answers = asked({"r1": [right] * 3, "r2": [right] * 3, "r3": [right] * 3})
    answers["r0"] = [Answer(90, None), Answer(80, lie), Answer(70, None)]
    judgement = judge(answers)
    assert judgement.findings == ()
    assert judgement.deviating == {80: Difference.TOKENS}
    answers["r0"] = [Answer(90, None)] * 3
    assert judge(answers).findings == ()


def test_a_small_pool_is_compared_with_its_past() -> None:
    right, lie = Text(TOKENS, SURE), corrupt(random.Random(2))
    assert judge(asked({"r0": [right] * 2})).learned is None
    assert judge(asked({"r0": [right, lie, right]})).learned is None
    learned = judge(asked({"r0": [right] * 3, "r1": [right] * 3})).learned
    assert learned == Truth(right, RightAnswerSource.HISTORY)
    assert judge(asked({"r0": [right] * 3}), learned).findings == ()
    (finding,) = judge(asked({"r0": [right, lie, lie]}), learned).findings
    assert (finding.replica_id, finding.deviations) == ("r0", 2)
    assert decide(["r0"], ["r0", "r1"], 0).quarantine == ()


def test_a_pool_that_changes_as_a_whole_is_told_and_not_learned() -> None:
    right, other = Text(TOKENS, SURE), corrupt(random.Random(3))
    known = judge(asked({f"r{n}": [right] * 3 for n in range(3)})).learned
    assert known == Truth(right, RightAnswerSource.CONSENSUS)
    changed = judge(asked({f"r{n}": [other] * 3 for n in range(3)}), known)
    assert (changed.is_changed, changed.learned, changed.findings) == (True, None, ())


def test_an_expected_answer_is_compared_up_to_its_length() -> None:
    right, lie = Text(TOKENS, SURE), Text((1, 2, 3))
    pool = asked({"r0": [right] * 3, "r1": [right] * 3, "r2": [right, right, lie]})
    assert judge(pool, expected=TOKENS[:4]).unexpected == ("r2",)
    assert judge(pool, expected=(5,)).unexpected == ("r0", "r1", "r2")
    learned = judge(asked({"r0": [right] * 3}), expected=(5,))
    assert learned == Judgement(None, unexpected=("r0",)), "what is wrong is not learned"


@given(ready=st.integers(0, 12), gone=st.integers(0, 5), share=st.floats(0, 1))
def test_at_most_a_third_is_taken_out_and_never_the_last_one(ready, gone, share) -> None:
    names = [f"r{n}" for n in range(ready)]
    suspects = names[: int(share * ready)]
    verdict = decide(["not there", *suspects], names, gone)
    assert [*verdict.quarantine, *verdict.spared] == suspects
    if verdict.quarantine:
        assert 3 * (gone + len(verdict.quarantine)) <= ready + gone
        assert len(verdict.quarantine) < ready
