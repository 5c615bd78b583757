"""Chat templates write what Hugging Face writes, inside a sandbox with bounds."""

import json

import pytest

from gateway.bases.sandbox import OutOfTimeError
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
        Message.model_validate(
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
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


HOSTILE = {
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}"
    "{% for k in range(90000) %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop inside a filter": "{% for i in range(90000) %}"
    "{{ range(90000) | map('string') | list | length }}{% endfor %}",
    "recursive macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "multiplied text": "{{ 'x' * 9999999999 }}",
    "multiplied list": "{{ ([1] * 999999999) | length }}",
    "doubled text": "{% set ns = namespace(t='x') %}{% for i in range(99) %}"
    "{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "joined text": "{% set ns = namespace(t='x') %}{% for i in range(99) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "a doubled block": "{% set ns = namespace(t='x') %}{% for i in range(99) %}"
    "{% set t %}{{ ns.t }}{{ ns.t }}{% endset %}{% set ns.t = t %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "a doubled tuple": "{% set ns = namespace(l=(1,)) %}{% for i in range(99) %}"
    "{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l }}",
    "a doubled dictionary": "{% set ns = namespace(l={}) %}{% for i in range(99) %}"
    "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l }}",
    "namespaces": "{% set a = namespace() %}{% set b = namespace(x=a, y=a) %}{{ b }}",
    "namespaces put together": "{% set a = namespace() %}{{ a ~ a }}",
    "a namespace in a list": "{{ [namespace()] | string }}",
    "replaced text": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "replaced by a filter": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "nothing replaced": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "a joint": "{{ ('x' * 100000).join(range(100000)) }}",
    "a joint of text": "{{ ('x' * 100000).join('y' * 100000) }}",
    "joined by a filter": "{{ ('y' * 100000) | join('x' * 100000) }}",
    "padding": "{{ 'x'.ljust(99999999999) }}",
    "zeros": "{{ '1'.zfill(99999999999) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "a format": "{{ '{:99999999999}'.format('x') }}",
    "a nested format": "{{ '{:{}}'.format('x', 99999999999) }}",
    "an old format": "{{ '%99999999999d' % 1 }}",
    "an old format of a value": "{{ '%*d' % (99999999999, 1) }}",
    "a format filter": "{{ '%99999999999d' | format(1) }}",
    "an indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "an indent of text": "{{ ('\n' * 100000) | indent('x' * 100000) }}",
    "indented JSON": "{{ messages | tojson(indent=99999999999) }}",
    "separators": "{{ messages | tojson(separators=(',' * 99999, ':')) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "products": "{% set ns = namespace(n=9) %}{% for i in range(99) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "places": "{{ 1 | round(99999999) }}",
    "kept slices": "{% set t = 'xy' * 400000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(9999) %}{% set ns.l = ns.l + [t[1:]] %}{% endfor %}",
    "numbers as bytes": "{{ (1).to_bytes(99999999999, 'big') }}",
    "a date": "{{ strftime_now('%Y' * 100000) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], {})
    with pytest.raises(BadRequestError, match="chat template"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in y %}",
        "{{ 'x' | center(99999999999) }}",
        "{{ 'x' | wordwrap(1, wrapstring='y' * 99999999999) }}",
        "{{ lipsum(n=99999999) }}{{ 1 | no_such_filter }}",
        "{{ 'x' | replace('x', 'y' * 9999999) | nothing }}",
        "{% for a in b %}" * 40 + "{% endfor %}" * 40,
        "(" * 10 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x" * 600_000,
    ],
)
def test_templates_that_cannot_be_used(source: str) -> None:
    with pytest.raises(ValueError, match=r"[a-z]"):
        ChatTemplate(source, {})


def test_little_time_is_a_matter_of_another_thread() -> None:
    slow = ChatTemplate(HOSTILE["nested loops"], {})
    with pytest.raises(OutOfTimeError):
        slow.pieces(USER, cpu_s=0.001)
    quick = ChatTemplate("{{ messages[0].content }}", {})
    assert quick.pieces(USER, cpu_s=0.5) == ["hi"]


def test_options_reach_the_template_and_replace_nothing() -> None:
    source = "{{ enable_thinking }} {{ messages | length }} {{ bos_token }}{{ tools is none }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    options = {"enable_thinking": False, "messages": [], "tools": [1]}
    assert template.pieces(USER, options=options) == ["False 1 <s>True"]


def test_reasoning_in_the_history_reaches_the_template() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.reasoning_content or '-' }}{% endfor %}", {}
    )
    messages = [*USER, Message(role="assistant", content="a", reasoning_content="hm")]
    assert template.render(messages) == "-hm"


def test_mistral_gets_identifiers_of_nine_characters() -> None:
    source = """{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}
    {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
    {%- endif %}{{ c.id }}{% endfor %}{% if m.tool_call_id is defined %} {{ m.tool_call_id }}
    {%- endif %}{% endfor %}"""
    template = ChatTemplate(source, {})
    for call_id, kept in (("call_0123456789", False), ("a1B2c3D4e", True)):
        made, answered = template.render(
            [
                Message.model_validate(
                    {"role": "assistant", "tool_calls": [{**CALL, "id": call_id}]}
                ),
                Message(role="tool", content="r", tool_call_id=call_id),
            ]
        ).split()
        assert made == answered
        assert (made == call_id) is kept


def test_deep_schemas_and_arguments() -> None:
    deep: dict[str, object] = {}
    for _ in range(200):
        deep = {"a": deep}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": deep}})
    with pytest.raises(BadRequestError, match="at most 128 levels") as refused:
        ChatTemplate(CHAT_TEMPLATE, {}).render(USER, [tool])
    assert refused.value.param == "tools"
    text = '{"a":' * 200 + "1" + "}" * 200
    call = {"function": {"name": "f", "arguments": text}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert text in ChatTemplate(CHAT_TEMPLATE, {}).render([*USER, message])


def test_real_templates_work() -> None:
    source = """{%- set ns = namespace(system='', n=0) -%}
{%- for m in messages if m.role != 'x' -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}
{%- macro show(c, indent=0) -%}{{ ' ' * indent }}{{ c | trim }}{%- endmacro -%}
{{- show('  a ', indent=2) -}}|{{- (messages[::-1] | first)['content'] -}}
|{{- 'a</think>b'.split('</think>')[-1].lstrip('\n') -}}|{{- '%s-%s' % ('a', 1) -}}
|{{- ['a', 'b'] | join(', ') -}}|{{- {'a': 1} | tojson -}}|{{- {'b': 1}.items() | list -}}
|{{- 'x' in ('x', 'y') -}}|{{- messages | selectattr('role', 'equalto', 'user') | list | length -}}
|{{- ns.n -}}|{{- 'ab'[:1] ~ 1 ~ none -}}|{%- for k, v in {'k': 2} | dictsort -%}{{ k }}{{ v }}
{%- if not loop.last %},{% endif %}{%- break -%}{%- endfor -%}|{{- 'A' | lower | indent(2) -}}
|{%- generation -%}g{%- endgeneration -%}|{{- [1] | tojson(ensure_ascii=False, indent=1) -}}
|{{- [1, 2] | tojson(separators=(',', ':')) -}}|{{- strftime_now('%Y') | length -}}|{{- '{} {}'.format(1, 'x') -}}|{{- 'a'.replace('a', 'bb') -}}"""
    expected = (
        """  a|hi|b|a-1|a, b|{"a": 1}|[('b', 1)]|True|1|1|a1None|k2|a|g|[\n 1\n]|[1,2]|4|1 x|bb"""
    )
    assert ChatTemplate(source, {}).render(USER) == expected


@pytest.mark.parametrize("empty", [{}, [], None, 0])
def test_empty_values_may_be_written_as_often_as_given(empty: object) -> None:
    template = ChatTemplate("{{ tools | tojson }}", {})
    examples = [empty] * 20_000
    function = {"name": "f", "parameters": {"type": "object", "examples": examples}}
    tool = Tool.model_validate({"type": "function", "function": function})
    assert json.dumps(examples) in template.render(USER, [tool])
