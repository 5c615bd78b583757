"""What callers are told of a pool: true, and too coarse to watch a neighbour."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.cell_choice import CellView
from gateway.pool_status import COUNT_MIN, WAIT_STEP_MS, PoolReadiness, PoolStatus, status_of_cells


def test_only_cells_that_serve_count() -> None:
    cells = [
        CellView("a", replicas_ready=2, wait_ms=230, queued=3, running=9),
        CellView("b", replicas_ready=1, wait_ms=120, queued=8, running=0),
        CellView("c", replicas_ready=0, wait_ms=0, queued=100, running=0),
        CellView("d", replicas_ready=4, wait_ms=0, is_refusing=True),
    ]
    status = status_of_cells(cells, 1)
    assert status == PoolStatus(
        replicas_ready=3, replicas_starting=1, queued=11, running=9, wait_ms=120
    )
    assert status.figures == {"replicas_ready": 3, "queued": 8, "running": 8, "wait_ms": 200}


def test_readiness() -> None:
    assert status_of_cells([CellView("a", replicas_ready=1)], 3).readiness is PoolReadiness.READY
    assert status_of_cells([CellView("a")], 1).readiness is PoolReadiness.LOADING
    assert status_of_cells([], 0).readiness is PoolReadiness.UNAVAILABLE
    assert status_of_cells([], 0).figures["wait_ms"] is None


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 31))
def test_the_shown_figures_bound_the_truth(count: int, wait_ms: int) -> None:
    told = PoolStatus(1, 0, count, count, wait_ms).figures
    assert told["queued"] == told["running"]
    assert told["queued"] <= count < max(COUNT_MIN, 2 * told["queued"])
    assert wait_ms <= told["wait_ms"] < wait_ms + WAIT_STEP_MS
    assert told["wait_ms"] % WAIT_STEP_MS == 0


@given(st.integers(0, COUNT_MIN - 2))
def test_one_request_of_a_neighbour_cannot_be_seen(running: int) -> None:
    before, after = (PoolStatus(1, 0, 0, it, 10).figures for it in (running, running + 1))
    assert before == after
