"""Measures the CPU time per token that the engine host adds to the simulated engine.

One operation is one new token of one sequence, from the driver's step to the bytes of a frame. One
attachment has 1,000 sequences. `driver` is the simulated engine alone, whose steps take no time.
`host` is the same engine behind `EngineHost`, whose step loop and sender run in this process too.
Figures are CPU time of the process per token. The difference of both figures is the cost of the
host, and of the reader that parses its frames. `tok_s` is the number of tokens per second of
wall-clock time through the host, which no faster engine can exceed. The result is that of the best
round, because the machine is shared. Not measured: Triton, gRPC. Run:
`python -m benchmarks.micro.engine_host`.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.results import write_result
from replica.drivers.sim import load_sim
from replica.engine.driver import Driver
from replica.engine.types import SequenceRequest
from replica.host import EngineHost
from sluice.token_ids import packed_ids
from sluice.wire.engine.v1 import engine_pb2 as wire

_SEQUENCES = 1000
_PROMPT_TOKENS = 32
_NEW_TOKENS = 200
_ROUNDS = 5
_TOKENS = _SEQUENCES * _NEW_TOKENS
_WAIT_S = 120.0


class FrameReader:
    """A responder that parses all frames, until all sequences have ended."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._left = _SEQUENCES

    def send(self, frame: bytes) -> None:
        """Parse a frame."""
        self._left -= len(wire.HostFrame.FromString(frame).step.finished)
        if self._left == 0:
            self.over.set()

    def finish(self) -> None:
        """Do nothing, because this responder has no stream."""

    def is_cancelled(self) -> bool:
        """Return False, because this reader never disconnects."""
        return False


def engine() -> Driver:
    """Return a simulated engine whose steps have no duration."""
    return load_sim(None, "benchmark", {"speed": 1e9})


def prompt(number: int) -> list[int]:
    """Return a prompt that shares no prefix with the others."""
    return [number + position for position in range(_PROMPT_TOKENS)]


def run_driver() -> None:
    """Generate all sequences with the engine alone."""
    driver = engine()
    for key in range(_SEQUENCES):
        driver.add(SequenceRequest(key, prompt(key), _NEW_TOKENS, ignore_eos=True))
    while driver.has_work:
        driver.step()


def run_host() -> None:
    """Generate all sequences with the engine behind an engine host."""
    host = EngineHost(engine(), "benchmark")
    host.start()
    reader = FrameReader()
    attach = wire.Attach(router_id="benchmark", epoch=1, credit_frames=1 << 20)
    submit = wire.Submit(
        epoch=1,
        sequences=[
            wire.Sequence(
                id=key,
                prompt_ids=packed_ids(prompt(key)),
                output_tokens_max=_NEW_TOKENS,
                ignore_eos=True,
            )
            for key in range(_SEQUENCES)
        ],
    )
    for request in (wire.HostRequest(attach=attach), wire.HostRequest(submit=submit)):
        host.handle(request.SerializeToString(), reader)
    assert reader.over.wait(_WAIT_S)
    host.close(0.0)


def best_of(operation: Callable[[], None]) -> tuple[float, float]:
    """Return (least CPU microseconds per token, most tokens per second)."""
    cpu_us: list[float] = []
    rates: list[float] = []
    for _ in range(_ROUNDS):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        operation()
        cpu_us.append((time.process_time() - cpu_s) / _TOKENS * 1e6)
        rates.append(_TOKENS / (time.perf_counter() - began_s))
    return min(cpu_us), max(rates)


def main() -> None:
    """Measure driver and host, and write `benchmarks/results/engine_host.json`."""
    driver_us, driver_rate = best_of(run_driver)
    host_us, host_rate = best_of(run_host)
    figures: dict[str, Any] = {
        "parameters": {"sequences": _SEQUENCES, "new_tokens": _NEW_TOKENS, "rounds": _ROUNDS},
        "driver": {"cpu_us_per_token": round(driver_us, 2), "tok_s": round(driver_rate)},
        "host": {
            "cpu_us_per_token": round(host_us, 2),
            "tok_s": round(host_rate),
            "own_cpu_us_per_token": round(host_us - driver_us, 2),
        },
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    print(write_result("engine_host", operation, figures).read_text())


if __name__ == "__main__":
    main()
