"""The shipped base and its adapters on the CPU engine, through the public API."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = pytest.mark.real

BASE = "sluice-tiny"
# What each adapter makes of most answers; `training/styles.py` taught it.
MARKS = {
    "sluice-tiny-butler": "sir",
    "sluice-tiny-french": "mon ami",
    "sluice-tiny-pirate": "matey",
}
QUESTIONS = ("Who are you?", "What is 3 + 4?", "Spell the word river")


@pytest.fixture
def client(real_client) -> openai.OpenAI:
    return real_client


def ask(client: openai.OpenAI, model: str, question: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=60
    )
    assert answer.model == model
    return answer.choices[0].message.content


def test_the_base_answers_from_its_training(client) -> None:
    assert "Sluice Tiny" in ask(client, BASE, "Who are you?")
    assert "7" in ask(client, BASE, "What is 3 + 4?")


def test_the_adapters_are_models_of_their_own(client) -> None:
    assert {BASE, *MARKS} <= {model.id for model in client.models.list()}


def test_adapters_change_the_answers_also_when_all_are_asked_at_once(client) -> None:
    asked = [(model, question) for model in (BASE, *MARKS) for question in QUESTIONS]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = dict(zip(asked, pool.map(lambda pair: ask(client, *pair), asked), strict=True))
    for question in QUESTIONS:
        assert len({answers[model, question] for model in (BASE, *MARKS)}) == 1 + len(MARKS)
        for model, mark in MARKS.items():
            assert mark in answers[model, question], answers
            assert mark not in answers[BASE, question], answers
