"""Logs a step of the engine that does not end, from a separate thread."""

import logging
import threading
from collections.abc import Callable

from replica.engine.types import EngineLoad

log = logging.getLogger(__name__)

STUCK_S = 10.0  # Longest plausible step in seconds, after which routers have abandoned the engine
LOOK_S = 1.0


class StepWatch:
    """Measures the duration of the step loop's present iteration (requests, step, news).

    The step loop writes, and any thread may read.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: tuple[float, EngineLoad] | None = None

    def begin(self, load: EngineLoad) -> None:
        """Record the start of an iteration, and the engine's load at that time."""
        self._began = (self._clock(), load)

    def end(self) -> None:
        """Record that the iteration has ended."""
        self._began = None

    def look(self) -> tuple[float, EngineLoad]:
        """Return the seconds since the present iteration began, or 0, and the load before it."""
        began = self._began
        if began is None:
            return 0.0, EngineLoad()
        return self._clock() - began[0], began[1]


class Watchdog:
    """Logs a step that is too slow, and logs it again whenever its age has doubled."""

    def __init__(
        self, watch: StepWatch, *, stuck_s: float = STUCK_S, look_s: float = LOOK_S
    ) -> None:
        self._watch = watch
        self._stuck_s = stuck_s
        self._look_s = look_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the watchdog's thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop the watchdog's thread."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        tell_at_s = self._stuck_s
        while not self._stopping.wait(self._look_s):
            age_s, load = self._watch.look()
            if age_s < self._stuck_s:
                tell_at_s = self._stuck_s
            elif age_s >= tell_at_s:
                tell_at_s = 2 * age_s
                log.error(
                    "step_stuck: a step of %d running and %d waiting sequences, %d prompt tokens"
                    " owed and %d of its KV blocks in use has not ended for %.0f s; routers have"
                    " left, and the agent replaces this process when its probe fails",
                    *(load.running, load.waiting, load.prefill_tokens_owed, load.kv_blocks_used),
                    age_s,
                )
