"""A conversation that goes on comes to what all of it comes to, whatever its template does."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bases.assets import BaseAssets, load_base
from gateway.bases.encoder import PromptEncoder
from gateway.bases.files import read_tokenizer
from gateway.bases.grown_prompts import IDLE_S, GrownPrompts, PromptPlace
from gateway.bases.prompt_trail import PromptTrail
from gateway.bases.slices import finished
from gateway.bases.spans import PromptSpans
from gateway.bases.templates import ChatTemplate
from gateway.bodies.messages import Message, Tool
from tests.support.random_models import CHAT_TEMPLATE, write_random_model
from training.chat import CHAT_TEMPLATE as SHIPPED

# Looks at the messages beside each one, by their numbers.
NEIGHBOURS = """
{%- for message in messages %}
{%- if loop.first and messages[0].role != 'system' %}<|im_start|>system
default<|im_end|>
{% endif %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }} {{ loop.index }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '' if loop.first else ',' }}{{ call.function.name }}
{%- endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# What Qwen3 does: thoughts before the last thing that a user says are left out.
REWRITING = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if loop.index0 > ns.last %} thinks{% endif %}{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
COUNTING = "{% for m in messages %}{{ messages | length }}{{ m.content }}<|im_end|>{% endfor %}"
GROWING = {"chatml": CHAT_TEMPLATE, "shipped": SHIPPED, "neighbours": NEIGHBOURS}
WHOLE = {
    "rewriting": REWRITING,
    "counting": COUNTING,
    "the last one": "{% for m in messages %}{{ m.content if m != messages[-1] }}{% endfor %}",
    "the one before the first": "{% for m in messages %}{{ messages[loop.index0 - 1] }}{% endfor %}",
    "from the end": "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
    "backwards": "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "a part": "{% set messages = messages[1:] %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "a running number": "{% set n = namespace(i=0) %}{% for m in messages %}"
    "{% set n.i = n.i + 1 %}{{ n.i }}{% endfor %}",
    "a macro's number": "{% set n = namespace(i=0) %}{% macro f() %}{% set n.i = 1 %}{% endmacro %}"
    "{% for m in messages %}{{ n.i }}{{ f() }}{% endfor %}",
    "a separator": "{% set s = joiner() %}{% for m in messages %}{{ s() }}{{ m.content }}{% endfor %}",
    "a date": "{% for m in messages %}{{ strftime_now('%s') }}{{ m.content }}{% endfor %}",
    "what has changed": "{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}",
    "its end": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "its loop": "{% for m in messages %}{% set l = loop %}{{ l.length }}{% endfor %}",
    "two loops": "{% for m in messages %}a{% endfor %}{% for m in messages %}b{% endfor %}",
}
CALL: dict[str, Any] = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = Tool.model_validate(
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
)
TEXTS = [
    "",
    "hi",
    "\n",
    " tell me of the river",
    "é 🌊",
    "<|im_",
    "im_end|>",
    "<|im_end|>x",
    "\ufdd0seam",
]


def message(role: str, text: str) -> Message:
    return Message.model_validate({"role": role, "content": text})


MESSAGES = st.one_of(
    st.builds(
        message,
        st.sampled_from(["user", "assistant", "user", "assistant", "system"]),
        st.sampled_from(TEXTS),
    ),
    st.just(Message.model_validate({"role": "assistant", "content": "", "tool_calls": [CALL]})),
    st.just(Message(role="tool", content="r", tool_call_id="1")),
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for name, source in (GROWING | WHOLE).items():
        made[name] = tmp_path_factory.mktemp("base")
        write_random_model(made[name])
        (made[name] / "chat_template.jinja").write_text(source)
    return made


@pytest.fixture(scope="module")
def assets(bases: dict[str, Path]) -> dict[str, BaseAssets]:
    return {name: load_base(directory) for name, directory in bases.items()}


@pytest.fixture(scope="module")
def others(bases: dict[str, Path]) -> dict[str, BaseAssets]:
    """The assets of another worker."""
    return {name: load_base(directory) for name, directory in bases.items()}


def encoded(assets: BaseAssets, messages: list[Message], session: str, **more: Any) -> Any:
    tools = more.pop("tools", ())
    return asyncio.run(assets.encode_chat(messages, tools, b"r" * 16, session=session, **more))


@pytest.mark.parametrize("name", GROWING)
def test_a_growing_template_writes_messages_one_by_one(name: str) -> None:
    template = ChatTemplate(GROWING[name], {})
    messages = [message(role, role) for role in ("user", "assistant", "user")]
    _, chat = template.written(messages)
    assert chat is not None
    more = [*messages, *messages[1:]]
    longer = template.continued(chat, more, (), {})
    assert longer is not None
    assert longer.kept == 2
    known = "".join([chat.before, *chat.texts[:2]])
    assert known + "".join([*longer.texts, longer.behind]) == template.render(more)


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_written_whole(name: str) -> None:
    _, chat = ChatTemplate(WHOLE[name], {}).written([Message(role="user", content="x")] * 3)
    assert chat is None


@pytest.mark.parametrize("name", [*GROWING, "rewriting", "counting"])
@given(
    turns=st.lists(st.lists(MESSAGES, min_size=1, max_size=4), min_size=2, max_size=5),
    data=st.data(),
)
def test_ids_equal_the_ids_of_a_full_rendering(
    assets: dict[str, BaseAssets], name: str, turns: list[list[Message]], data: st.DataObject
) -> None:
    own, messages = assets[name], list[Message]()
    for turn in turns:
        messages = [*messages, *turn]
        tools = data.draw(st.sampled_from([(), (), (), (TOOL,)]))
        cut = data.draw(st.sampled_from([0, 0, 0, 1]))
        shown = messages[cut:] or messages
        found = encoded(own, shown, "s", tools=tools)
        whole = encoded(own, shown, "", tools=tools)
        assert found.ids == whole.ids
        assert found[1:3] == whole[1:3]
        messages = data.draw(st.sampled_from([messages, messages, messages[:-1] or messages]))


@pytest.mark.parametrize("name", ["shipped", "neighbours", "rewriting"])
@given(
    turns=st.lists(st.lists(MESSAGES, min_size=1, max_size=4), min_size=2, max_size=5),
    data=st.data(),
)
def test_ids_of_a_chain_are_the_same_at_any_worker(
    assets: dict[str, BaseAssets],
    others: dict[str, BaseAssets],
    name: str,
    turns: list[list[Message]],
    data: st.DataObject,
) -> None:
    messages, trail = list[Message](), PromptTrail()
    for turn in turns:
        messages = [*messages, *turn]
        worker = data.draw(st.sampled_from([assets, others]))[name]
        tools = data.draw(st.sampled_from([(), (), (TOOL,)]))
        cut = data.draw(st.sampled_from([0, 0, 0, 1]))
        shown = messages[cut:] or messages
        session = data.draw(st.sampled_from(["s", f"{len(messages)}"]))  # known here, or not
        found = encoded(worker, shown, session, tools=tools, trail=trail)
        whole = encoded(worker, shown, "", tools=tools)
        assert found.ids == whole.ids
        assert found[1:3] == whole[1:3]
        trail = trail.extended([found.record] * data.draw(st.sampled_from([1, 1, 0])))


LONG = [
    message(role, f"{number}" + " tell me of the river" * 9)
    for number, role in enumerate(["system", "user", "assistant", "user", "assistant", "user"])
]


def chained(worker: BaseAssets, counts: tuple[int, ...] = (4, 6), **more: Any) -> Any:
    """Return the record of each turn of a chain, and what they come to."""
    trail, records = PromptTrail(), list[bytes]()
    for count in counts:
        records.append(encoded(worker, LONG[:count], "s", trail=trail, **more).record)
        trail = trail.extended(records[-1:])
    return records, trail


FURTHER = [*LONG, message("assistant", "fine"), message("user", "and now?")]


def test_another_worker_appends_to_the_stored_tokens(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, trail = chained(load_base(bases["chatml"]))
    assert all(records)
    assert len(records[1]) < len(records[0]), "a turn stores what it has brought"
    other = load_base(bases["chatml"])
    whole = encoded(other, FURTHER, "")

    def refused(*_: object, **__: object) -> Any:
        raise AssertionError("it is rendered as a whole")

    monkeypatch.setattr(ChatTemplate, "written", refused)
    found = encoded(other, FURTHER, "s", trail=trail)
    assert (found.ids, found.block_hashes) == (whole.ids, whole.block_hashes)
    assert trail.extended([found.record]).extended([b""]).latest is not None
    assert trail.ids() == whole.ids[: len(trail.ids())]


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": [message("system", "other"), *FURTHER[1:]]},
        {"tools": (TOOL,)},
        {"options": {"enable_thinking": False}},
        {"base": "shipped"},
        {"root": b"q" * 16},
    ],
    ids=["a message", "tools", "options", "a template", "a model"],
)
def test_a_stored_prompt_of_something_else_is_rendered_anew(
    bases: dict[str, Path], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trail = chained(load_base(bases["chatml"]))
    worker, more = load_base(bases[changed.get("base", "chatml")]), dict(changed)
    messages, root = more.pop("messages", FURTHER), more.pop("root", b"r" * 16)
    more.pop("base", None)
    tools = more.pop("tools", ())
    encode = partial(worker.encode_chat, messages, tools, root, **more)
    restored, restore = list[Any](), GrownPrompts.restored

    def note(*told: Any) -> Any:
        restored.append(restore(*told))
        return restored[-1]

    monkeypatch.setattr(GrownPrompts, "restored", note)
    whole = asyncio.run(encode(session=""))
    found = asyncio.run(encode(session="s", trail=trail))
    assert (found.ids, found.block_hashes) == (whole.ids, whole.block_hashes)
    assert restored == [None]
    assert found.record, "the turn stores its own"


def test_records_that_do_not_follow_are_passed_over(bases: dict[str, Path]) -> None:
    (first, second), trail = chained(load_base(bases["chatml"]))
    assert PromptTrail().extended([second, b"", b"\xff garbage"]).latest is None
    assert PromptTrail().extended([first]).extended([b"", second]) == trail
    assert trail.extended([first]).extended([second]) == trail
    assert (
        list(trail.ids())
        == list(encoded(load_base(bases["chatml"]), LONG, "").ids)[: len(trail.ids())]
    )


def test_a_prompt_is_dropped_an_hour_after_its_last_use(bases: dict[str, Path]) -> None:
    now_s = [0.0]
    tokenizer = read_tokenizer(bases["chatml"] / "tokenizer.json")
    grown = GrownPrompts(PromptEncoder(tokenizer), PromptSpans(), clock=lambda: now_s[0])
    messages = [message(role, role) for role in ("user", "assistant", "user")]
    _, chat = ChatTemplate(CHAT_TEMPLATE, {}).written(messages)
    assert chat is not None
    places = [PromptPlace("one", b"r" * 16, session) for session in ("a", "b")]
    for place in places:
        finished(grown.encode(place, chat, None, None))
    now_s[0] = IDLE_S - 1
    assert grown.find(places[0], messages) is not None
    now_s[0] = IDLE_S
    grown.forget_idle()
    assert grown.find(places[1], messages) is None
    assert grown.find(places[0], messages) is not None
    now_s[0] = 2 * IDLE_S
    grown.forget_idle()
    assert grown.held_bytes == 0
