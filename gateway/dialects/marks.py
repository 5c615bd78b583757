"""The marks of all model families, and their search in text that arrives in pieces. Pure."""

import re
from typing import NamedTuple

# Marks of Hermes and Qwen.
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
# Marks of Llama 3, and of Llama 4.
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
# Marks of Mistral.
TOOL_CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_SPACE = re.compile(r"[ \t\r\n]*")


class ReasoningMarks(NamedTuple):
    """The marks before and after a model's reasoning."""

    opening: str
    closing: str


def begun_mark(text: str, mark: str, start: int = 0) -> int:
    """Return how many characters at the end of `text[start:]` may be the beginning of `mark`.

    The caller must have excluded that the text contains the whole mark.
    """
    for length in range(min(len(text) - start, len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def behind_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is not white space of JSON."""
    return start + len(matched(_SPACE, text, start))


def matched(pattern: re.Pattern[str], text: str, start: int) -> str:
    """Return the match of `pattern` at `start`. The pattern must also match the empty text."""
    found = pattern.match(text, start)
    assert found is not None, "it matches nothing, too"
    return found.group()


class Marks:
    """Several marks that are searched for together."""

    __slots__ = ("_pattern", "_texts")

    def __init__(self, *texts: str) -> None:
        """Compile the search. No mark may be a prefix of another mark."""
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))

    def first(self, text: str, start: int) -> tuple[int, str]:
        """Return the index of the first mark from `start` on, and the mark.

        Without a whole mark, the returned mark is empty. The index is then the place at the text's
        end where a mark may have begun, or else the text's length.
        """
        found = self._pattern.search(text, start)
        if found is not None:
            return found.start(), found.group()
        begun = max(begun_mark(text, mark, start) for mark in self._texts)
        return len(text) - begun, ""

    def at(self, text: str, start: int) -> str | None:
        """Return the mark at `start`, or empty without a mark, or None if more text must decide."""
        found = self._pattern.match(text, start)
        if found is not None:
            return found.group()
        rest = text[start : start + max(map(len, self._texts))]
        return None if any(mark.startswith(rest) for mark in self._texts) else ""
