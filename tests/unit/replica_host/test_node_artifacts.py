"""Tests how long a request waits for an absent agent. Other tests use the real connection."""

from pathlib import Path
from typing import Any

import pytest

from replica.host.node_artifacts import WAIT_S_MAX, NodeArtifacts
from sluice.errors import ErrorCode

A, B = "a" * 64, "b" * 64


class Line(NodeArtifacts):
    """A client without its thread. The test sets the time and the agent's state."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: dict[str, Any] = {}
        super().__init__(Path("/nowhere"), lambda action: action(), lambda: self.now_s)

    def ask(self, digest: str) -> None:
        assert self.want(digest, lambda error: self.told.update({digest: error}))

    def look(self, now_s: float) -> set[str]:
        self.now_s = now_s
        self._end_late()
        assert all(error.code is ErrorCode.ENGINE_BUSY for error in self.told.values())
        return set(self.told)

    def lose(self, now_s: float) -> None:
        self._away_since_s = now_s


@pytest.fixture
def line():
    line = Line()
    yield line
    line._awake.close()
    line._waker.close()


def test_an_engine_asking_while_the_agent_is_away_waits_as_long_as_others(line) -> None:
    line.lose(0.0)
    line.now_s = 100.0
    line.ask(A)
    assert line.look(104.9) == set()
    line.ask(B)
    assert line.look(105.1) == {A}
    assert line.look(110.0) == {A, B}


def test_an_agent_that_vanishes_gets_time_to_come_back(line) -> None:
    line.ask(A)
    line.lose(50.0)
    assert line.look(54.9) == set()
    assert line.look(55.0) == {A}


def test_an_agent_that_takes_for_ever_is_given_up(line) -> None:
    line.ask(A)
    assert line.look(WAIT_S_MAX - 1) == set()
    assert line.look(WAIT_S_MAX) == {A}
