"""The tests of a gateway's behaviour, once more by clients that speak HTTP/2."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http2.connection import Http2Connection
from tests.integration.gateway import (
    test_answers,
    test_choices,
    test_faults,
    test_guard,
    test_messages,
    test_parameters,
    test_tokenize,
    test_truncation,
)
from tests.integration.gateway.test_guard import guard_events
from tests.integration.gateway.test_http2 import OVER_2

__all__ = ["guard_events"]  # a fixture
pytestmark = pytest.mark.real

MODULES = (
    *(test_answers, test_choices, test_faults, test_guard, test_messages),
    *(test_parameters, test_tokenize, test_truncation),
)
# HTTPX does not reset a stream whose reader has left, and takes GOAWAY as the end of all streams.
# `test_http2.py` has these two promises with another client. Anthropic's SDK speaks HTTP/1.1.
LEFT_OUT = {
    "test_a_client_that_leaves_is_cancelled_upstream",
    "test_drain_finishes_running_streams_and_cuts_the_rest_with_an_event",
    "test_the_official_sdk",
}


def of_clients(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the tests of a module whose gateway is asked by clients, in place of bare bytes."""
    tests = {name: it for name, it in vars(module).items() if name.startswith("test_")}
    asking = {name: it for name, it in tests.items() if "world" in inspect.signature(it).parameters}
    return {name: it for name, it in asking.items() if "w.raw(" not in inspect.getsource(it)}


for _module in MODULES:
    _found = {name: it for name, it in of_clients(_module).items() if name not in LEFT_OUT}
    assert not _found.keys() & globals().keys()
    globals().update(_found)


@pytest.fixture
def world(world: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    begun: list[bytes] = []
    begin = Http2Connection.begin

    def noted(connection: Http2Connection, data: bytes) -> None:
        begun.append(data)
        begin(connection, data)

    monkeypatch.setattr(Http2Connection, "begin", noted)

    @asynccontextmanager
    async def start(*given: Any, **settings: Any) -> AsyncIterator[Any]:
        async with world(*given, **settings) as w:
            w.versions = OVER_2
            yield w
        assert begun

    return start
