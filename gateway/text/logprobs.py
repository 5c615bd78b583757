"""Log probabilities of an answer's tokens, withheld until the tokens' text is shown. Pure."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import NamedTuple

from gateway.text.detokenizer import TokenTable

# OpenAI's number for a probability of zero, because JSON has no infinity.
LOGPROB_MIN = -9999.0


class TokenLogprob(NamedTuple):
    """A token of an answer.

    Attributes:
        token: Id of the token.
        logprob: Natural logarithm of its probability under the model's own distribution.
        top: The most probable tokens at this position, best first, as (id, logprob).
        is_first: Whether the token begins the text.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]
    is_first: bool = False


@dataclass(slots=True)
class _HeldEntry:
    entry: TokenLogprob
    start: int  # number of the answer's characters before the token


class LogprobLine:
    """Releases each token's entry together with the token's text.

    The entry of a token whose text is withheld (half a character, the beginning of a stop string)
    is withheld, too. The entry of a token whose text is never shown is dropped.
    """

    __slots__ = ("_has_begun", "_held", "_hidden", "_known", "_length")

    def __init__(self, hidden: frozenset[int]) -> None:
        """Tokens in `hidden` (end of sequence, special tokens) are no part of the text."""
        self._hidden = hidden
        self._has_begun = False
        self._held: deque[_HeldEntry] = deque()
        self._known: list[tuple[float, Sequence[tuple[int, float]]]] = []
        self._length = 0  # characters of all tokens so far

    def learn(self, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Add an entry whose token arrives later, with the fields of `TokenLogprob`."""
        self._known.append((logprob, top))

    def unlearn(self) -> None:
        """Drop entries whose tokens will not arrive."""
        self._known.clear()

    def entries(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Return the entries of the next tokens, as far as entries have arrived."""
        known = self._known[: len(tokens)]
        del self._known[: len(tokens)]
        return [TokenLogprob(token, *it) for token, it in zip(tokens, known, strict=False)]

    def push(self, entries: Sequence[TokenLogprob], characters: int) -> None:
        """Add the entries of tokens whose texts together have `characters` characters."""
        for entry in entries:
            if entry.token not in self._hidden:
                it = entry if self._has_begun else entry._replace(is_first=True)
                self._has_begun = True
                self._held.append(_HeldEntry(it, self._length))
        self._length += characters

    def shown(self, length: int) -> list[TokenLogprob]:
        """Return the entries of tokens that begin within the first `length` characters."""
        held, found = self._held, list[TokenLogprob]()
        while held and held[0].start < length:
            found.append(held.popleft().entry)
        return found

    def rest(self) -> list[TokenLogprob]:
        """Return all withheld entries, because the text has ended and all of it was shown."""
        found = [held.entry for held in self._held]
        self._held.clear()
        return found


# A function that converts token entries to the `logprobs` of a choice.
LogprobFormat = Callable[[list[TokenLogprob]], dict[str, object]]
# A function that creates the `LogprobLine` and the format for one answer.
NewLogprobs = Callable[[], tuple[LogprobLine, LogprobFormat]]


class PromptLogprobLine:
    """The log probabilities of a prompt's tokens, as far as they have arrived.

    Attributes:
        entries: Entries in the prompt's order. The first entry is NaN, because the first token has
            no predecessor.
    """

    __slots__ = ("_prompt", "entries")

    def __init__(self, prompt: Sequence[int]) -> None:
        """The `prompt` has at least one token."""
        self._prompt = prompt
        self.entries = [TokenLogprob(prompt[0], nan, (), is_first=True)]

    @property
    def is_whole(self) -> bool:
        """Whether every token of the prompt has its entry."""
        return len(self.entries) == len(self._prompt)

    def learn(
        self,
        first: int,
        logprobs: Sequence[float],
        counts: Sequence[int],
        top: Sequence[tuple[int, float]],
    ) -> None:
        """Add the entries of the positions from `first` on. Repeated entries change nothing.

        `counts` is the number of alternatives in `top` for each position.
        """
        start = 0
        for place, (logprob, count) in enumerate(zip(logprobs, counts, strict=True), first):
            if place == len(self.entries) and not self.is_whole:
                alternatives = top[start : start + count]
                self.entries.append(TokenLogprob(self._prompt[place], logprob, alternatives))
            start += count


def chat_logprobs(table: TokenTable, entries: Sequence[TokenLogprob]) -> dict[str, object]:
    """Return `logprobs` of a chat completion's choice."""
    content: list[dict[str, object]] = [
        _chat_token(table.bytes_of(entry.token, is_first=entry.is_first), entry.logprob)
        | {
            "top_logprobs": [
                _chat_token(table.bytes_of(token, is_first=entry.is_first), value)
                for token, value in entry.top
            ]
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Counts the characters of a text that arrives in tokens, which may end within a character."""

    __slots__ = ("_decoder", "_length")

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, data: bytes) -> int:
        """Add the bytes of the next token, and return the number of characters before them.

        A token that continues a character begins within that character. A token that interrupts a
        character begins after that character.
        """
        begun = self._decoder.decode(data[:1])
        is_open = bool(self._decoder.getstate()[0])
        # The first byte is a part of one character. If its decoding yields two characters, the
        # first of the two is an incomplete earlier character, which this token interrupts.
        offset = self._length + max(0, len(begun) + is_open - 1)
        self._length += len(begun) + len(self._decoder.decode(data[1:]))
        return offset


def completion_logprobs(
    table: TokenTable, entries: Sequence[TokenLogprob], offsets: TextOffsets
) -> dict[str, object]:
    """Return `logprobs` of a text completion's choice.

    `top_logprobs` includes the token itself even if other tokens are more probable. The log
    probability of a first token is NaN, and null in the columns `token_logprobs` and
    `top_logprobs`.

    Args:
        table: Tokens of the base.
        entries: Log probabilities in the order of the text.
        offsets: Offsets of the text so far, which this function advances.
    """
    data = [table.bytes_of(entry.token, is_first=entry.is_first) for entry in entries]
    shown = [
        b"" if entry.token in table.hidden else it for entry, it in zip(entries, data, strict=True)
    ]
    return {
        "tokens": [_name(it) for it in data],
        "token_logprobs": [
            None if isnan(entry.logprob) else _finite(entry.logprob) for entry in entries
        ],
        "top_logprobs": [
            None
            if isnan(entry.logprob)
            else {
                _name(table.bytes_of(token, is_first=entry.is_first)): _finite(value)
                for token, value in (*entry.top, (entry.token, entry.logprob))
            }
            for entry in entries
        ],
        "text_offset": [offsets.add(it) for it in shown],
    }


def _name(data: bytes) -> str:
    """Return the name of a token, which is its text or OpenAI's form of incomplete bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])


def _chat_token(data: bytes, logprob: float) -> dict[str, object]:
    return {
        "token": data.decode(errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(data),
    }


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)
