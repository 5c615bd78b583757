"""A channel for a long time: when it is another one. Neither gRPC nor files are needed."""

from types import SimpleNamespace

import pytest

from sluice import channels
from sluice.identity import Role


class Channel:
    async def close(self, grace: float | None = None) -> None: ...


class Certificates:
    """Tells how often it is asked."""

    def __init__(self) -> None:
        self.looks, self.loaded = 0, object()

    def fresh(self) -> object:
        self.looks += 1
        return self.loaded


async def test_files_are_looked_at_once_a_second_however_many_calls_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, now_s = Certificates(), [1000.0]
    monkeypatch.setattr(channels, "ours", lambda: files)
    monkeypatch.setattr(channels, "channel_to", lambda *_args, **_options: Channel())
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(channels, "time", clock, raising=False)
    link = channels.RenewedChannel("127.0.0.1:1", Role.ENGINE, options=())
    first = await link.current()

    files.loaded = object()
    for _ in range(100):
        assert await link.current() is first
    assert files.looks == 1

    now_s[0] += 1.0
    second = await link.current()
    assert second is not first
    for _ in range(100):
        assert await link.current() is second
    assert files.looks == 2
    await link.aclose()
