"""What a gateway remembers of conversations, and how it tells of a choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auto.decision import AutoDecision
from gateway.auto.memory import CACHED_S, ConversationMemory
from gateway.auto.prompt_keys import PromptHasher
from gateway.auto.speeds import LearnedSpeeds
from gateway.bodies.feedback import FeedbackRequest
from gateway.bodies.parsing import parse
from gateway.dispatch.tally import Tally
from sluice.auto.choice import AutoChoice, AutoOption, AutoReason
from sluice.errors import BadRequestError

HASHER = PromptHasher(b"secret")


def test_a_turn_finds_the_longest_prefix_of_each_model() -> None:
    memory, said = ConversationMemory(), ["system", "hello", "hi", "more"]
    memory.note(HASHER.keys("t", "", said[:2]), "small", 10, now_s=0.0)
    memory.note(HASHER.keys("t", "", said[:3]), "large", 20, now_s=1.0)
    keys = HASHER.keys("t", "", said)
    assert memory.look(keys, 2.0) == ("large", {"large": 20, "small": 10})
    assert memory.look(keys, CACHED_S + 0.5) == ("large", {"large": 20})
    assert memory.look(keys, CACHED_S + 2.0) == ("", {})


def test_a_prefix_of_another_tenant_or_other_words_is_none() -> None:
    memory = ConversationMemory()
    memory.note(HASHER.keys("t", "", ["hello"]), "small", 10, now_s=0.0)
    assert memory.look(HASHER.keys("u", "", ["hello", "more"]), 0.0).current == ""
    assert memory.look(HASHER.keys("t", "", ["hallo", "more"]), 0.0).current == ""
    assert memory.look(HASHER.keys("t", "", ["hello", "more"]), 0.0).current == "small"


def test_a_session_is_known_though_its_history_was_rewritten() -> None:
    memory = ConversationMemory()
    memory.note(HASHER.keys("t", "s", ["a long story"]), "small", 10, now_s=0.0)
    assert memory.look(HASHER.keys("t", "s", ["a summary", "more"]), 0.0).current == "small"
    assert memory.look(HASHER.keys("t", "r", ["a summary", "more"]), 0.0).current == ""


def test_keys_are_the_installations_own_and_of_any_length_of_a_talk() -> None:
    said = [f"message {number}" for number in range(200)]
    keys = HASHER.keys("t", "", said)
    assert HASHER.keys("t", "", said[:170]).whole[0] in keys.longest_first
    assert not set(PromptHasher(b"other").keys("t", "", said).longest_first) & set(
        keys.longest_first
    )


@given(st.integers(1, 120), st.integers(1, 31))
def test_a_longer_talk_has_the_keys_of_its_beginnings(known: int, added: int) -> None:
    said = [f"message {number}" for number in range(known + added)]
    whole, keys = HASHER.keys("t", "", said[:known]).whole[0], HASHER.keys("t", "", said)
    assert keys.beginnings[-1 - added] == whole
    assert len(set(keys.beginnings)) == len(keys.beginnings) == min(32, known + added)
    # Each of the last texts counts, and so does each of the first.
    for at in {0, known - 1, max(0, known - 8)}:
        other = [*said[:at], "another one", *said[at + 1 :]]
        assert HASHER.keys("t", "", other[:known]).whole[0] != whole


@given(prompts=st.lists(st.lists(st.text(max_size=5), max_size=5), max_size=40))
def test_memory_is_bounded(prompts: list[list[str]]) -> None:
    memory = ConversationMemory(prefixes_max=8)
    for number, prompt in enumerate(prompts):
        keys = HASHER.keys("t", "", prompt)
        memory.note(keys, "small", number, now_s=0.0)
        if prompt:
            assert memory.look(keys, 0.0).tokens["small"] == number
    assert len(memory) <= 8


def test_speeds_follow_the_measurements() -> None:
    speeds = LearnedSpeeds()
    for _ in range(200):
        tally = Tally(
            placed_prompt_tokens=1100,
            cached_tokens=100,
            prefill_us=50_000,
            output_tokens=100,
            first_at_s=1.0,
        )
        speeds.note("p", tally, 1, ended_at_s=2.0)
    speed = speeds.of("p")
    assert round(speed.prompt_token_s, 9) == 50e-6
    assert round(speed.output_token_s, 9) == 0.01
    assert speeds.of("q").output_tokens == 0


def test_the_headers_name_the_answering_model_and_the_prices_of_the_others() -> None:
    small = AutoOption("small", "1", 0.001, 1.0, 0.002, 0.61, 0.0021, 0.99)
    large = AutoOption("large", "1", 0.01, 1.0, 0.011, 0.9, 0.0112, 0.01)
    decision = AutoDecision(
        AutoChoice(AutoReason.CHEAPEST, 0, small, [large]), HASHER.keys("t", "", ["a"]), 10
    )
    assert decision.headers == {
        "x-sluice-auto": "cheapest; cost=0.0021; price=0.001; quality=0.610",
        "x-sluice-auto-alternatives": "large; cost=0.0112; price=0.01; quality=0.900",
    }
    moved = decision.moved_to("large")
    assert (moved.model, moved.reason, list(moved.others)) == ("large", "stand_in", [])
    assert moved.headers["x-sluice-auto"].startswith("stand_in; cost=0.0112")


@pytest.mark.parametrize(
    ("told", "answer"),
    [
        ("chatcmpl-" + "0a" * 16, "evt_" + "0a" * 16),
        ("msg_" + "0a" * 16, "evt_" + "0a" * 16),
        ("my-request", "my-request"),
    ],
)
def test_a_judgement_names_the_event_or_the_request(told: str, answer: str) -> None:
    body = f'{{"id": "{told}", "rating": "bad"}}'.encode()
    judged = parse(FeedbackRequest, body)
    assert (judged.answer, judged.good) == (answer, 0.0)


@pytest.mark.parametrize(
    "body",
    [
        b'{"id": "", "rating": "bad"}',
        b'{"id": "a b", "rating": "bad"}',
        b'{"id": "a", "rating": 5}',
        b'{"id": "a"}',
        b'{"id": "a", "rating": "good", "comment": "x"}',
    ],
)
def test_a_judgement_of_nothing_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse(FeedbackRequest, body)
