import json
import re
import subprocess
import sys
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from training import chat, knowledge, number_tasks, stories, text_tasks, tool_tasks, words
from training.samples import Sample, ask, is_held_out, split_key
from training.tasks import (
    TASK_NAMES,
    Conversation,
    Task,
    evaluation_conversations,
    training_conversations,
)

ROOT = Path(__file__).parents[3]
DIGEST = (
    "import hashlib\n"
    "from training.tasks import training_conversations\n"
    "print(hashlib.sha256(repr(list(training_conversations(3, 500))).encode()).hexdigest())"
)


def texts(conversations: list[Conversation]) -> list[str]:
    return ["".join(s.text for s in chat.segments(c.system, c.samples)) for c in conversations]


def test_the_same_seed_gives_the_same_data_under_any_hash_seed():
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


def test_another_seed_gives_other_data():
    assert texts(list(training_conversations(0, 50))) != texts(list(training_conversations(1, 50)))


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    """Of a whole training, only shorter."""
    return list(training_conversations(0, 20_000))


def test_no_evaluation_question_is_ever_trained_on(conversations: list[Conversation]):
    graded = [c.samples[-1] for c in evaluation_conversations(0, 500)]
    trained = [s for c in conversations for s in c.samples]
    assert all(is_held_out(sample) for sample in graded)
    assert not any(is_held_out(sample) for sample in trained)
    assert {split_key(s) for s in graded}.isdisjoint(split_key(s) for s in trained)
    prompts = {json.dumps([s.messages, s.tools]).lower() for s in trained}
    assert prompts.isdisjoint(json.dumps([s.messages, s.tools]).lower() for s in graded)


def test_evaluation_questions_are_different_and_cover_every_task():
    graded = [c.samples[-1] for c in evaluation_conversations(0, 500)]
    assert len({(s.task, s.question) for s in graded}) == 500
    trained = {c.samples[-1].task for c in training_conversations(0, 5000)}
    assert {s.task for s in graded} == trained - {"drill"}


def test_earlier_turns_of_an_evaluation_are_training_samples():
    earlier = [s for c in evaluation_conversations(0, 300) for s in c.samples[:-1]]
    assert earlier
    assert not any(is_held_out(sample) for sample in earlier)


def test_a_held_out_sum_is_held_out_in_all_wordings():
    rng = Random(0)
    split: dict[str, set[bool]] = {}
    for sample in (number_tasks.arithmetic(rng) for _ in range(20_000)):
        expression = sample.answer.split(" = ")[0]
        if "*" not in expression:
            split.setdefault(expression, set()).add(is_held_out(sample))
    assert all(len(decisions) == 1 for decisions in split.values())
    held_out_ratio = sum(True in d for d in split.values()) / len(split)
    assert 0.04 < held_out_ratio < 0.09


@pytest.mark.parametrize("mark", ["", ".", "?", " ?", "!"])
def test_case_and_marks_do_not_move_a_question_to_the_other_side(mark: str):
    plain, worded = ask("faq", "who are you", "x"), ask("faq", f"Who  are you{mark}", "x")
    assert is_held_out(plain) == is_held_out(worded)


def test_every_task_has_the_same_number_of_evaluation_questions():
    asked = Counter(c.samples[-1].task for c in evaluation_conversations(0, 10 * len(TASK_NAMES)))
    assert asked == dict.fromkeys(TASK_NAMES, 10)


def test_long_chats_come_late_and_seldom(conversations: list[Conversation]):
    is_long = [len(c.samples) > 5 for c in conversations]
    assert not any(is_long[:13_000])
    assert 20 < sum(is_long[13_000:]) < 110


def test_the_curriculum_begins_with_copying():
    first = list(islice(training_conversations(0, 10_000), 400))
    assert {c.samples[-1].task for c in first} == {"drill", "repeat", "reverse", "json"}
    assert all(len(c.samples) == 1 for c in first)


def test_a_share_of_the_conversations_has_an_earlier_turn():
    late = list(training_conversations(0, 4000))[2000:]
    assert 0.1 < sum(len(c.samples) > 1 for c in late) / len(late) < 0.4


def test_about_a_tenth_of_the_questions_is_refused():
    late = [c.samples[-1] for c in training_conversations(0, 8000)][4000:]
    refused = sum(s.answer in (knowledge.UNKNOWN, knowledge.UNABLE) for s in late)
    assert 0.07 < refused / len(late) < 0.14


def answers(task: Task, count: int = 400) -> list[Sample]:
    rng = Random(1)
    return [task(rng) for _ in range(count)]


def test_arithmetic_is_right():
    for sample in answers(number_tasks.arithmetic):
        expression, value = sample.answer.split(" = ")
        left, sign, right = expression.split()
        a, b = int(left), int(right)
        assert {"+": a + b, "-": a - b, "*": a * b}[sign] == int(value) >= 0


def test_order_is_right():
    for sample in answers(number_tasks.order):
        answer = [int(n) for n in sample.answer.split(", ")]
        numbers = [int(n) for n in re.findall(r"\d+", sample.question)]
        assert 2 <= len(set(numbers)) == len(numbers) <= 5
        assert answer in (
            sorted(numbers), numbers[::-1], [max(numbers)], [min(numbers)], numbers[:1],
            numbers[-1:],
        )  # fmt: skip


def test_counting_aloud_goes_from_the_first_to_the_last_number():
    for sample in answers(number_tasks.count_aloud):
        numbers = [int(n) for n in sample.answer.split(", ")]
        assert len(numbers) >= 1
        assert {abs(a - b) for a, b in pairwise(numbers)} <= {1}
        assert str(numbers[-1]) in sample.question


def test_repeating_and_reversing_are_right():
    for sample in answers(text_tasks.repeat):
        assert sample.answer in sample.question
    for sample in answers(text_tasks.reverse):
        assert " ".join(reversed(sample.answer.split())) in sample.question


def test_upper_case_and_spelling_are_right():
    for sample in answers(text_tasks.upper):
        assert sample.answer.lower() in sample.question
    for sample in answers(text_tasks.spell):
        assert sample.answer.replace("-", "") in sample.question


def test_word_counts_are_right():
    for sample in answers(text_tasks.count_words):
        listed = sample.question.split(": ")[1].split()
        assert f" {len(listed)} word" in sample.answer


def test_json_answers_are_json():
    for sample in answers(text_tasks.json_object):
        assert json.loads(sample.answer)


def test_stories_are_about_the_requested_subjects():
    for sample in answers(stories.story):
        if " about " in sample.question:
            subjects = sample.question.rstrip(".?!").split(" about ")[1].split(" and ")
            assert all(subject in sample.answer for subject in subjects)


def test_tool_calls_name_a_given_tool_and_fit_its_parameters():
    for sample in answers(tool_tasks.call):
        if not sample.answer.startswith(chat.CALL_START):
            continue
        call = json.loads(sample.answer.splitlines()[1])
        given = {tool["function"]["name"]: tool["function"] for tool in sample.tools}
        parameters = given[call["name"]]["parameters"]
        assert set(call["arguments"]) == set(parameters["required"])
        assert all(str(value) in sample.question for value in call["arguments"].values())


def test_tool_results_are_said_in_the_answer():
    for sample in answers(tool_tasks.result):
        values = json.loads(sample.messages[-1]["content"]).values()
        assert all(str(value) in sample.answer for value in values)


def test_word_lists_hold_no_word_twice():
    for listed in (words.WORDS, words.NAMES, words.CITIES, words.COUNTRIES, words.LANGUAGES):
        assert len(set(listed)) == len(listed)
