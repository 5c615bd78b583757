"""How much a worker may try again: enough for a lost fleet, not for a storm. Pure."""

# What may be tried again at once, even by a worker with nothing else to do.
ALWAYS = 64
# On the average, every open request may be tried again once in this time.
PERIOD_S = 10.0


class RetryBudget:
    """A bucket whose size follows the number of open requests.

    Losing every replica costs one retry per open request: that fits. Requests that are lost again
    and again (a poisonous prompt, engines that crash at once) use it up and are then refused, so
    that retries never multiply the load of a fleet in trouble.
    """

    def __init__(self) -> None:
        """Begin with a full bucket."""
        self._used = 0.0
        self._at_s = 0.0
        self.refused = 0

    def take(self, open_requests: int, now_s: float) -> bool:
        """Take one retry; False when there is none left."""
        size = ALWAYS + open_requests
        self._used = max(0.0, self._used - (now_s - self._at_s) * size / PERIOD_S)
        self._at_s = now_s
        if self._used + 1 > size:
            self.refused += 1
            return False
        self._used += 1
        return True
