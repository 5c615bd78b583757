"""What the control plane's page tells of the fleet and of rollouts."""

from types import SimpleNamespace

from control_plane.metrics import ControlPlaneMetrics
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire


def lines(metrics: ControlPlaneMetrics, state: ControlState) -> list[str]:
    feed = SimpleNamespace(state=state, is_database_up=True, refresh_s=0.0)
    return metrics.render(feed).decode().splitlines()


def test_replicas_are_counted_by_pool_and_state():
    metrics, state = ControlPlaneMetrics(), ControlState()
    for number, (pool, seen) in enumerate(
        (
            ("p", wire.REPLICA_STATE_READY),
            ("p", wire.REPLICA_STATE_READY),
            ("p", wire.REPLICA_STATE_LOST),
            ("q", wire.REPLICA_STATE_STARTING),
        )
    ):
        state.replicas[str(number)] = wire.Replica(id=str(number), pool_id=pool, state=seen)
    page = lines(metrics, state)
    assert 'control_plane_replicas_count{pool="p",state="ready"} 2.0' in page
    assert 'control_plane_replicas_count{pool="p",state="lost"} 1.0' in page
    assert 'control_plane_replicas_count{pool="q",state="lost"} 0.0' in page
    for gone in [it.id for it in state.replicas.values() if it.pool_id == "q"]:
        del state.replicas[gone]
    assert not [line for line in lines(metrics, state) if 'pool="q"' in line]


def test_rollouts_that_cannot_be_read_have_a_series_from_the_start():
    metrics = ControlPlaneMetrics()
    metrics.show_rollouts({"running": 2, "unreadable": 1}, 3.0)
    page = lines(metrics, ControlState())
    assert 'control_plane_rollouts_count{phase="running"} 2.0' in page
    assert 'control_plane_rollouts_count{phase="unreadable"} 1.0' in page
    metrics.show_rollouts({}, 0.0)
    assert 'control_plane_rollouts_count{phase="unreadable"} 0.0' in lines(metrics, ControlState())
