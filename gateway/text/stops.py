"""Stop strings: the text ends before the first one that is completed. Pure."""

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, wherever the pieces are cut.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    __slots__ = ("_held", "_matched", "_stops", "is_matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare; `stops` holds at least one string, none of them empty."""
        assert stops, "without stop strings there is nothing to match"
        assert all(stops), "an empty stop string would end everything at once"
        self._stops = tuple(stops)
        self._matched = [0] * len(stops)  # characters of each that the text ends with
        self._held = ""
        self.is_matched = False

    def push(self, text: str) -> str:
        """Return what may be shown of the text so far; nothing may follow once `is_matched`.

        The match that is completed first counts, of two completed at once the longer, so that the
        result does not depend on how the text was cut.
        """
        assert not self.is_matched, "the text has ended"
        found: list[tuple[int, int]] = []
        for number, stop in enumerate(self._stops):
            matched, end = _followed(stop, self._matched[number], text)
            self._matched[number] = matched
            if end:
                found.append((end, -len(stop)))
        text, held = self._held + text, len(self._held)
        if found:
            self.is_matched = True
            self._held = ""
            return text[: held + sum(min(found))]
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _followed(stop: str, matched: int, text: str) -> tuple[int, int]:
    """Follow a stop string through a piece of text, in time that only the piece's length decides.

    Args:
        stop: The stop string.
        matched: How many characters of it the text before the piece ends with.
        text: The piece.

    Returns:
        The same for the text with the piece, and where in the piece the match ends; 0: nowhere.
    """
    at = 0
    while at < len(text):
        if not matched and (at := text.find(stop[0], at)) < 0:
            return 0, 0
        while matched and stop[matched] != text[at]:
            matched = _borders(stop)[matched - 1]
        matched += stop[matched] == text[at]
        at += 1
        if matched == len(stop):
            return matched, at
    return matched, 0


@lru_cache(maxsize=256)
def _borders(stop: str) -> list[int]:
    """Return for each beginning of a text how much of its own end it begins with, at most."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    return borders
