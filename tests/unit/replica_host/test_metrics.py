from collections import Counter

from replica.engine.types import AdapterState, EngineLoad, Limits
from replica.host import metrics as metrics_module
from replica.host.counters import HostCounters
from replica.host.metrics import FAMILIES, EngineMetrics, MetricKind, MetricsSample, Value

LIMITS = Limits(2048, 64, 256, 200, 1000)


def look(**changes) -> MetricsSample:
    usual = {
        "load": EngineLoad(),
        "limits": LIMITS,
        "counters": HostCounters(),
        "adapters": (),
        "step_age_s": 0.0,
        "memory_bytes": 7,
        "time_us": 8,
    }
    return MetricsSample(**{**usual, **changes})


def by_series(values: list[Value]) -> dict[tuple[str, ...], float]:
    return {
        (value.family.name, *value.labels): value.value
        for value in values
        if value.family.kind is not MetricKind.HISTOGRAM
    }


def test_every_value_is_declared_and_every_declared_family_has_values() -> None:
    counters = HostCounters(ended=Counter(stop=1), kv_refused=Counter(conflict=1))
    counters.step_s.append(0.1)
    counters.lengths.append((1, 2))
    counters.adapter_waits_s.append(0.3)
    state = AdapterState("a" * 64, True, 8, 10, 1, 2, 3, 1)
    values = EngineMetrics().values(look(counters=counters, adapters=(state,)))
    assert {value.family for value in values} == set(FAMILIES)
    for value in values:
        assert len(value.labels) == len(value.family.labels)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert (family.kind is MetricKind.HISTOGRAM) == bool(family.buckets)
        assert list(family.buckets) == sorted(family.buckets)


def test_the_state_of_the_engine_under_the_names_of_tensorrt_llm() -> None:
    load = EngineLoad(
        running=10,
        waiting=5,
        kv_blocks_used=50,
        cached_tokens=96,
        prompt_tokens=100,
        prefilling=4,
        step_prompt_tokens=12,
    )
    series = by_series(EngineMetrics().values(look(load=load)))
    request, cache = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
    names = ("active", "scheduled", "waiting", "context", "max")
    assert [series[request, name] for name in names] == [15, 10, 5, 4, 64]
    names = ("max", "used", "free", "fraction", "tokens_per", "reused")
    assert [series[cache, name] for name in names] == [200, 50, 150, 0.25, 32, 3]
    assert series["nv_trt_llm_inflight_batcher_metrics", "generation_requests"] == 6
    assert series["nv_trt_llm_inflight_batcher_metrics", "total_context_tokens"] == 12
    assert series["nv_trt_llm_runtime_memory_metrics", "cpu"] == 7
    assert series["llm_prefix_cache_tokens_total", "hit"] == 96
    assert series["llm_prefix_cache_tokens_total", "miss"] == 4


def test_durations_and_lengths_are_observed_once() -> None:
    counters = HostCounters()
    counters.step_s += [0.1, 0.2]
    counters.lengths.append((30, 40))
    metrics = EngineMetrics()

    def observed() -> list[tuple[str, float]]:
        values = metrics.values(look(counters=counters))
        return [(v.family.name, v.value) for v in values if v.family.kind is MetricKind.HISTOGRAM]

    assert observed() == [
        ("llm_step_seconds", 0.1),
        ("llm_step_seconds", 0.2),
        ("nv_llm_input_token_len", 30),
        ("nv_llm_output_token_len", 40),
    ]
    assert observed() == []


def state(number: int, prompt: int, output: int) -> AdapterState:
    return AdapterState(f"{number:064d}"[::-1], number % 2 == 0, 8, 1, 0, prompt, output)


def test_tokens_are_told_by_adapter_for_some_and_together_for_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(metrics_module, "ADAPTER_LABELS_MAX", 2)
    metrics = EngineMetrics()
    states = (state(1, 10, 1), state(2, 20, 9), state(3, 30, 5), state(4, 0, 0))
    series = by_series(metrics.values(look(adapters=states)))
    first, second = "2" + "0" * 11, "3" + "0" * 11
    name = "llm_adapter_tokens_total"
    assert series[name, first, "prompt"] == 20
    assert series[name, second, "output"] == 5
    assert series[name, "other", "prompt"] == 10
    assert series["llm_adapters", "slot"] == 2
    assert series["llm_adapters", "memory"] == 2
    # One adapter was dropped and loaded again, a second one is new, and a third one continued.
    states = (state(1, 4, 0), state(2, 25, 9), state(5, 1, 1))
    series = by_series(metrics.values(look(adapters=states)))
    assert series[name, first, "prompt"] == 25
    assert series[name, first, "output"] == 9
    assert series[name, second, "prompt"] == 30
    assert series[name, "other", "prompt"] == 10 + 4 + 1
    assert {labels[1] for labels in series if labels[0] == name} == {first, second, "other"}


def test_the_host_counts_its_work(make_bench) -> None:
    from sluice.wire.engine.v1 import engine_pb2 as wire

    bench = make_bench()
    grammar = wire.Grammar(kind=wire.Grammar.KIND_JSON)
    bench.submit(
        wire.Sequence(id=1, prompt=[1], output_tokens_max=3),
        wire.Sequence(
            id=2, prompt=[1], output_tokens_max=9, sampling=wire.Sampling(grammar=grammar)
        ),
        wire.Sequence(id=3, prompt=[], output_tokens_max=3),
    )
    bench.compilers.finish()
    bench.step()
    bench.core.cancel(1, [2])
    bench.run()
    counters = bench.core.counters
    assert counters.ended == {"length": 1, "cancelled": 1, "refused": 1}
    assert list(counters.lengths) == [(1, 3)]
    assert counters.output_tokens == 4
    assert counters.grammars == 1
    assert counters.steps == len(counters.step_s) == bench.driver.steps
