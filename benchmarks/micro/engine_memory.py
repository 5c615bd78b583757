"""Measures the memory of the OpenVINO engine over thousands of steps with changing input shapes.

One operation is one engine step of the shipped base with default options (KV pool included), with
up to 48 concurrent sequences. Prompts have 5 to 300 tokens, answers 5 to 80. Two thirds of the
sequences use one of 12 random adapters of rank 8 in 8 slots. `rss_mb` is the resident memory of the
process after each twentieth of the steps. This memory must stop growing, because OpenVINO's cache
of one kernel per input shape is bounded. Not measured: host, Triton. Run:
`python -m benchmarks.micro.engine_memory`.
"""

import gc
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine_alone import SHIPPED_BASE
from benchmarks.results import write_result
from replica.drivers.openvino import load_openvino
from replica.engine.driver import Driver
from replica.engine.types import SequenceRequest
from sluice.hashing import cache_root
from tests.support.random_models import write_random_adapter

_STEPS = 5000
_PARTS = 20
_SEQUENCES = 48
_ADAPTERS = 12
_RANK = 8
_random = random.Random(0)


def rss_mb() -> int:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // (1 << 20)


def put_adapters(driver: Driver, directory: Path) -> list[str]:
    """Write adapters to disk and load them into the engine. Returns the adapters' digests."""
    digests = [f"adapter-{index}" for index in range(_ADAPTERS)]
    for index, digest in enumerate(digests):
        write_random_adapter(directory / digest, SHIPPED_BASE, index, rank=_RANK)
        driver.put_adapter(digest, driver.read_adapter(digest, directory / digest))
    return digests


def requests(digests: list[str]) -> Iterator[SequenceRequest]:
    """Yield random requests without end."""
    key = 0
    while True:
        digest = _random.choice(["", *_random.sample(digests, 2)])
        yield SequenceRequest(
            key,
            [_random.randrange(300, 4000) for _ in range(_random.randint(5, 300))],
            _random.randint(5, 80),
            ignore_eos=True,
            adapter_digest=digest,
            cache_root=cache_root("benchmark", digest, b""),
        )
        key += 1


def main() -> None:
    """Measure and write `benchmarks/results/engine_memory.json`."""
    before_mb = rss_mb()
    driver = load_openvino(SHIPPED_BASE, "benchmark", {})
    loaded_mb = rss_mb()
    with tempfile.TemporaryDirectory() as directory:
        digests = put_adapters(driver, Path(directory))
    gc.collect()
    with_adapters_mb = rss_mb()
    source = requests(digests)
    rss: list[int] = []
    tokens = living = 0
    began_s = time.perf_counter()
    for step in range(1, _STEPS + 1):
        while living < _SEQUENCES:
            driver.add(next(source))
            living += 1
        events = driver.step()
        tokens += len(events.tokens)
        living -= len(events.finished)
        if step % (_STEPS // _PARTS) == 0:
            rss.append(rss_mb())
            print(step, rss[-1], "MB", flush=True)
    second_half = rss[len(rss) // 2 :]
    figures = {
        "parameters": {"steps": _STEPS, "sequences": _SEQUENCES, "adapters": _ADAPTERS},
        "process_without_engine_mb": before_mb,
        "engine_loaded_mb": loaded_mb,
        "adapters_read_mb": with_adapters_mb,
        "rss_mb": rss,
        "growth_of_second_half_mb": second_half[-1] - second_half[0],
        "new_tokens": tokens,
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    print(write_result("engine_memory", operation, figures))


if __name__ == "__main__":
    main()
