"""Goodput, aborts, TPOT and tenants, as the gateway counts them."""

import re

import pytest

from gateway.metrics import GatewayMetrics
from gateway.objectives import ObjectiveResult, Objectives, mean_tpot_s

OBJECTIVES = Objectives(ttft_s=0.5, tpot_s=0.05)


@pytest.mark.parametrize(
    ("ttft_s", "prompt_tokens", "prefill_s", "tpot_s", "result"),
    [
        (0.5, 100, 9.0, 0.05, ObjectiveResult.GOOD),
        (0.51, 100, 9.0, 0.0, ObjectiveResult.TTFT_MISSED),
        (0.51, 2048, 9.0, 0.0, ObjectiveResult.TTFT_MISSED),
        (2.4, 2049, 1.0, 0.0, ObjectiveResult.GOOD),
        (2.6, 2049, 1.0, 0.0, ObjectiveResult.TTFT_MISSED),
        (0.1, 100, 0.0, 0.051, ObjectiveResult.TPOT_MISSED),
        (0.6, 100, 0.0, 0.051, ObjectiveResult.TTFT_MISSED),
    ],
)
def test_a_request_is_good_when_it_met_both(ttft_s, prompt_tokens, prefill_s, tpot_s, result):
    assert OBJECTIVES.result(ttft_s, prompt_tokens, prefill_s, tpot_s) is result


def test_the_time_per_token_is_that_of_one_answer():
    assert mean_tpot_s(1.0, 11, 1) == pytest.approx(0.1)
    assert mean_tpot_s(1.0, 22, 2) == pytest.approx(0.1)
    assert mean_tpot_s(1.0, 1, 1) == mean_tpot_s(1.0, 0, 0) == mean_tpot_s(1.0, 2, 2) == 0.0


def ended(metrics: GatewayMetrics, code: str = "", **changes) -> None:
    usual = {"ttft_s": 0.1, "decode_s": 0.1, "prefill_s": 0.0, "prompt_tokens": 5}
    metrics.ended("t", code, **{**usual, "output_tokens": 11, "answers": 1, **changes})


def samples(metrics: GatewayMetrics, name: str) -> dict[str, float]:
    found = re.findall(rf"^{name}(\S*) (\S+)$", metrics.page().decode(), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_a_request_ended_by_its_caller_is_an_abort_and_no_part_of_goodput():
    metrics = GatewayMetrics()
    ended(metrics)
    ended(metrics, ttft_s=0.6)
    ended(metrics, decode_s=1.0)
    ended(metrics, "client_closed")
    ended(metrics, "tenant_queue_full")
    ended(metrics, "no_capacity")
    assert samples(metrics, "llm_goodput_requests_total") == {
        '{result="good"}': 1,
        '{result="ttft_missed"}': 1,
        '{result="tpot_missed"}': 1,
        '{result="failed"}': 1,
    }
    assert samples(metrics, "llm_request_aborts_total") == {
        '{code="client_closed"}': 1,
        '{code="no_capacity"}': 1,
        '{code="tenant_queue_full"}': 1,
    }
    assert samples(metrics, "llm_tpot_seconds_count") == {"": 3}
    tokens = samples(metrics, "gateway_tenant_tokens_total")
    assert tokens['{kind="output",tenant="t"}'] + tokens['{kind="output",tenant="other"}'] == 66
