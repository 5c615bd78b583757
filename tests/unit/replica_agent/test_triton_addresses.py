"""Tests the address that a node reports for the metrics of its engines."""

from pathlib import Path

import pytest

from replica.agent.app import _reachable
from replica.agent.runs import RunFile
from replica.agent.triton import Ports, TritonLauncher


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("0.0.0.0:9200", "10.1.2.3:9200"),
        ("[::]:9200", "10.1.2.3:9200"),
        ("10.9.9.9:9200", "10.9.9.9:9200"),
        ("127.0.0.1:9200", "127.0.0.1:9200"),
    ],
)
def test_metrics_are_where_the_agent_is_never_where_triton_is(
    address: str, told: str, tmp_path: Path
) -> None:
    launcher = TritonLauncher(
        state_dir=tmp_path,
        artifacts_dir=tmp_path,
        host="10.1.2.3",
        metrics_told=_reachable(address, "10.1.2.3"),
    )
    launch = launcher._launch("r-1", Ports(9000, 9001), RunFile(tmp_path))
    assert launch.metrics_address == f"{told}/engines/r-1"
    assert launch.metrics_url == "http://127.0.0.1:9001/metrics"
