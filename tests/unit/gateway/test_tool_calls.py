"""Tool calls are found however the text is cut; everything else stays text."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.hermes import ToolCallParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "</x>"]}}\n</tool_call>'
pieces = st.lists(st.sampled_from(["text ", "<tool", "<", CALL, "\n", "é"]), max_size=6)


def parse(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    parser, shown, start = ToolCallParser(lambda: "id"), "", 0
    for end in [*sorted(c for c in cuts if c < len(text)), len(text)]:
        shown += parser.push(text[start:end])
        start = end
    shown += parser.flush()
    return shown, [(call.name, call.arguments) for call in parser.calls]


@given(pieces=pieces, cuts=st.lists(st.integers(0, 300), max_size=12))
def test_cuts_change_nothing(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    shown, calls = parse(text, cuts)
    assert calls == [("f", '{"a":[1,"</x>"]}')] * text.count(CALL)
    assert shown.replace("\n", "") == text.replace(CALL, "").replace("\n", "")
    assert (shown, calls) == parse(text, [])


def test_space_after_a_call_goes_and_all_other_space_stays() -> None:
    text = f"a \n{CALL}\n \nb {CALL}\n{CALL}\n"
    for cuts in ([], list(range(len(text)))):
        assert parse(text, cuts)[0] == "a \nb "


def test_broken_calls_are_text_and_unclosed_whole_ones_count() -> None:
    assert parse("<tool_call>{broken</tool_call>", []) == ("<tool_call>{broken</tool_call>", [])
    assert parse('<tool_call>{"name": 3}</tool_call>', [])[1] == []
    assert parse('<tool_call>{"name": "g"}', [5])[1] == [("g", "{}")]
    assert parse('<tool_call>{"name": "g"', [5]) == ('<tool_call>{"name": "g"', [])
