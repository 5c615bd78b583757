"""Measures CPU and memory of a router's prefix index that is full: 64 replicas of 33,000 blocks.

One operation of "matches" begins with the bytes of a prompt's block hashes. It returns how many of
these blocks each replica has cached. All replicas have the blocks of the system prompt. One replica
("known") or none ("unknown") has the other blocks. One operation of "dispatched" records that a
prompt was sent to a replica. In "again" the replica has already cached the whole prompt, in "fresh"
only the system prompt. Each block of "fresh" evicts another block. One operation of "event" records
one block that an engine reports as stored or removed. Figures are CPU time of one core.
`dispatched_longest_ms` is the slowest single call, which delays everything else in a router.
"bytes" is the process's memory for the index, divided by the number of pairs of replica and block.
Not measured: hashing the prompts, parsing messages. Run: `python -m benchmarks.micro.router_index`.
"""

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from router.core.fleet.prefix_index import BlockHashes, PrefixIndex
from sluice.hashing import BLOCK_TOKENS, HASH_BYTES

REPLICAS = 64
KV_BLOCKS = 33_000
SYSTEM_BLOCKS = 8  # blocks of the system prompt that all prompts share
PROMPTS_TOKENS = (1000, 12_000, 55_000)
ROUNDS = 400


class IndexBench:
    """An index that is full, as after hours of traffic."""

    def __init__(self) -> None:
        self.random = random.Random(1)
        self.system = self.random.randbytes(SYSTEM_BLOCKS * HASH_BYTES)
        self.index = PrefixIndex()
        self.now = 0.0
        self.names = [f"replica-{number}" for number in range(REPLICAS)]
        before = resident_bytes()
        for name in self.names:
            self.index.add_replica(name, KV_BLOCKS)
        self.times: list[float] = []
        while len(self.index) < REPLICAS * KV_BLOCKS:
            self.dispatch(self.prompt(self.random.choice((31, 64, 100, 375))))
        self.full_bytes = resident_bytes() - before
        for _ in range(40_000):  # replaces each block about once
            prompt = self.prompt(self.random.choice((31, 64, 100)))
            self.dispatch(prompt, self.names[0])
            self.dispatch(prompt)
        self.churned_bytes = resident_bytes() - before
        self.longest_s = max(self.times)

    def prompt(self, blocks: int) -> bytes:
        """Return the hashes of a new prompt."""
        return self.system + self.random.randbytes((blocks - SYSTEM_BLOCKS) * HASH_BYTES)

    def dispatch(self, data: bytes, name: str = "") -> float:
        """Record a prompt for a replica, and return the CPU seconds."""
        self.now += 0.01
        name = name or self.random.choice(self.names)
        started_s = time.process_time()
        self.index.dispatched(name, BlockHashes(data), self.now)
        self.times.append(time.process_time() - started_s)
        return self.times[-1]

    def match(self, data: bytes) -> float:
        """Look up the cached blocks of a prompt, and return the CPU seconds."""
        started_s = time.process_time()
        self.index.matches(BlockHashes(data))
        return time.process_time() - started_s


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def mean_us(samples: list[float]) -> float:
    """Return the mean in microseconds."""
    return round(1e6 * sum(samples) / len(samples), 1)


def per_prompt(bench: IndexBench, tokens: int) -> dict[str, Any]:
    """Return the CPU time of lookups and dispatches for prompts of one size, in µs."""
    prompts = [bench.prompt(tokens // BLOCK_TOKENS) for _ in range(ROUNDS)]
    unknown = [bench.match(data) for data in prompts]
    fresh: list[float] = []
    again: list[float] = []
    known: list[float] = []
    for number, data in enumerate(prompts):
        name = bench.names[number % REPLICAS]
        fresh.append(bench.dispatch(data, name))
        again.append(bench.dispatch(data, name))
        known.append(bench.match(data))
    return {
        "prompt_tokens": tokens,
        "blocks": tokens // BLOCK_TOKENS,
        "matches_unknown_us": mean_us(unknown),
        "matches_known_us": mean_us(known),
        "dispatched_fresh_us": mean_us(fresh),
        "dispatched_again_us": mean_us(again),
    }


def per_event_us(bench: IndexBench) -> dict[str, float]:
    """Return the CPU time in µs per reported block, in reports of 64 blocks as engines send."""
    prompts = [bench.random.randbytes(64 * HASH_BYTES) for _ in range(2 * ROUNDS)]
    for number, data in enumerate(prompts[:ROUNDS]):
        bench.dispatch(data, bench.names[number % REPLICAS])
    later_s = bench.now + 60.0
    index = bench.index
    reports = (
        ("stored_as_dispatched_us", index.stored, prompts[:ROUNDS], 1),
        ("stored_unknown_us", index.stored, prompts[ROUNDS:], 1),
        ("removed_us", index.removed, prompts, -1),  # a prompt's last blocks first
    )
    figures: dict[str, float] = {}
    for what, call, blocks, step in reports:
        spent_s = 0.0
        for number, data in enumerate(blocks):
            hashes = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
            report = BlockHashes(b"".join(hashes[::step]))
            started_s = time.process_time()
            call(bench.names[number % REPLICAS], report, later_s)
            spent_s += time.process_time() - started_s
        figures[what] = round(1e6 * spent_s / (64 * len(blocks)), 2)
    return figures


def main() -> None:
    """Measure, print and write the result."""
    gc.disable()
    bench = IndexBench()
    entries = len(bench.index)
    figures: dict[str, Any] = {
        "replicas": REPLICAS,
        "entries": entries,
        "bytes_per_entry_full": round(bench.full_bytes / entries),
        "bytes_per_entry_churned": round(bench.churned_bytes / entries),
        "dispatched_longest_ms": round(1e3 * bench.longest_s, 1),
        "per_prompt": [per_prompt(bench, tokens) for tokens in PROMPTS_TOKENS],
        "per_event": per_event_us(bench),
    }
    operation = (
        "matches, dispatched: one prompt's block hashes from bytes; per_event: one block. CPU time"
        " of one core, with a full index of 64 replicas; no hashing, no messages."
    )
    path = write_result("router_index", operation, figures)
    for name, value in figures.items():
        print(name, value)
    print(path)


if __name__ == "__main__":
    main()
