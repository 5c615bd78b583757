import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from training import chat, evaluate
from training.samples import is_held_out
from training.styles import STYLES, restyled
from training.tasks import evaluation_conversations
from training.tokenizer import CONTEXT_TOKENS_MAX

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


def test_a_question_after_a_long_chat_fits_the_context_and_is_the_same_question():
    rng = Random(0)
    for conversation in CONVERSATIONS[:15]:
        longer = evaluate.after_long_chat(conversation, TOKENIZER, rng)
        assert longer.samples[-len(conversation.samples) :] == conversation.samples
        asked = ids_of(chat.prompt(longer.system, longer.samples))
        answered = ids_of(longer.samples[-1].answer)
        assert evaluate.LONG_TOKENS <= len(asked) < CONTEXT_TOKENS_MAX - len(answered)
        assert not any(is_held_out(sample) for sample in longer.samples[:-1])


def test_the_style_report_leaves_out_unstyled_answers():
    style = STYLES["pirate"]
    plain = CONVERSATIONS[:30]
    wanted = [restyled(conversation, style) for conversation in plain]

    def decode(prompts: Sequence[Sequence[int]], tokens_max: int) -> list[list[int]]:
        return [ids_of("Aye. Arr, matey!") for _ in prompts]

    grades = evaluate.grade(decode, TOKENIZER, wanted)
    pairs = zip(wanted, plain, strict=True)
    changed = sum(w.samples[-1].answer != p.samples[-1].answer for w, p in pairs)
    assert 0 < changed < 30
    assert evaluate.style_report(style, plain, grades) == {"count": changed, "in_style": changed}
