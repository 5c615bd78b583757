"""Chat templates write what Hugging Face writes, inside a sandbox with bounds."""

import pytest

from gateway.bases.templates import ChatTemplate
from gateway.bodies.messages import Message, Tool
from sluice.errors import BadRequestError
from training.chat import CHAT_TEMPLATE

USER = [Message(role="user", content="hi")]
CALL = {"function": {"name": "f", "arguments": '{"a": "<b> & é"}'}}
TOOL = Tool.model_validate(
    {"type": "function", "function": {"name": "f", "description": "<d>", "parameters": {}}}
)


def test_the_default_models_template() -> None:
    messages = [
        Message(role="system", content="s"),
        Message(
            role="user", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        ),
        Message.model_validate({"role": "assistant", "tool_calls": [CALL]}),
        Message(role="tool", content="r", tool_call_id="1"),
    ]
    text = ChatTemplate(CHAT_TEMPLATE, {}).render(messages, [TOOL])
    assert text.startswith("<|im_start|>system\ns\n\n# Tools")
    assert '{"type": "function", "function": {"name": "f", "description": "<d>"' in text
    assert "<|im_start|>user\nab<|im_end|>\n" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "<b> & é"}}\n</tool_call>' in text
    assert "<tool_response>\nr\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", {}
    )
    assert template.render(USER) == "hi\n"


def test_special_tokens_and_the_developer_role() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].role }}", {"bos_token": "<s>"})
    assert template.render([Message(role="developer", content="x")]) == "<s>system"
    knowing = ChatTemplate("{# developer #}{{ messages[0].role }}", {})
    assert knowing.render([Message(role="developer", content="x")]) == "developer"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% for i in range(90000) %}xxxxxxxxxx{% endfor %}",
        "{{ 1 // 0 if false else messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_templates_that_fail_are_the_clients_400(source: str) -> None:
    with pytest.raises(BadRequestError, match="chat template"):
        ChatTemplate(source, {}).render(USER)
