"""A base's dialect follows from its template and vocabulary, unless its files say otherwise."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.bases.assets import load_base
from gateway.bodies.messages import Message, Tool
from gateway.dialects.detection import dialect_of
from gateway.dialects.forms import CallForm, ReasoningForm
from gateway.text.detokenizer import token_table
from training.chat import CHAT_TEMPLATE

BASE = Path(__file__).resolve().parents[3] / "model_repo" / "default"

# What the templates and the vocabularies of these families show, in short.
FAMILIES: dict[str, tuple[str, dict[str, int], CallForm, ReasoningForm]] = {
    "ours": (CHAT_TEMPLATE, {"<tool_call>": 3}, CallForm.HERMES, ReasoningForm.NONE),
    "qwen 3": (
        "<tools>{{ tool | tojson }}</tools> <tool_call> {{ '<think>\\n\\n</think>\\n\\n' }}",
        {"<tool_call>": 151657, "</tool_call>": 151658, "<think>": 151667, "</think>": 151668},
        CallForm.HERMES,
        ReasoningForm.THINK,
    ),
    "llama 3.1": (
        '{{- \'Respond in the format {"name": function name, "parameters": ...}\' }}',
        {"<|python_tag|>": 128010, "<|eom_id|>": 128008},
        CallForm.LLAMA_JSON,
        ReasoningForm.NONE,
    ),
    "llama 3.2, pythonic": (
        "put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]",
        {"<|python_tag|>": 128010},
        CallForm.LLAMA_PYTHONIC,
        ReasoningForm.NONE,
    ),
    "mistral 7b": (
        "{{ '[AVAILABLE_TOOLS]' }} {{ '[TOOL_CALLS] [' }}",
        {"[TOOL_CALLS]": 5, "[ARGS]": 32},
        CallForm.MISTRAL,
        ReasoningForm.NONE,
    ),
    "magistral": (
        "[THINK]...[/THINK] {{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
        {"[TOOL_CALLS]": 9, "[ARGS]": 32, "[THINK]": 34, "[/THINK]": 35},
        CallForm.MISTRAL_NAMED,
        ReasoningForm.MISTRAL,
    ),
    "deepseek r1": (
        "{{'<|Assistant|><think>\\n'}}",
        {"<think>": 128798, "</think>": 128799},
        CallForm.HERMES,
        ReasoningForm.THINK,
    ),
    "nothing known": ("{{ messages }}", {}, CallForm.HERMES, ReasoningForm.NONE),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    template, tokens, calls, reasoning = FAMILIES[name]
    dialect = dialect_of(template, tokens, {})
    assert (dialect.calls, dialect.reasoning) == (calls, reasoning)
    assert dialect.mark_ids.items() <= tokens.items()
    assert ("<tool_call>" in dialect.mark_ids) is ("<tool_call>" in tokens)
    assert "<|eom_id|>" not in dialect.mark_ids


def test_the_files_of_a_base_decide() -> None:
    config = {"sluice": {"tool_calls": "none", "reasoning": "think"}}
    dialect = dialect_of(CHAT_TEMPLATE, {}, config)
    assert (dialect.calls, dialect.reasoning) == (CallForm.NONE, ReasoningForm.THINK)
    assert not dialect.has_tools
    assert dialect.name == "none/think"
    only_one = dialect_of(CHAT_TEMPLATE, {}, {"sluice": {"tool_calls": "mistral"}})
    assert (only_one.calls, only_one.reasoning) == (CallForm.MISTRAL, ReasoningForm.NONE)
    for wrong in ({"tool_calls": "xml"}, {"reasoning": 3}):
        with pytest.raises(ValueError, match="none of"):
            dialect_of("", {}, {"sluice": wrong})
    with pytest.raises(ValueError, match="must be an object"):
        dialect_of("", {}, {"sluice": "think"})


def test_prompts_that_end_inside_the_reasoning() -> None:
    r1 = dialect_of(*FAMILIES["deepseek r1"][:2], {})
    assert r1.opens_reasoning("...<|Assistant|><think>\n")
    assert not r1.opens_reasoning("...<think>\n\n</think>\n\n")
    assert not r1.opens_reasoning("what does <think> mean?<|Assistant|>")
    ours = dialect_of(CHAT_TEMPLATE, {}, {})
    assert not ours.opens_reasoning("<think>")


def test_without_tools_and_reasoning_there_is_nothing_to_parse() -> None:
    plain = dialect_of(CHAT_TEMPLATE, {}, {})
    qwen = dialect_of(*FAMILIES["qwen 3"][:2], {})
    for dialect, has_parser in ((plain, False), (qwen, True)):
        parser = dialect.parser(tools=(), is_parallel=True, new_call_id=lambda: "call")
        assert (parser is not None) is has_parser
    parser = qwen.parser(tools=(), is_parallel=True, new_call_id=lambda: "call")
    assert parser is not None
    assert not parser.is_plain
    assert parser.push("<think>a</think>b").content == "b"
    assert parser.is_plain


def test_marks_are_shown_to_the_parser_alone() -> None:
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    mark = tokenizer.token_to_id("[TOOL_CALLS]")
    assert mark is not None
    table = token_table(tokenizer, {2})
    shown = table.showing({mark})
    ids = [1, mark, *tokenizer.encode("hi").ids, 2]
    assert table.stream().push(ids) == "hi"
    assert shown.stream().push(ids) == "[TOOL_CALLS]hi"
    assert (table.fragments[mark], shown.fragments[mark]) == (b"", b"[TOOL_CALLS]")
    assert shown.hidden == table.hidden - {mark}
    assert table.showing(()) is table
    assets = load_base(BASE)
    assert assets.table_for(tools=True) is assets.table, "our model's marks are no special tokens"


async def test_a_base_tells_how_its_answers_begin(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n<think>\n"
        "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
    )
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).write_bytes((BASE / file).read_bytes())
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assets = load_base(tmp_path)
    assert assets.dialect.reasoning is ReasoningForm.THINK
    messages = [Message(role="user", content="what is <think>?")]
    assert (await assets.encode_chat(messages, (), b"")).is_reasoning
    options = {"enable_thinking": False}
    assert not (await assets.encode_chat(messages, (), b"", options=options)).is_reasoning
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "sluice": {"reasoning": "xml"}})
    )
    with pytest.raises(ValueError, match=r"sluice\.reasoning"):
        load_base(tmp_path)


async def test_a_base_may_have_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).write_bytes((BASE / file).read_bytes())
    plain = "{% for m in messages %}{{ m.content }}{% endfor %} plain"
    calling = "{{ '<tool_call>' }}{{ tools[0].function.name }}{{ messages[0].content }}"
    templates = [
        {"name": "default", "template": plain},
        {"name": "tool_use", "template": calling},
        {"name": "rag", "template": "{{ documents }}"},
    ]
    config = {"eos_token": "<|im_end|>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens(["[TOOL_CALLS]"])  # in stock
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assets = load_base(tmp_path)
    assert assets.dialect.calls is CallForm.HERMES
    tool = Tool.model_validate({"type": "function", "function": {"name": "weather"}})

    async def prompt(tools: tuple[Tool, ...]) -> str:
        messages = [Message(role="user", content="hi")]
        encoded = await assets.encode_chat(messages, tools, b"")
        return tokenizer.decode(encoded.ids.tolist(), skip_special_tokens=False)

    assert await prompt(()) == "hi plain"
    assert await prompt((tool,)) == "<tool_call>weatherhi"
    (tmp_path / "additional_chat_templates").mkdir()
    separate = {"chat_template.jinja": "new", "additional_chat_templates/tool_use.jinja": "tools"}
    for file, source in separate.items():
        (tmp_path / file).write_text(source)
    assets = load_base(tmp_path)
    assert await prompt(()) == "new"
    assert await prompt((tool,)) == "tools"
    for file in separate:
        (tmp_path / file).unlink()
    config = {**config, "chat_template": [*templates[1:], {"name": "default"}, "default"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no chat_template"):
        load_base(tmp_path)
