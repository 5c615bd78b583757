"""Sends commands to Valkey in order over a separate connection and returns their replies."""

import asyncio
from collections import deque
from collections.abc import Sequence

from redis.exceptions import ResponseError

from gateway.limits.valkey import ValkeyClient, Word

_DEADLINE_S = 0.5


class ValkeyDownError(Exception):
    """Valkey cannot be reached, or did not answer in time."""


class ValkeyCommands:
    """The bounded queue of one connection's commands. Commands beyond the bound fail at once."""

    def __init__(self, valkey: ValkeyClient, *, commands_max: int) -> None:
        """`commands_max` bounds the commands whose replies are awaited."""
        self._valkey = valkey
        self._commands_max = commands_max
        self._waiting: deque[asyncio.Future[object]] = deque()
        valkey.listen(self)

    async def call(self, words: Sequence[Word], *, deadline_s: float = _DEADLINE_S) -> object:
        """Return the reply to a command, or raise ValkeyDownError after the deadline."""
        if (future := self._sent(words)) is None:
            raise ValkeyDownError("Valkey cannot be reached")
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            raise ValkeyDownError("Valkey did not answer in time") from None

    def send_only(self, words: Sequence[Word]) -> None:
        """Send a command without waiting for its reply, or drop it without a connection."""
        if (future := self._sent(words)) is not None:
            future.cancel()  # the future stays queued, so that later replies match their commands

    def _sent(self, words: Sequence[Word]) -> asyncio.Future[object] | None:
        """Send a command, and return the future of its reply, or None without a connection."""
        if not self._valkey.is_connected or len(self._waiting) >= self._commands_max:
            return None
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._valkey.send(words)
        return future

    # --- the connection ---------------------------------------------------------------------

    def connected(self) -> None:
        """Fail all waiting calls, whose commands were sent over an earlier connection."""
        self._fail_all()

    def replied(self, reply: object) -> None:
        """Return a reply to the oldest waiting call."""
        future = self._waiting.popleft()
        if not future.done():
            future.set_result(reply)

    def refused(self, error: ResponseError) -> None:
        """Fail the oldest waiting call with the server's error."""
        future = self._waiting.popleft()
        if not future.done():
            future.set_exception(ValkeyDownError(str(error)))

    def disconnected(self) -> None:
        """Fail all waiting calls."""
        self._fail_all()

    def _fail_all(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(ValkeyDownError("the connection was lost"))
