"""Which answers of a batch's lines are final, and how often an idle gateway asks for lines."""

import pytest

from gateway.batches.worker import idle_s, is_passing
from gateway.server.errors import body_of
from sluice.errors import ErrorCode, PlatformError


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        (ErrorCode.QUEUE_FULL, True),
        (ErrorCode.OVERLOADED, True),
        (ErrorCode.RATE_LIMIT_TOKENS, True),
        (ErrorCode.UNAVAILABLE, True),
        (ErrorCode.ENGINE_FAILED, False),
        (ErrorCode.REPLICA_LOST, False),
        (ErrorCode.INVALID_REQUEST, False),
    ],
)
def test_a_line_that_kills_engines_is_not_tried_again(code: ErrorCode, passes: bool) -> None:
    error = PlatformError(code, "why")
    assert is_passing(error.status, body_of(error)) is passes


def test_a_good_answer_is_final() -> None:
    assert not is_passing(200, b"{}")


def test_a_gateway_without_lines_asks_ever_less_often() -> None:
    assert [idle_s(calls) for calls in (0, 1, 2, 3, 1000)] == [2.0, 4.0, 8.0, 15.0, 15.0]
