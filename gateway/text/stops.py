"""Stop strings: the text ends before the first one that is completed. Pure."""

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, wherever the pieces are cut.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    __slots__ = ("_held", "_stops", "is_matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare; `stops` holds at least one string, none of them empty."""
        assert stops, "without stop strings there is nothing to match"
        assert all(stops), "an empty stop string would end everything at once"
        self._stops = tuple(stops)
        self._held = ""
        self.is_matched = False

    def push(self, text: str) -> str:
        """Return what may be shown of the text so far; nothing may follow once `is_matched`.

        The match that is completed first counts, of two completed at once the longer, so that the
        result does not depend on how the text was cut.
        """
        assert not self.is_matched, "the text has ended"
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self.is_matched = True
            self._held = ""
            return text[: min(found)[1]]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of `text` that `stop` begins with."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
