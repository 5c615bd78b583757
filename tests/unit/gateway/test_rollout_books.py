"""What a worker remembers of requests that pins and splits decided about."""

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.metrics import GatewayMetrics
from gateway.rollouts.decided import Decided
from gateway.rollouts.decision import PINNED, ReleaseDecision
from gateway.rollouts.open_requests import OpenRequests
from sluice.wire.telemetry.v1 import telemetry_pb2 as telemetry


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50)), max_size=30))
def test_the_oldest_open_request_is_known(steps: list[tuple[str, int]]) -> None:
    """A time of 0 stands for the end of a request."""
    found, model = OpenRequests(), dict[str, int]()
    for uid, received_at_unix_ms in steps:
        if received_at_unix_ms:
            found.add(uid, received_at_unix_ms)
            model[uid] = received_at_unix_ms
        else:
            found.discard(uid)
            model.pop(uid, None)
        assert len(found) == len(model)
        assert found.oldest_unix_ms == (min(model.values()) if model else 0)


def test_an_undecidable_split_is_logged_once_and_always_counted() -> None:
    metrics = GatewayMetrics()
    decided = Decided(metrics)
    with capture_logs() as logs:
        for _ in range(3):
            decided.note("t", "m", ReleaseDecision(missed="gone"))
            decided.note("t", "m", PINNED)
            decided.note("t", "m", ReleaseDecision("r", telemetry.ARM_CONTROL))
        decided.note("u", "m", ReleaseDecision(missed="gone"))
    assert [it["tenant_id"] for it in logs] == ["t", "u"]
    page = metrics.page().decode()
    for arm, count in (("unserved", 4), ("pinned", 3), ("control", 3), ("canary", 0)):
        assert f'gateway_rollout_requests_total{{arm="{arm}"}} {float(count)}' in page


def test_a_request_waiting_for_its_base_is_counted_and_logged_once() -> None:
    metrics = GatewayMetrics()
    decided = Decided(metrics)
    with capture_logs() as logs:
        for _ in range(2):
            decided.note("t", "m", ReleaseDecision(unready="new"))
    assert [(it["event"], it["release"]) for it in logs] == [("release_unready", "new")]
    assert 'gateway_rollout_requests_total{arm="unready"} 2.0' in metrics.page().decode()
