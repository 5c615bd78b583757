"""Counts the tokens of engines by model and hour, for comparison with the usage ledger. Pure.

The counts do not depend on the gateways' events, so a lost or doubled event shows as a difference.
Like the ledger, the counts assign a token to the hour in which its request was received. So the
comparison does not depend on the time of reading.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent, TokenCount

SCHEMA_VERSION = 3
HOUR_MS = 3_600_000
# Model name of tokens without a separate sum. Hours with such tokens cannot be compared by model.
OTHER = "*"
MODELS_MAX = 20_000  # most models with sums per hour
KEYS_MAX = 50_000  # most sums over all hours, about 15 MB
_HOURS_MAX = 10_000
_LATE_MS = 600_000  # longest assumed time from a request's receipt to its arrival at the router

Key = tuple[int, str]  # Unix time of the hour in ms, and the model


def key_of(event: RequestEvent) -> Key:
    """Return the hour and the model to which a request's tokens are assigned."""
    return _hour(event.received_at_unix_ms), event.model


def _hour(unix_ms: int) -> int:
    return unix_ms // HOUR_MS * HOUR_MS


class Prompts(NamedTuple):
    """Prompt tokens by class of `TokenCount`, cached tokens included, or their changes."""

    certain: int = 0
    uncertain: int = 0
    discarded: int = 0
    resumed: int = 0


NO_PROMPTS = Prompts()


class _Sum:
    """The sums of tokens of one hour and model."""

    __slots__ = (
        *("discarded", "has_prompts", "is_changed", "key", "output", "prompts", "uncertain"),
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.output = self.uncertain = self.discarded = 0
        self.prompts = NO_PROMPTS
        self.has_prompts = True
        self.is_changed = False


class TokenCounts:
    """The sums of tokens per hour and model since the start of the router.

    A changed sum is reported in full, so that a lost report does no harm. If there are too many
    sums, whole hours are dropped. The oldest hour is dropped first, and the current and the
    previous hour are kept. Later tokens of a dropped hour, and tokens of models above the bound,
    are added to `OTHER`.
    """

    def __init__(self, router_id: str, epoch: int) -> None:
        self._router_id = router_id
        self._epoch = epoch
        self._hours: dict[int, dict[str, _Sum]] = {}
        self._keys = 0
        self._dropped_ms = -1  # the latest dropped hour
        self._hour_ms = float("inf")  # the hour of the last report
        self._changed: list[_Sum] = []
        self._reports = 0

    def add(
        self,
        key: Key,
        output_tokens: int,
        *,
        uncertain: int = 0,
        discarded: int = 0,
        prompts: Prompts = NO_PROMPTS,
        has_prompts: bool = True,
    ) -> None:
        """Add tokens of a request. `has_prompts` states whether its gateway marks new prompts."""
        hour_ms, model = key
        models = self._hours.get(hour_ms)
        if models is None or (count := models.get(model)) is None:
            count = self._begin(hour_ms, model)
            if count is None:
                return
        count.output = max(0, count.output + output_tokens)
        count.uncertain += uncertain
        count.discarded += discarded
        if prompts is not NO_PROMPTS:
            count.prompts = Prompts(*map(int.__add__, count.prompts, prompts))
        if not has_prompts:
            count.has_prompts = False
        self._change(count)

    def mix(self, unix_ms: int) -> None:
        """Mark hours as mixed if a request of unknown hour and model may belong to them."""
        for hour_ms in {_hour(unix_ms), _hour(unix_ms - _LATE_MS)}:
            if OTHER not in self._hours.get(hour_ms, ()):
                self.add((hour_ms, OTHER), 0)

    def _change(self, count: _Sum) -> None:
        if not count.is_changed:
            count.is_changed = True
            self._changed.append(count)

    def _begin(self, hour_ms: int, model: str) -> _Sum | None:
        """Create the sum of a model that is new in its hour, or return None if there is no room."""
        models = self._hours.get(hour_ms, {})
        if (
            not self._dropped_ms < hour_ms <= self._hour_ms + HOUR_MS
            or len(models) >= MODELS_MAX
            or (self._keys >= KEYS_MAX and not self._drop_oldest())
        ):
            model = OTHER
        models = self._hours.get(hour_ms)
        if models is None:
            if len(self._hours) >= _HOURS_MAX:  # only wrong clocks produce so many hours
                return None
            models = self._hours[hour_ms] = {}
        count = models.get(model)
        if count is None:
            count = models[model] = _Sum((hour_ms, model))
            self._keys += 1
        return count

    def _drop_oldest(self) -> bool:
        """Drop the sums of the oldest hour, or return False if no hour is old enough."""
        oldest = min((it for it in self._hours if it > self._dropped_ms), default=self._hour_ms)
        if not isinstance(oldest, int) or oldest >= self._hour_ms - HOUR_MS:
            return False
        models = self._hours.pop(oldest)
        self._keys -= len(models)
        self._dropped_ms = oldest
        other = models.get(OTHER)
        if other is not None or any(it.is_changed for it in models.values()):
            # The sum of `OTHER` is reported, which marks the hour as not comparable by model.
            other = other or _Sum((oldest, OTHER))
            self._hours[oldest] = {OTHER: other}
            self._keys += 1
            self._change(other)
        return True

    def reports(self, unix_ms: int, *, is_last: bool = False) -> Iterator[bytes]:
        """Return events with all sums that changed since the last call, and a heartbeat.

        Each event is created when the iterator reaches it, from the sum at that moment.
        """
        self._reports += 1
        self._hour_ms = _hour(unix_ms)
        changed, self._changed = self._changed, []
        return self._encoded(changed, self._reports, is_last=is_last)

    def _encoded(self, changed: list[_Sum], number: int, *, is_last: bool) -> Iterator[bytes]:
        hour_ms = int(self._hour_ms)
        for it in changed:
            it.is_changed = False
            count = TokenCount(
                epoch=self._epoch,
                number=number,
                output_tokens=it.output,
                uncertain_tokens=it.uncertain,
                discarded_tokens=it.discarded,
                has_prompts=it.has_prompts,
                prompt_tokens=max(0, it.prompts.certain),
                uncertain_prompt_tokens=max(0, it.prompts.uncertain),
                discarded_prompt_tokens=max(0, it.prompts.discarded),
                resumed_prompt_tokens=max(0, it.prompts.resumed),
            )
            yield self._event(it.key, count)
        here = TokenCount(epoch=self._epoch, number=number, is_last=is_last, has_prompts=True)
        yield self._event((hour_ms, ""), here)

    def _event(self, key: Key, count: TokenCount) -> bytes:
        hour_ms, model = key
        return RequestEvent(
            schema_version=SCHEMA_VERSION,
            event_id=f"count_{self._router_id}_{self._epoch}_{hour_ms}_{model}",
            received_at_unix_ms=hour_ms,
            router_id=self._router_id,
            model=model,
            count=count,
        ).SerializeToString()
