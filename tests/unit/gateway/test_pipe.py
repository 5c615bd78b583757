"""The pipe from tokens to deltas: whatever is held back comes later, or never, but not twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.dialects.delta import NOTHING, AnswerDelta, CallDelta, joined
from gateway.dialects.marks import ReasoningMarks
from gateway.dialects.reasoning import ReasoningParser
from gateway.text.detokenizer import TokenTable, token_table
from gateway.text.logprobs import (
    LOGPROB_MIN,
    LogprobLine,
    TextOffsets,
    TokenLogprob,
    chat_logprobs,
    completion_logprobs,
)
from gateway.text.pipe import TextPipe
from tests.unit.gateway.test_streamed import TABLE, TOKENIZER


class OneCall:
    """A parser for `[...]`: a call whose arguments are what stands between the brackets."""

    is_plain = is_reasoning = False

    def __init__(self, *, is_complete_after_call: bool = False) -> None:
        self.has_calls = False
        self.is_complete = False
        self._is_inside = False
        self._ends = is_complete_after_call

    def push(self, text: str) -> AnswerDelta:
        delta = NOTHING
        for character in text:
            delta = joined(delta, self._one(character))
        return delta

    def _one(self, character: str) -> AnswerDelta:
        if character == "[":
            self.has_calls = self._is_inside = True
            return AnswerDelta(calls=(CallDelta(0, "", "id", "f"),))
        if character == "]":
            self._is_inside = False
            self.is_complete = self._ends
            return NOTHING
        if self._is_inside:
            return AnswerDelta(calls=(CallDelta(0, character),))
        return AnswerDelta(character)

    def flush(self) -> AnswerDelta:
        return NOTHING


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def run(pipe: TextPipe, tokens: list[int], group: int) -> AnswerDelta:
    total = NOTHING
    for start in range(0, len(tokens), group):
        if pipe.is_stopped:
            break
        total = joined(total, pipe.push(tokens[start : start + group]))
    return joined(total, pipe.flush())


@given(st.text(alphabet="ab[]é😀", max_size=30), st.integers(1, 7))
def test_how_the_tokens_are_grouped_does_not_matter(text: str, group: int) -> None:
    alone = run(TextPipe(TABLE, ("aab", "ba"), OneCall()), ids(text), 1)
    grouped = run(TextPipe(TABLE, ("aab", "ba"), OneCall()), ids(text), group)
    assert grouped.content == alone.content
    assert "".join(c.arguments for c in grouped.calls) == "".join(c.arguments for c in alone.calls)


def test_a_call_behind_a_stop_string_is_not_told() -> None:
    delta = run(TextPipe(TABLE, ("STOP",), OneCall()), ids("hi STOP[x]"), 100)
    assert delta == AnswerDelta("hi ")


def test_the_answer_ends_with_the_one_call_that_is_allowed() -> None:
    pipe = TextPipe(TABLE, (), OneCall(is_complete_after_call=True))
    delta = run(pipe, ids("a[1]b[2]"), 1)
    assert pipe.is_stopped
    assert (delta.content, "".join(c.arguments for c in delta.calls)) == ("a", "1")


def test_the_beginning_of_a_stop_string_is_sent_when_the_one_call_ends_the_answer() -> None:
    pipe = TextPipe(TABLE, ("ab", "b"), OneCall(is_complete_after_call=True))
    assert run(pipe, ids("xa[1]b"), 1).content == "xa"
    assert pipe.shown == 2


@given(
    st.text(alphabet="abc é😀", max_size=30),
    st.integers(1, 5),
    st.sampled_from([(), ("ab", "c c")]),
)
def test_log_probabilities_come_with_their_text(text: str, group: int, stops) -> None:
    tokens = ids(text)
    pipe, line = TextPipe(TABLE, stops), LogprobLine(frozenset())
    shown, told = "", []
    for start in range(0, len(tokens), group):
        before = pipe.characters
        piece = tokens[start : start + group]
        shown += pipe.push(piece).content
        line.push([TokenLogprob(t, -0.5, ()) for t in piece], pipe.characters - before)
        told += line.shown(pipe.shown)
        if pipe.is_stopped:
            break
    was_stopped = pipe.is_stopped
    shown += pipe.flush().content
    told += line.shown(pipe.shown) if was_stopped or pipe.is_stopped else line.rest()
    if group == 1 and not was_stopped:
        assert [entry.token for entry in told] == tokens
    told_text = b"".join(TABLE.bytes_of(entry.token) for entry in told).decode(errors="replace")
    assert told_text.startswith(shown)


def test_end_of_sequence_is_no_part_of_the_text() -> None:
    line = LogprobLine(frozenset({7}))
    line.push([TokenLogprob(7, -0.1, ()), TokenLogprob(8, -0.2, ())], 1)
    assert [entry.token for entry in line.rest()] == [8]


def test_only_the_first_token_of_a_text_is_without_the_space_before_it() -> None:
    vocabulary = {"▁a": 0, "<0xC3>": 1, "<0xA9>": 2, "</s>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    table = token_table(tokenizer, [3])
    pipe, line, told, text = TextPipe(table), LogprobLine(table.hidden), [], ""
    for token in (3, 0, 0, 1, 2, 0):
        before = pipe.characters
        text += pipe.push([token]).content
        line.push([TokenLogprob(token, -0.5, [(0, -0.5)])], pipe.characters - before)
        told += line.shown(pipe.shown)
    assert text + pipe.flush().content == "a aé a"
    found = completion_logprobs(table, [*told, *line.rest()], TextOffsets())
    assert found["tokens"] == ["a", " a", "bytes:\\xc3", "bytes:\\xa9", " a"]
    assert found["text_offset"] == [0, 1, 3, 3, 4]
    assert found["top_logprobs"][0] == {"a": -0.5}
    assert found["top_logprobs"][1] == {" a": -0.5}


def test_both_forms_of_log_probabilities() -> None:
    [a], [b] = ids("a"), ids("b")
    entries = [TokenLogprob(a, -0.25, [(a, -0.25), (b, float("-inf"))])]
    chat = chat_logprobs(TABLE, entries)
    assert chat == {
        "refusal": None,
        "content": [
            {
                "token": "a",
                "logprob": -0.25,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.25, "bytes": [97]},
                    {"token": "b", "logprob": LOGPROB_MIN, "bytes": [98]},
                ],
            }
        ],
    }
    offsets = TextOffsets()
    completion_logprobs(TABLE, entries * 3, offsets)
    text = completion_logprobs(TABLE, entries * 2, offsets)
    assert text == {
        "tokens": ["a", "a"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"a": -0.25, "b": LOGPROB_MIN}] * 2,
        "text_offset": [3, 4],
    }


def test_the_sampled_token_is_among_the_most_probable_and_parts_of_characters_have_their_bytes() -> (
    None
):
    [a], (first, second, *_) = ids("a"), ids("😀")
    entries = [
        TokenLogprob(a, -3.0, [(first, -0.5), (second, -1.0)]),
        TokenLogprob(first, -0.1, ()),
    ]
    told = completion_logprobs(TABLE, entries, TextOffsets())
    assert told["tokens"] == ["a", r"bytes:\xf0"]
    assert told["top_logprobs"] == [
        {r"bytes:\xf0": -0.5, r"bytes:\x9f": -1.0, "a": -3.0},
        {r"bytes:\xf0": -0.1},
    ]


@pytest.mark.parametrize("group", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "is_open", "reasoning"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "<think>\nwhy\n</think>"),
        ("why</think>so", True, "why</think>"),
        ("why", True, "why"),
        ("so <think>", False, ""),
    ],
)
def test_tokens_of_reasoning_are_counted(
    text: str, is_open: bool, reasoning: str, group: int
) -> None:
    parser = ReasoningParser(ReasoningMarks("<think>", "</think>"), None, is_open=is_open)
    pipe = TextPipe(TABLE, (), parser)
    run(pipe, ids(text), group)
    assert pipe.reasoning_tokens == len(ids(reasoning))


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        ([b"a", b"\xf0\x9f", b"b", b"c"], [0, 1, 2, 3]),
        ([b"\xf0\x9f", b"\xf0\x9f\x98\x80", b"c"], [0, 1, 2]),
        ([b"\xf0\x9f", b"\xf0\x9f", b"\x98\x80c", b"d"], [0, 1, 1, 3]),
        ([b"\xf0", b"\xff", b"c"], [0, 1, 2]),
        ([b"\xef\xbf", b"\xbd", b"c"], [0, 0, 1]),  # the replacement character itself
        ([b"a", b"", b"b"], [0, 1, 1]),
    ],
)
def test_offsets_count_a_character_that_is_broken_off(
    tokens: list[bytes], offsets: list[int]
) -> None:
    counted = TextOffsets()
    assert [counted.add(token) for token in tokens] == offsets
    pieces = TokenTable([None] * len(tokens), tokens, TABLE.tokenizer, frozenset())
    text = TextPipe(pieces).push(range(len(tokens))).content
    assert text[offsets[-1] :] == tokens[-1].decode()


@given(st.text(alphabet="a é😀", max_size=20))
def test_offsets_count_characters(text: str) -> None:
    entries = [TokenLogprob(token, -0.5, ()) for token in ids(text)]
    told = completion_logprobs(TABLE, entries, TextOffsets())["text_offset"]
    sizes = [len(character.encode()) for character in text]
    assert told == [index for index, size in enumerate(sizes) for _ in range(size)]
