"""The store of scraped series, which uses bounded memory. Pure.

Times are Unix milliseconds. When the source of a series no longer has the series, a mark (a special
NaN) ends the series, as in Prometheus. At later instants the series has no value, and ranges skip
the mark.
"""

import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping

Labels = frozenset[tuple[str, str]]
Sample = tuple[str, Labels, float]
LOOKBACK_MS = 300_000
# The mark that ends a series. No computation produces this NaN.
_END_BYTES = bytes.fromhex("7ff80000005c1ace")
(_END,) = struct.unpack(">d", _END_BYTES)


def _is_end(value: float) -> bool:
    return value != value and struct.pack(">d", value) == _END_BYTES  # noqa: PLR0124 - NaN


class Series:
    """The samples of one set of labels, in the order of time."""

    __slots__ = ("labels", "times", "values")

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.times = array("q")
        self.values = array("d")

    def append(self, at_ms: int, value: float) -> None:
        """Append a sample. A sample that is not newer than the last sample is ignored."""
        if not self.times or at_ms > self.times[-1]:
            self.times.append(at_ms)
            self.values.append(value)

    def at(self, at_ms: int) -> float | None:
        """Return the value at an instant, or None after an end mark or without a recent sample.

        A sample is recent for five minutes.
        """
        place = bisect_right(self.times, at_ms) - 1
        if place < 0 or self.times[place] <= at_ms - LOOKBACK_MS:
            return None
        value = self.values[place]
        return None if _is_end(value) else value

    def window(self, after_ms: int, until_ms: int) -> tuple[list[int], list[float]]:
        """Return the times and values in a range, which excludes its start and includes its end."""
        first, last = bisect_right(self.times, after_ms), bisect_right(self.times, until_ms)
        times, values = self.times[first:last].tolist(), self.values[first:last].tolist()
        if any(map(_is_end, values)):
            pairs = [it for it in zip(times, values, strict=True) if not _is_end(it[1])]
            return [at for at, _ in pairs], [value for _, value in pairs]
        return times, values

    def forget(self, until_ms: int) -> bool:
        """Delete all samples up to a time, and return whether no sample is left."""
        gone = bisect_right(self.times, until_ms)
        if gone:
            del self.times[:gone]
            del self.values[:gone]
        return not self.times


class SeriesStore:
    """Stores the series that expressions read, as long as an expression may read them."""

    def __init__(self, kept_ms: Mapping[str, int], series_max: int) -> None:
        """Create an empty store.

        Args:
            kept_ms: Milliseconds of history by the name of a metric. Other metrics are not stored.
            series_max: Largest number of series. Samples of further series are dropped.
        """
        self.kept_ms = kept_ms
        self._series_max = series_max
        self._count = 0
        self._names: dict[str, dict[Labels, Series]] = {}
        self._of_source: dict[str, dict[tuple[str, Labels], None]] = {}

    def __len__(self) -> int:
        """Return the number of series."""
        return self._count

    def write(self, source: str, at_ms: int, samples: Iterable[Sample]) -> int:
        """Add all samples of a source at an instant, and end series that the source lacks.

        Returns:
            Number of samples that were dropped because the store is full.
        """
        written: dict[tuple[str, Labels], None] = {}
        left_out = 0
        for name, labels, value in samples:
            if name not in self.kept_ms:
                continue
            series = self._series(name, labels)
            if series is None:
                left_out += 1
                continue
            series.append(at_ms, value)
            written[name, labels] = None
        for name, labels in self._of_source.get(source, {}):
            if (name, labels) not in written and (known := self._names[name].get(labels)):
                known.append(at_ms, _END)
        if written:
            self._of_source[source] = written
        else:
            self._of_source.pop(source, None)
        return left_out

    def _series(self, name: str, labels: Labels) -> Series | None:
        of_name = self._names.setdefault(name, {})
        found = of_name.get(labels)
        if found is None and self._count < self._series_max:
            found = of_name[labels] = Series(labels)
            self._count += 1
        return found

    def select(self, name: str, fits: Callable[[Labels], bool]) -> list[Series]:
        """Return the series of a metric whose labels match."""
        return [one for labels, one in self._names.get(name, {}).items() if fits(labels)]

    def prune(self, now_ms: int) -> None:
        """Delete the samples that no expression reads any more."""
        for name, of_name in self._names.items():
            until_ms = now_ms - self.kept_ms[name] - LOOKBACK_MS
            for labels in [labels for labels, it in of_name.items() if it.forget(until_ms)]:
                del of_name[labels]
                self._count -= 1

    def clear(self) -> None:
        """Delete all series."""
        self._names.clear()
        self._of_source.clear()
        self._count = 0
