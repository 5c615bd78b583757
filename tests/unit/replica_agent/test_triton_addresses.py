"""What a node tells the fleet of its engines."""

import pytest

from replica.agent import triton


@pytest.mark.parametrize(
    ("host", "plain", "by_tls"),
    [
        ("10.1.2.3", "10.1.2.3:9000", ""),
        ("0.0.0.0", "0.0.0.0:9000", ""),
        ("127.0.0.1", "127.0.0.1:9000", "127.0.0.1:9000"),
        ("127.0.0.2", "127.0.0.2:9000", "127.0.0.1:9000"),
        ("localhost", "localhost:9000", "127.0.0.1:9000"),
        ("node-1", "node-1:9000", ""),
    ],
)
def test_metrics_that_are_on_a_nodes_loopback_are_told_to_no_other(
    monkeypatch: pytest.MonkeyPatch, host: str, plain: str, by_tls: str
) -> None:
    assert triton._metrics_address(host, 9000) == plain
    monkeypatch.setattr(triton, "ours", object)
    assert triton._metrics_address(host, 9000) == by_tls
