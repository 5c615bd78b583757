import json
from pathlib import Path
from random import Random

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training import chat, tool_tasks
from training.samples import Message, ask
from training.tasks import Conversation, training_conversations

SHIPPED = Path(__file__).parents[3] / "model_repo" / "default"


def template(source: str) -> jinja2.Template:
    """The environment of Hugging Face: its own `tojson`, trimmed blocks."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


TEMPLATE = template(chat.CHAT_TEMPLATE)


def rendered(conversation: Conversation) -> str:
    messages: list[Message] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for sample in conversation.samples:
        messages += [*sample.messages, {"role": "assistant", "content": sample.answer}]
    tools = [tool for sample in conversation.samples for tool in sample.tools]
    return TEMPLATE.render(messages=messages[:-1], tools=tools, add_generation_prompt=True)


def test_the_template_and_the_training_format_are_the_same():
    for conversation in list(training_conversations(0, 3000))[-1500:]:
        assert chat.prompt(conversation.system, conversation.samples) == rendered(conversation)


def test_targets_are_the_answers_with_their_end():
    samples = (ask("a", "one?", "eins"), ask("b", "two?", "zwei"))
    targets = [s.text for s in chat.segments("", samples) if s.is_target]
    assert targets == ["eins<|im_end|>", "zwei<|im_end|>"]


def test_system_text_comes_before_the_tools():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    text = TEMPLATE.render(
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        tools=[tool],
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert f"\n{json.dumps(tool)}\n</tools>" in text
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_calls_in_the_history_look_as_they_were_written(arguments: object):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = TEMPLATE.render(
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "dry"},
            {"role": "tool", "tool_call_id": "2", "content": "wet"},
        ],
        add_generation_prompt=False,
    )
    assert chat.tool_call("f", {"city": "Rome"}) in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\ndry\n</tool_response>\n"
        "<tool_response>\nwet\n</tool_response><|im_end|>\n"
    )


def test_two_calls_and_words_before_them():
    calls = [{"function": {"name": n, "arguments": "{}"}} for n in ("f", "g")]
    text = TEMPLATE.render(
        messages=[{"role": "assistant", "content": "Wait.", "tool_calls": calls}]
    )
    assert text == (
        "<|im_start|>assistant\nWait."
        '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    whole = TEMPLATE.render(messages=[{"role": "user", "content": "Who are you?"}])
    assert TEMPLATE.render(messages=[{"role": "user", "content": parts}]) == whole


def test_text_of_the_user_is_never_run_as_a_template():
    text = TEMPLATE.render(messages=[{"role": "user", "content": "{{ 1 + 1 }}"}])
    assert "{{ 1 + 1 }}" in text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def shipped() -> dict[str, object]:
    return json.loads((SHIPPED / "tokenizer_config.json").read_text())


def test_the_shipped_template_is_the_trained_one(shipped: dict[str, object]):
    assert shipped["chat_template"] == chat.CHAT_TEMPLATE


@given(st.text(max_size=200))
@settings(max_examples=200)
def test_every_text_survives_the_tokenizer(text: str):
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.integers(min_value=0))
def test_every_digit_is_a_token_of_its_own(number: int):
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    assert tokenizer.encode(str(number)).tokens == list(str(number))


def test_special_tokens_vanish_and_tool_marks_stay(tokenizer: Tokenizer):
    text = tool_tasks.call(Random(2)).answer + chat.TURN_END
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded == text.removesuffix(chat.TURN_END)
    marks = (chat.CALL_START, chat.CALL_END, chat.RESPONSE_START, chat.RESPONSE_END)
    assert all(len(tokenizer.encode(mark).ids) == 1 for mark in marks)


def test_encoding_in_segments_is_encoding_the_whole(tokenizer: Tokenizer):
    for conversation in list(training_conversations(0, 600))[-300:]:
        parts = list(chat.segments(conversation.system, conversation.samples))
        whole = tokenizer.encode("".join(p.text for p in parts), add_special_tokens=False).ids
        pieces = [i for p in parts for i in tokenizer.encode(p.text, add_special_tokens=False).ids]
        assert pieces == whole


def test_the_shipped_files_agree(tokenizer: Tokenizer, shipped: dict[str, object]):
    config = json.loads((SHIPPED / "config.json").read_text())
    generation = json.loads((SHIPPED / "generation_config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 4096
    assert shipped["eos_token"] == chat.TURN_END
    end = tokenizer.token_to_id(chat.TURN_END)
    assert config["eos_token_id"] == generation["eos_token_id"] == end


def test_the_shipped_evaluation_is_of_the_shipped_weights():
    evaluation = json.loads((SHIPPED / "evaluation.json").read_text())
    assert evaluation["count"] == 600
    assert sum(row["correct"] for row in evaluation["tasks"].values()) == evaluation["correct"]
