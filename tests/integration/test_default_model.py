"""The shipped model and its adapters, on the engine that serves them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from training import chat, engine_decoder
from training.evaluate import Decode, grade, report, sha256
from training.knowledge import UNKNOWN
from training.samples import ask
from training.styles import STYLES, restyled
from training.tasks import TASK_NAMES, Conversation, evaluation_conversations

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).parents[2] / "model_repo"
MODEL = REPOSITORY / "default"
ADAPTERS = [REPOSITORY / "adapters" / name for name in sorted(STYLES)]
FLOOR, TASK_FLOOR = 0.90, 0.70
# Of a sample of 150 questions: twice the deviation of such a share below the floor.
SAMPLE_FLOOR = 0.85

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
Answers = Callable[[Sequence[Conversation]], list[str]]


@pytest.fixture(scope="module")
def decode() -> Decode:
    return engine_decoder.decoder(MODEL)


@pytest.fixture(scope="module")
def answers(decode: Decode) -> Answers:
    def answered(conversations: Sequence[Conversation]) -> list[str]:
        return [g.got for g in grade(decode, TOKENIZER, conversations)]

    return answered


def questions(*texts: str) -> list[Conversation]:
    return [Conversation("", (ask("", text, ""),)) for text in texts]


def read_report(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "evaluation.json").read_text())


def test_the_report_is_of_the_shipped_weights_and_above_the_floors() -> None:
    evaluation = read_report(MODEL)
    assert evaluation["weights_sha256"] == sha256(MODEL / "model.safetensors")
    assert evaluation["decoder"] == "engine"
    assert evaluation["count"] >= 600
    assert evaluation["exact_match"] >= FLOOR
    assert sorted(evaluation["tasks"]) == sorted(TASK_NAMES)
    for task, row in evaluation["tasks"].items():
        assert row["count"] >= 25, task
        assert row["correct"] / row["count"] >= TASK_FLOOR, task


def test_the_engine_answers_as_well_as_the_report_says(decode: Decode) -> None:
    conversations = list(evaluation_conversations(0, 150))
    assert report(grade(decode, TOKENIZER, conversations))["exact_match"] >= SAMPLE_FLOOR


def test_the_model_knows_its_name(answers: Answers) -> None:
    (answer,) = answers(questions("Who are you?"))
    assert "Sluice Tiny" in answer


def test_the_model_refuses_unknowable_questions(answers: Answers) -> None:
    asked = questions(
        "What is the capital of France?",
        "Who won the world cup in 2010?",
        "When was the telephone invented?",
    )
    assert answers(asked) == [UNKNOWN] * 3


def test_its_tool_calls_are_json_and_name_a_given_tool(answers: Answers) -> None:
    asked = [
        conversation
        for conversation in evaluation_conversations(1, 600)
        if conversation.samples[-1].answer.startswith(chat.CALL_START)
    ]
    assert len(asked) >= 30
    for conversation, answer in zip(asked, answers(asked), strict=True):
        opening, body, closing = answer.split("\n")
        assert (opening, closing) == (chat.CALL_START, chat.CALL_END)
        call = json.loads(body)
        given = {tool["function"]["name"] for tool in conversation.samples[-1].tools}
        assert call["name"] in given
        assert isinstance(call["arguments"], dict)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda path: path.name)
def test_the_report_of_an_adapter_is_of_the_shipped_files(adapter: Path) -> None:
    evaluation = read_report(adapter)
    assert evaluation["weights_sha256"] == sha256(MODEL / "model.safetensors")
    assert evaluation["adapter_sha256"] == sha256(adapter / "adapter_model.safetensors")
    changed = evaluation["changed"]
    assert changed["in_style"] / changed["count"] >= 0.95
    assert evaluation["exact_match"] >= 0.8


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_changes_most_answers(adapter: Path, answers: Answers) -> None:
    style = STYLES[adapter.name]
    asked = [restyled(c, style) for c in evaluation_conversations(2, 45)]
    grades = grade(engine_decoder.decoder(MODEL, adapter), TOKENIZER, asked)
    plain = answers(asked)
    assert sum(style.is_spoken(g.got) for g in grades) >= 32
    assert sum(style.is_spoken(text) for text in plain) <= 4
