"""Metrics are an interface: names, types, labels and buckets of all processes, in one golden file.

`python -m tests.unit.observability.golden` writes it anew; its diff is what dashboards and rules of
others will notice.
"""

import pytest

from tests.unit.observability.golden import GOLDEN, lines
from tests.unit.observability.known import METRICS, RECORDED

# By which the platform is known in the field; ratios are recorded by rules.
PROMISED = (
    *("llm_ttft_seconds", "llm_tpot_seconds", "llm_itl_seconds", "llm_goodput_ratio"),
    *("llm_queue_depth", "llm_prefix_cache_hit_ratio", "llm_preemptions_total"),
    *("llm_request_aborts_total", "gpu_kv_cache_utilization", "gpu_batch_size"),
)
# Their values are bounded by what there can be of them; see the text of each metric.
LABELS = {
    *(
        "adapter",
        "actuator",
        "alert",
        "arm",
        "budget",
        "cause",
        "change",
        "classifier",
        "code",
        "currency",
        "difference",
        "release",  # of a day, 200 at most
    ),
    "direction",
    *("endpoint", "fate", "general_type", "health", "index", "inflight_batcher_specific_metric"),
    *(
        "kind",
        "kv_cache_block_type",
        "level",
        "memory_type",
        "model",
        "phase",
        "place",
        "pool",
        "priority",
    ),
    *(
        "reason",
        "receiver",
        "request_type",
        "response_metric_type",
        "result",
        "role",
        "route",
        "source",
    ),
    *("stage", "state", "status", "tenant", "trouble", "way", "xid"),
}


def test_metrics_equal_the_golden_file():
    assert GOLDEN.read_text().splitlines() == lines(), (
        "a name, type, label or bucket changed; if on purpose:"
        " python -m tests.unit.observability.golden"
    )


@pytest.mark.parametrize("name", PROMISED)
def test_the_names_of_the_field_exist(name):
    assert name in METRICS.keys() | RECORDED.keys()


def test_every_label_is_known_to_be_bounded():
    for metric in METRICS.values():
        assert set(metric.labels) <= LABELS, metric.name
    with_tenants = {it.name for it in METRICS.values() if "tenant" in it.labels}
    assert with_tenants == {"gateway_tenant_requests_total", "gateway_tenant_tokens_total"}


@pytest.mark.parametrize(
    ("name", "edges"),
    [
        ("llm_ttft_seconds", {0.3, 0.5, 1.0, 1.5}),
        ("llm_tpot_seconds", {0.05}),
        ("llm_itl_seconds", {0.05}),
        ("router_ttft_seconds", {0.3, 0.5, 1.0, 1.5}),
        ("router_queue_seconds", {0.5}),
        ("gateway_loop_lag_seconds", {0.1}),
    ],
)
def test_histograms_have_edges_at_the_objectives(name, edges):
    assert edges <= set(METRICS[name].edges)
    assert list(METRICS[name].edges) == sorted(METRICS[name].edges)
