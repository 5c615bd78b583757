"""Calls and reasoning are found however the text is cut; everything else stays text."""

import itertools
import json
import keyword
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.delta import CallDelta, OutputParser
from gateway.dialects.dialect import Dialect
from gateway.dialects.forms import CallForm, ReasoningForm

TOOLS = ("get_weather", "geo.find", "f", "g")
HERMES = Dialect(CallForm.HERMES)
LLAMA = Dialect(CallForm.LLAMA_JSON)
MISTRAL = Dialect(CallForm.MISTRAL)
QWEN3 = Dialect(CallForm.HERMES, ReasoningForm.THINK)
MAGISTRAL = Dialect(CallForm.MISTRAL_NAMED, ReasoningForm.MISTRAL)


class Answer(NamedTuple):
    """What a client has in the end."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    is_complete: bool = False


def parse(
    dialect: Dialect,
    text: str,
    cuts: Sequence[int] = (),
    *,
    tools: Sequence[str] = TOOLS,
    is_parallel: bool = True,
    is_reasoning: bool = False,
    is_forced: bool = False,
) -> Answer:
    """Feed `text`, cut at these indices, and put the deltas together as a client does."""
    ids = map("call_{}".format, itertools.count())
    parser = dialect.parser(
        tools=tools,
        is_parallel=is_parallel,
        new_call_id=lambda: next(ids),
        is_reasoning=is_reasoning,
        is_forced=is_forced,
    )
    assert parser is not None
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return collect(parser, pieces)


def collect(parser: OutputParser, pieces: Sequence[str]) -> Answer:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for delta in itertools.chain(map(parser.push, pieces), (parser.flush() for _ in (1,))):
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.name:
                assert call.index == len(calls)
                assert call.call_id == f"call_{call.index}"
                calls.append((call.name, []))
            assert call.index == len(calls) - 1, "only the call begun last goes on"
            calls[-1][1].append(call.arguments)
    assert parser.has_calls == bool(calls)
    made = tuple((name, "".join(parts)) for name, parts in calls)
    return Answer("".join(content), made, "".join(reasoning), parser.is_complete)


WEATHER = ("get_weather", '{"city": "Zürich", "days": [1, {"x": null}]}')
WEATHER_JSON = '{"name": "get_weather", "arguments": ' + WEATHER[1] + "}"
LLAMA_WEATHER = '{"name": "get_weather", "parameters": ' + WEATHER[1] + "}"
PYTHON_WEATHER = ("get_weather", '{"city":"Zürich","days":[1,{"x":null}]}')
FIND = ("geo.find", "{}")

# What models write -> what the client gets.
RECORDED: dict[str, tuple[Dialect, str, Answer]] = {
    "hermes": (
        HERMES,
        f"Let me look.\n<tool_call>\n{WEATHER_JSON}\n</tool_call>",
        Answer("Let me look.\n", (WEATHER,)),
    ),
    "hermes, two calls": (
        HERMES,
        f'<tool_call>\n{WEATHER_JSON}\n</tool_call>\n<tool_call>{{"name": "geo.find", '
        '"arguments": {}}</tool_call>\n',
        Answer("", (WEATHER, FIND)),
    ),
    "hermes, arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
        Answer("", (("f", '{"a": "</tool_call>"}'),)),
    ),
    "hermes, arguments as text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>ok',
        Answer("ok", (("f", '{"a": 1}'),)),
    ),
    "hermes, no arguments": (
        HERMES,
        '<tool_call>{"id": 7, "name": "f"}</tool_call><tool_call>{"name": "g", "arguments": null}',
        Answer("", (("f", "{}"), ("g", "{}"))),
    ),
    "hermes, line break in a string": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb"}}</tool_call>',
        Answer("", (("f", '{"code": "a\\n\\tb"}'),)),
    ),
    "hermes, closing mark forgotten": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}',
        Answer("", (("f", "{}"), ("g", "{}"))),
    ),
    "hermes, program code": (
        HERMES,
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        Answer(
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        ),
    ),
    "hermes, no name": (
        HERMES,
        'a <tool_call>{"arguments": {}}</tool_call> b',
        Answer('a <tool_call>{"arguments": {}}</tool_call> b'),
    ),
    "hermes, cut short": (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zü',
        Answer("", (("get_weather", '{"city": "Zü'),)),
    ),
    "hermes, cut before the name": (
        HERMES,
        '<tool_call>\n{"name": "get_wea',
        Answer('<tool_call>\n{"name": "get_wea'),
    ),
    "hermes, broken in the arguments": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>',
        Answer("True}}</tool_call>", (("f", '{"a": '),)),
    ),
    "llama, bare": (LLAMA, LLAMA_WEATHER, Answer("", (WEATHER,))),
    "llama, behind its mark": (
        LLAMA,
        f'<|python_tag|>{LLAMA_WEATHER}; {{"name": "geo.find", "parameters": {{}}}}',
        Answer("", (WEATHER, FIND)),
    ),
    "llama, text before its mark": (
        LLAMA,
        f"One moment. <|python_tag|>{LLAMA_WEATHER}",
        Answer("One moment. ", (WEATHER,)),
    ),
    "llama, with a type, lines apart": (
        LLAMA,
        '\n{"type": "function", "name": "f", "parameters": {"a": 1}}\n{"name": "g"}',
        Answer("", (("f", '{"a": 1}'), ("g", "{}"))),
    ),
    "llama, JSON that is the answer": (
        LLAMA,
        '{"name": "Ada", "parameters": {"born": 1815}}',
        Answer('{"name": "Ada", "parameters": {"born": 1815}}'),
    ),
    "llama, JSON that begins with another key": (
        LLAMA,
        '{"title": "f", "name": "f"}',
        Answer('{"title": "f", "name": "f"}'),
    ),
    "llama, Meta's own interpreter": (
        LLAMA,
        '<|python_tag|>brave_search.call(query="x")',
        Answer('<|python_tag|>brave_search.call(query="x")'),
    ),
    "llama, text behind a semicolon": (
        LLAMA,
        '{"name": "f", "parameters": {}}; and so on',
        Answer("; and so on", (("f", "{}"),)),
    ),
    "pythonic": (
        LLAMA,
        '[get_weather(city="Zürich", days=[1, {"x": None}]), geo.find()]',
        Answer("", (PYTHON_WEATHER, FIND)),
    ),
    "pythonic, in the marks of Llama 4": (
        LLAMA,
        "<|python_start|>[f(a='it\\'s', b=(True, -1.5), c=\"\"\"x\"y\n\"\"\")]<|python_end|>",
        Answer("", (("f", '{"a":"it\'s","b":[true,-1.5],"c":"x\\"y\\n"}'),)),
    ),
    "pythonic, brackets and breaks in strings": (
        LLAMA,
        '[f(a="),]", b="1\n2", c="\\ud83d\\ude00 \\/")]',
        Answer("", (("f", '{"a":"),]","b":"1\\n2","c":"😀 /"}'),)),
    ),
    "pythonic, numbers": (
        LLAMA,
        "[f(a=2E38252, b=[-2e999, -0.5, -7, 1e16], c={'x': false})]",
        Answer("", (("f", '{"a":1e999,"b":[-1e999,-0.5,-7,1e+16],"c":{"x":false}}'),)),
    ),
    "pythonic, no number": (LLAMA, "[f(a=-True)]", Answer("[f(a=-True)]")),
    "pythonic, a list that is the answer": (LLAMA, "[1, 2, 3]", Answer("[1, 2, 3]")),
    "pythonic, a link": (LLAMA, "[f](http://x)", Answer("[f](http://x)")),
    "pythonic, no literal": (
        LLAMA,
        "[f(a=1), g(a=open('x'))]",
        Answer(", g(a=open('x'))]", (("f", '{"a":1}'),)),
    ),
    "pythonic, by position": (LLAMA, "[f(1)]", Answer("[f(1)]")),
    "mistral, a list": (
        MISTRAL,
        f'[TOOL_CALLS] [{WEATHER_JSON}, {{"name": "geo.find", "arguments": {{}}, "id": "a"}}]',
        Answer("", (WEATHER, FIND)),
    ),
    "mistral, named": (
        MAGISTRAL,
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}[TOOL_CALLS]geo.find[ARGS]{{}}",
        Answer("Sure.", (WEATHER, FIND)),
    ),
    "mistral, with an identifier": (
        MISTRAL,
        f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{WEATHER[1]}",
        Answer("", (WEATHER,)),
    ),
    "mistral, without the second mark": (
        MISTRAL,
        f"[TOOL_CALLS]get_weather{WEATHER[1]}",
        Answer("", (WEATHER,)),
    ),
    "mistral, about the mark": (
        MISTRAL,
        "Write [TOOL_CALLS] first, [ARGS] then.",
        Answer("Write [TOOL_CALLS] first, [ARGS] then."),
    ),
    "reasoning": (
        QWEN3,
        f"<think>\nHm, <tool_call>?\n</think>\n\n<tool_call>\n{WEATHER_JSON}\n</tool_call>",
        Answer("", (WEATHER,), "Hm, <tool_call>?\n"),
    ),
    "reasoning, empty": (QWEN3, "<think>\n\n</think>\n\nYes.", Answer("Yes.")),
    "reasoning, indented": (QWEN3, "<think>x</think>\n\n  - a\n", Answer("  - a\n", (), "x")),
    "reasoning, spaces in empty lines": (
        QWEN3, "<think>x</think> \n\t\r\n \nAnswer", Answer("Answer", (), "x"),
    ),
    "reasoning, indented behind such": (
        QWEN3, "<think>x</think> \n\n    x = 1\n", Answer("    x = 1\n", (), "x"),
    ),
    "reasoning, empty lines alone": (QWEN3, "<think>x</think> \n \n", Answer("", (), "x")),
    "reasoning, spaces alone": (QWEN3, "<think>x</think>\n \n  ", Answer("  ", (), "x")),
    "reasoning, spaces that are an answer": (
        QWEN3, f"<think>x</think> \n{' ' * 65}\ny", Answer(f"{' ' * 65}\ny", (), "x"),
    ),
    "reasoning, none": (QWEN3, "Tags like <think> are text here.",
                        Answer("Tags like <think> are text here.")),
    "reasoning, cut short": (QWEN3, "<think>so </thi", Answer("", (), "so </thi")),
    "reasoning of Magistral": (
        MAGISTRAL,
        "[THINK]a [b][/THINK]Hello[TOOL_CALLS]f[ARGS]{}",
        Answer("Hello", (("f", "{}"),), "a [b]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_answers_of_real_models_are_parsed(name: str) -> None:
    dialect, text, answer = RECORDED[name]
    assert parse(dialect, text) == answer
    assert parse(dialect, text, range(len(text))) == answer
    for cut in range(len(text)):
        assert parse(dialect, text, [cut]) == answer


@given(st.data())
def test_cuts_change_nothing(data: st.DataObject) -> None:
    """Whatever is written: pieces of all forms, in any order, cut anywhere."""
    whole = [text for _, text, _ in RECORDED.values()]
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]
    marks += ["<|python_tag|>", "[f(", '{"name": "f", "arguments": ', '"""', "\\", "{", "}", "]"]
    pieces = data.draw(st.lists(st.sampled_from([*whole, *marks, " ", "é", ";", ","]), max_size=8))
    text = "".join(piece[data.draw(st.integers(0, len(piece) // 2)) :] for piece in pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    dialect = data.draw(st.sampled_from([HERMES, LLAMA, MISTRAL, QWEN3, MAGISTRAL]))
    is_parallel, is_reasoning = data.draw(st.booleans()), data.draw(st.booleans())
    expected = parse(dialect, text, is_parallel=is_parallel, is_reasoning=is_reasoning)
    assert expected == parse(
        dialect, text, cuts, is_parallel=is_parallel, is_reasoning=is_reasoning
    )


def test_the_first_whole_call_ends_an_answer_that_may_have_one() -> None:
    for name in ("hermes, two calls", "llama, behind its mark", "pythonic", "mistral, a list",
                 "mistral, named"):  # fmt: skip
        dialect, text, answer = RECORDED[name]
        single = answer._replace(calls=answer.calls[:1], is_complete=True)
        for cut in range(len(text)):
            assert parse(dialect, text, [cut], is_parallel=False) == single


def test_names_and_arguments_go_out_as_they_come() -> None:
    ids = map("call_{}".format, itertools.count())
    parser = HERMES.parser(tools=TOOLS, is_parallel=True, new_call_id=lambda: next(ids))
    assert parser is not None
    assert parser.push('<tool_call>{"name": "f').calls == ()
    assert parser.push('"').calls == (CallDelta(0, "", "call_0", "f"),)
    assert parser.push(', "arguments": ').calls == ()
    for piece in ('{"a"', ": ", '"x\\', '"y"', "}"):
        assert parser.push(piece).calls == (CallDelta(0, piece),)
    assert parser.push("}</tool_call>").calls == ()


literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
arguments = st.dictionaries(names, literals, max_size=3)


def written(form: str, calls: list[tuple[str, dict[str, Any]]], *, is_ascii: bool) -> str:
    """Return calls as a model of this family writes them."""

    def dumped(value: Any) -> str:
        return json.dumps(value, ensure_ascii=is_ascii)

    def named(key: str) -> list[str]:
        return [dumped({"name": name, key: values}) for name, values in calls]

    if form == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in named("arguments"))
    if form == "llama":
        return "; ".join(named("parameters"))
    if form == "mistral":
        return f"[TOOL_CALLS] [{', '.join(named('arguments'))}]"
    if form == "mistral named":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(values)}" for name, values in calls)
    listed = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        for name, values in calls
    ]
    return f"[{', '.join(listed)}]"


DIALECTS = {
    "hermes": QWEN3,
    "llama": LLAMA,
    "pythonic": LLAMA,
    "mistral": MISTRAL,
    "mistral named": MAGISTRAL,
}


@given(
    form=st.sampled_from([*DIALECTS]),
    calls=st.lists(st.tuples(st.sampled_from(TOOLS), arguments), min_size=1, max_size=3),
    is_ascii=st.booleans(),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_a_written_call_is_parsed(
    form: str, calls: list[tuple[str, dict[str, Any]]], is_ascii: bool, cuts: list[int]
) -> None:
    answer = parse(DIALECTS[form], written(form, calls, is_ascii=is_ascii), cuts)
    assert (answer.content, answer.reasoning) == ("", "")
    assert [(name, json.loads(text)) for name, text in answer.calls] == calls


def answers(size: int) -> dict[str, tuple[Dialect, str]]:
    """Return long answers, each a way to make a careless parser look at all of it again."""
    x = "x" * size
    return {
        "text": (QWEN3, "<" * size),
        "half marks": (QWEN3, "<tool_cal" * (size // 9)),
        "arguments": (HERMES, f'<tool_call>{{"name": "f", "arguments": {{"a": "{x}"}}}}'),
        "escapes": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "' + "\\n" * (size // 2)),
        "before the name": (HERMES, f'<tool_call>{{"arguments": {{"a": "{x}"}}, "name": "f"}}'),
        "white space": (HERMES, "<tool_call>" + " " * size),
        "items": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [' + "1," * (size // 2)),
        "number": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * size),
        "marks": (HERMES, "<tool_call>" * (size // 11)),
        "reasoning": (QWEN3, "<think>" + "</thin" * (size // 6)),
        "space before reasoning": (QWEN3, " " * size),
        "space behind reasoning": (QWEN3, "<think>x</think>" + " " * size),
        "lines behind reasoning": (QWEN3, "<think>x</think>" + " \n" * (size // 2)),
        "python": (LLAMA, f"[f(a='{x}')]"),
        "quotes": (LLAMA, "[f(a=" + "'" * size),
        "open python": (LLAMA, "[f(a=" + "[" * size),
        "space before a call": (LLAMA, " " * size + "{"),
        "calls": (LLAMA, '{"name": "f"}; ' * (size // 15)),
        "names": (MISTRAL, "[TOOL_CALLS]" + x),
        "identifier": (MISTRAL, "[TOOL_CALLS]f[CALL_ID]" + x),
    }


def test_no_text_is_looked_at_more_than_a_few_times() -> None:
    for name, (dialect, text) in answers(20_000).items():
        parser = dialect.parser(tools=TOOLS, is_parallel=True, new_call_id=lambda: "call")
        assert parser is not None
        for character in text:
            parser.push(character)
            assert len(rest_of(parser)) <= 300, name


def rest_of(parser: OutputParser) -> str:
    """Return what is looked at again with the next piece."""
    rest = ""
    for name in ("_rest", "_after"):
        part = getattr(parser, name, None)
        rest += part if isinstance(part, str) else rest_of(part) if part is not None else ""
    return rest


def test_a_long_call_one_character_at_a_time() -> None:
    dialect, text = answers(1 << 18)["arguments"]
    parser = dialect.parser(tools=TOOLS, is_parallel=True, new_call_id=lambda: "call_0")
    assert parser is not None
    assert collect(parser, text).calls == (("f", f'{{"a": "{"x" * (1 << 18)}"}}'),)


def test_a_call_too_long_or_too_deep_is_text() -> None:
    for name, (dialect, text) in answers(100_000).items():
        answer = parse(dialect, text)
        if name in ("before the name", "white space", "marks", "python", "quotes", "open python",
                    "names", "identifier", "space before a call"):  # fmt: skip
            assert answer.content == text, name
            assert not answer.calls, name
    deep = '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 100
    answer = parse(HERMES, deep)
    assert answer.calls[0][1].count("{") == 64
    assert answer.calls[0][1] + answer.content == '{"a": ' * 100


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (HERMES, f"<tool_call>\n{WEATHER_JSON}\n</tool_call>\n<tool_call>\n{WEATHER_JSON}"),
        (LLAMA, f"{LLAMA_WEATHER}; {LLAMA_WEATHER}"),
        (LLAMA, '[get_weather(city="Zürich"), geo.find()]'),
        (MISTRAL, f"[TOOL_CALLS] [{WEATHER_JSON}, {WEATHER_JSON}]"),
        (QWEN3, f"<think>\nwhy\n</think>\n\n<tool_call>\n{WEATHER_JSON}\n</tool_call>"),
        (MAGISTRAL, f"[THINK]why[/THINK][TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}"),
    ],
)
def test_of_a_forced_call_that_is_cut_nothing_is_content(dialect: Dialect, text: str) -> None:
    whole = parse(dialect, text, is_forced=True)
    assert whole.calls
    for length in range(len(text)):
        cut = parse(dialect, text[:length], is_forced=True)
        assert cut.content == ""
        assert len(cut.calls) <= len(whole.calls)
        assert all(
            name == its_name and arguments.startswith(piece)
            for (name, piece), (its_name, arguments) in zip(cut.calls, whole.calls, strict=False)
        )
