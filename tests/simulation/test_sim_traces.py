"""Traces: what is read from each format, and what a bad file is told."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from sim import synthetic, traces
from sim.traces import TraceError


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(timestamp: int, blocks: list[int], output: int = 5) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": 512 * len(blocks) - 7,
        "output_length": output,
        "hash_ids": blocks,
    }


def test_mooncake_spreads_buckets_by_seed_and_infers_conversations(tmp_path: Path):
    rows = [
        mooncake(0, [0, 1, 2]),
        mooncake(0, [0, 7, 8]),
        mooncake(3000, [0, 1, 2, 3]),
        mooncake(9000, [0]),
    ]
    path = write(tmp_path / "some_trace.jsonl", *rows)
    trace = traces.load(path, "mooncake", seed=3)
    assert trace.name == "some"
    assert trace.block_tokens == 512
    arrivals = [request.arrived_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert arrivals[-1] < 12.0
    by_blocks = {request.blocks: request for request in trace.requests}
    first, other = by_blocks[0, 1, 2], by_blocks[0, 7, 8]
    assert by_blocks[0, 1, 2, 3].session == first.session != other.session
    assert first.prompt_tokens == 3 * 512 - 7
    again = traces.load(path, "mooncake", seed=3)
    assert again == trace
    assert traces.load(path, "mooncake", seed=4) != trace


def test_a_gzipped_file_reads_the_same_and_only_as_far_as_asked(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", *(mooncake(3000 * n, [n]) for n in range(5)))
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert traces.load(packed, "mooncake") == traces.load(path, "mooncake")
    assert len(traces.load(packed, "mooncake", requests_max=3).requests) == 3


def test_azure_shares_nothing(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,600,44\n"
        "2023-11-16 18:15:46.6805900,374,0\n"
    )
    one, two = traces.load(path, "azure").requests
    assert (one.prompt_tokens, one.output_tokens) == (374, 1)
    assert two.arrived_s == pytest.approx(4.314579)
    assert len(two.blocks) == 2
    assert not set(one.blocks) & set(two.blocks)
    assert one.session < 0
    assert two.session < 0


def test_azure_of_2024_has_a_time_zone(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01.509930+00:00,12,5\n"
    )
    assert traces.load(path, "azure").requests[1].arrived_s == pytest.approx(1.5)


def test_our_own_export_keeps_tenants_and_grows_sessions(tmp_path: Path):
    def row(at_ms: int, prompt: int, session: object) -> dict[str, object]:
        return {
            "received_at_unix_ms": str(at_ms),  # 64 bits may be quoted
            "prompt_tokens": prompt,
            "output_tokens": 3,
            "session_hash": session,
            "tenant_id": "acme",
        }

    path = write(
        tmp_path / "export.jsonl",
        row(1_700_000_000_000, 1030, "77"),
        row(1_700_000_000_500, 1030, 0),
        row(1_700_000_001_000, 2000, "77"),
        row(1_700_000_001_500, 0, "77"),  # refused at the gateway
    )
    first, alone, later = traces.load(path, "sluice").requests
    assert first.tenant == "acme"
    assert later.arrived_s == pytest.approx(1.0)
    assert first.session == later.session == 77
    assert alone.session < 0
    # Two full blocks of the first turn are in the second, its unfilled third is not.
    assert later.blocks[:2] == first.blocks[:2]
    assert not set(later.blocks[2:]) & set(first.blocks)
    assert not set(alone.blocks) & set(first.blocks)


@pytest.mark.parametrize(
    ("format_name", "text", "problem"),
    [
        ("mooncake", '{"timestamp": 0}\n', "t:1: hash_ids is not a list"),
        ("mooncake", "\n{\n", "t:2: not JSON"),
        ("mooncake", "[]\n", "t:1: not a JSON object"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": [1]}\n',
            "t:1: input_length is 'x', not a whole number",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 5, "output_length": -1, "hash_ids": [1]}\n',
            "t:1: output_length is negative",
        ),
        ("mooncake", "", "t: no requests"),
        ("azure", "TIMESTAMP,ContextTokens\n", "t:1: no column GeneratedTokens"),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n",
            "t:2: TIMESTAMP is 'noon', not a time",
        ),
        ("sluice", '{"prompt_tokens": 1}\n', "t:1: no received_at_unix_ms"),
        ("paper", "", "unknown format 'paper'; known: mooncake, azure, sluice"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, format_name: str, text: str, problem: str
):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError) as raised:
        traces.load(path, format_name)
    assert problem in str(raised.value)


def test_a_missing_and_a_broken_file_are_named(tmp_path: Path):
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        traces.load(tmp_path / "none.jsonl", "mooncake")
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(b"not zipped")
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz"):
        traces.load(broken, "mooncake")


def test_a_generated_workload_matches_its_description():
    workload = synthetic.parse(
        "requests=400,rate=20,turns=3,systems=2,system_tokens=1100,tenants=3"
    )
    trace = synthetic.generate(workload, seed=5)
    assert trace == synthetic.generate(workload, seed=5)
    assert trace != synthetic.generate(workload, seed=6)
    assert len(trace.requests) == 400
    assert {request.blocks[:2] for request in trace.requests} == {(0, 1), (2, 3)}
    assert {request.tenant for request in trace.requests} == {"tenant-0", "tenant-1", "tenant-2"}
    turns: dict[int, list[tuple[int, ...]]] = {}
    for request in trace.requests:
        assert len(request.blocks) == -(-request.prompt_tokens // 512)
        turns.setdefault(request.session, []).append(request.blocks)
    assert max(map(len, turns.values())) > 3
    for chains in turns.values():
        for before, after in pairwise(chains):
            assert len(after) >= len(before)
            assert after[: len(before) - 1] == before[:-1]


def test_bursts_crowd_arrivals_but_keep_the_mean_rate():
    def gaps(burst: float) -> tuple[float, float]:
        workload = synthetic.Synthetic(requests=20_000, rate=10.0, burst=burst)
        arrivals = [r.arrived_s for r in synthetic.generate(workload, seed=1).requests]
        gaps = [b - a for a, b in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        return mean, (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    even, crowded = gaps(1.0), gaps(9.0)
    assert even[0] == pytest.approx(0.1, rel=0.05)
    assert even[1] == pytest.approx(1.0, abs=0.05)  # Poisson
    assert crowded[0] == pytest.approx(0.1, rel=0.25)
    assert crowded[1] > 1.4


@pytest.mark.parametrize("text", ["speed=3", "requests=0", "rate=fast", "requests=-1"])
def test_a_wrong_setting_of_a_generated_workload_is_refused(text: str):
    with pytest.raises(TraceError, match="synthetic"):
        synthetic.parse(text)
