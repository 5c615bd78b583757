"""The form in which rules read JSON, with the escapes inside strings decoded. Pure.

Arguments of tools arrive as JSON text in arbitrary pieces. Rules are matched against the decoded
characters, and released text is encoded as JSON again. Two reserved characters represent quotes and
backslashes inside strings, to distinguish them from the quotes and escapes of JSON.
"""

import re

# Unicode noncharacters that represent a quote and a backslash inside a string's text.
_QUOTE, _BACKSLASH = "\ufdd0", "\ufdd1"
_MEANT = {
    '"': _QUOTE,
    "\\": _BACKSLASH,
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_ESCAPES = {
    ord(_QUOTE): '\\"',
    ord(_BACKSLASH): "\\\\",
    **{number: f"\\u{number:04x}" for number in range(0x20)},
    ord("\b"): "\\b",
    ord("\f"): "\\f",
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
}
_SPACE = str.maketrans("\n\r\t", "   ")  # white space between JSON values
_PART = re.compile(r'["\\]')
_SURROGATES = range(0xD800, 0xE000)


class JsonReader:
    """Decodes pieces of JSON text into characters for rules."""

    __slots__ = ("_is_string", "_rest")

    def __init__(self) -> None:
        """The first piece begins outside a string."""
        self._is_string = False
        self._rest = ""

    def push(self, piece: str) -> str:
        """Return the decoded next piece. An incomplete escape waits for its end."""
        text, found, at = self._rest + piece, list[str](), 0
        while at < len(text):
            match = _PART.search(text, at)
            end = len(text) if match is None else match.start()
            part = text[at:end]
            found.append(part if self._is_string else part.translate(_SPACE))
            at = end
            if match is None:
                break
            if text[at] == '"':
                self._is_string = not self._is_string
                found.append('"')
                at += 1
                continue
            size = 6 if text[at + 1 : at + 2] == "u" else 2
            if len(text) < at + size:
                break
            found.append(_meant(text[at : at + size]))
            at += size
        self._rest = text[at:]
        return "".join(found)

    def flush(self) -> str:
        """Return an escape that is still incomplete when the text ends."""
        rest, self._rest = self._rest, ""
        return rest


def written(text: str) -> str:
    """Return decoded characters, encoded as JSON text again."""
    return text.translate(_ESCAPES)


def quoted(text: str) -> str:
    """Return a text in the form in which `JsonReader` returns the text inside a string."""
    return text.replace("\\", _BACKSLASH).replace('"', _QUOTE)


def _meant(escape: str) -> str:
    """Return the character of an escape, or the escape itself if it is invalid or a surrogate."""
    if escape[1] != "u":
        return _MEANT.get(escape[1], escape)
    try:
        number = int("0x" + escape[2:], 0)
    except ValueError:
        return escape
    if number in _SURROGATES:
        return escape
    character = chr(number)
    return _MEANT[character] if character in {'"', "\\"} else character
