"""Ends an answer's text before the first completed stop string. Pure."""

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, wherever the pieces are cut.

    Text that may be the beginning of a stop string is withheld until the following text decides.

    Attributes:
        is_matched: Whether a stop string was completed.
        matched_stop: Matched stop string, empty without a match.
    """

    __slots__ = ("_followers", "_held", "is_matched", "matched_stop")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` has at least one string, and no empty string."""
        assert stops, "without stop strings there is nothing to match"
        assert all(stops), "an empty stop string would end everything at once"
        self._followers = [_Follower(stop) for stop in stops]
        self._held = ""
        self.is_matched = False
        self.matched_stop = ""

    def push(self, text: str) -> str:
        """Add text, and return the text that may be shown now, which ends before a match.

        The match that is completed first decides. If two matches are completed by one character,
        the longer match decides. So the result is independent of the cuts between pieces.
        """
        assert not self.is_matched, "the text has ended"
        ends = [(follower.push(text), follower) for follower in self._followers]
        found = [(end, -len(follower.stop)) for end, follower in ends if end]
        text, held = self._held + text, len(self._held)
        if found:
            self.is_matched = True
            self.matched_stop = next(
                follower.stop for end, follower in ends if (end, -len(follower.stop)) == min(found)
            )
            self._held = ""
            return text[: held + sum(min(found))]
        keep = max(follower.matched for follower in self._followers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the withheld text, because the text has ended without a stop string."""
        held, self._held = self._held, ""
        for follower in self._followers:
            follower.matched = 0
        return held


class _Follower:
    """Follows one stop string through a text, in time linear in both lengths.

    Attributes:
        stop: The stop string.
        matched: Number of its characters that the text ends with.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders: list[int] = []  # empty until the first mismatch, since most texts have none

    def push(self, text: str) -> int:
        """Add the next piece, and return the index where a match ends, or 0 without a match."""
        if not self.matched and self.stop[0] not in text:
            return 0  # no match can begin in this piece, as in most pieces
        if len(text) < len(self.stop):
            return self._walk(text)
        at = (self.stop[: self.matched] + text).find(self.stop)
        if at >= 0:
            return at + len(self.stop) - self.matched
        # A match that began before the piece has failed here, so any open match began in the piece.
        self.matched = 0
        return self._walk(text[len(text) - len(self.stop) + 1 :])

    def _walk(self, text: str) -> int:
        stop, matched, at = self.stop, self.matched, 0
        while at < len(text) and matched < len(stop):
            if not matched and (at := text.find(stop[0], at)) < 0:
                break
            if matched and stop[matched] != text[at]:
                matched = self._shorter(matched, text[at])
            matched += stop[matched] == text[at]
            at += 1
        self.matched = matched
        return at if matched == len(stop) else 0

    def _shorter(self, matched: int, character: str) -> int:
        """Return the length of a shorter match that `character` continues, possibly 0."""
        self._borders = self._borders or _borders(self.stop)
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched


def _borders(stop: str) -> list[int]:
    """Return for each prefix of a text the length of its longest border (Knuth-Morris-Pratt)."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    return borders
