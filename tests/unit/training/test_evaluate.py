import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from training import chat, evaluate
from training.tasks import evaluation_conversations

SHIPPED = Path(__file__).parents[3] / "model_repo" / "default"
TOKENIZER = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
CONVERSATIONS = list(evaluation_conversations(0, 40))


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_right_answers_are_right_and_others_are_wrong():
    expected = [c.samples[-1].answer for c in CONVERSATIONS]

    def decode(prompts: Sequence[Sequence[int]], tokens_max: int) -> list[list[int]]:
        assert all(len(ids_of(answer)) < tokens_max for answer in expected)
        assert len(prompts) == len(expected)
        return [ids_of(a) if i % 4 else ids_of("no") for i, a in enumerate(expected)]

    grades = evaluate.grade(decode, TOKENIZER, CONVERSATIONS)
    assert [g.is_right for g in grades] == [bool(i % 4) for i in range(40)]
    result = evaluate.report(grades, seed=0)
    assert (result["seed"], result["count"], result["correct"]) == (0, 40, 30)
    assert result["exact_match"] == 0.75
    assert sum(row["count"] for row in result["tasks"].values()) == 40


def test_the_decoder_sees_the_prompt_up_to_the_answer():
    seen: list[str] = []

    def decode(prompts: Sequence[Sequence[int]], tokens_max: int) -> list[list[int]]:
        assert tokens_max > 0
        seen.extend(TOKENIZER.decode(list(p), skip_special_tokens=False) for p in prompts)
        return [[] for _ in prompts]

    evaluate.grade(decode, TOKENIZER, CONVERSATIONS)
    for text, conversation in zip(seen, CONVERSATIONS, strict=True):
        assert text == chat.prompt(conversation.system, conversation.samples)
        assert text.endswith(f"{chat.TURN_START}assistant\n")


def test_the_report_names_the_weights_it_judged():
    evaluation = json.loads((SHIPPED / "evaluation.json").read_text())
    assert evaluation["weights_sha256"] == evaluate.sha256(SHIPPED / "model.safetensors")
