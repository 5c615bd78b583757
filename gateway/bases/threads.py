"""The threads that large prompts are worked on in, so that neither the loop nor others wait long.

Tokenizing takes 0.5 ms per KB and needs no interpreter lock: it has threads of its own, which step
back when others want the processor. Everything else about a prompt needs the lock, and is done at
the loop's own priority: whoever steps back with the lock in hand makes the loop wait as well.
"""

import os
import threading
from concurrent.futures import Executor, ThreadPoolExecutor

import structlog

log = structlog.get_logger(__name__)

_THREADS = 2
_NICENESS = 10  # a tenth of a processor is left to it where the loop wants all of that


def tokenizing_threads(processors: int) -> int:
    """Return how many prompts are tokenized at once: one processor is left to others."""
    return max(1, min(_THREADS, processors - 1))


class PromptThreads:
    """Of one process.

    Attributes:
        usual: For what needs the interpreter lock; may wait for `tokenizing`, never the other way.
        tokenizing: For what does not.
    """

    def __init__(self) -> None:
        processors = len(os.sched_getaffinity(0))
        self.usual: Executor = ThreadPoolExecutor(_THREADS, "prompts")
        self.tokenizing: Executor = ThreadPoolExecutor(
            tokenizing_threads(processors), "tokenizing", initializer=_step_back
        )

    def close(self) -> None:
        """End the threads, after the prompts that they are at; blocks. Nothing is asked then."""
        self.usual.shutdown(cancel_futures=True)
        self.tokenizing.shutdown()


def _step_back() -> None:
    """Lower the priority of this thread alone, which Linux takes for a process here."""
    thread = threading.get_native_id()
    try:
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, usual + _NICENESS)
    except OSError as error:  # a sandbox that forbids it: prompts are answered all the same
        log.warning("priority_not_lowered", error=str(error))
