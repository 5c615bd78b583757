"""A channel for a long time: when it is another one. Neither gRPC nor files are needed."""

import asyncio
from types import SimpleNamespace

import pytest

from sluice import channels
from sluice.identity import CertificateRole


class Channel:
    """Has a call under way: it ends when it is cut off."""

    def __init__(self) -> None:
        self.is_closing, self.is_cut = False, False

    async def close(self, grace: float | None = None) -> None:
        self.is_closing = True
        if grace:
            await asyncio.sleep(grace)
        self.is_cut = True


class Certificates:
    """Tells how often it is asked."""

    def __init__(self) -> None:
        self.looks, self.loaded = 0, object()

    def fresh(self) -> object:
        self.looks += 1
        return self.loaded


async def test_calls_go_on_though_a_certificate_and_its_ca_are_replaced_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, made = Certificates(), list[Channel]()

    def channel_to(*_args: object, **_options: object) -> Channel:
        made.append(Channel())
        return made[-1]

    monkeypatch.setattr(channels, "ours", lambda: files)
    monkeypatch.setattr(channels, "channel_to", channel_to)
    monkeypatch.setattr(channels, "_LOOK_S", 0.0, raising=False)
    link = channels.RenewedChannel("127.0.0.1:1", CertificateRole.ENGINE, options=())
    for _ in range(3):
        files.loaded = object()
        await link.current()
    await asyncio.sleep(0)  # what ends in the background begins
    assert [it.is_closing for it in made] == [True, True, False, False]
    assert not any(it.is_cut for it in made)

    await link.aclose()

    assert all(it.is_cut for it in made)


async def test_files_are_looked_at_once_a_second_however_many_calls_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, now_s = Certificates(), [1000.0]
    monkeypatch.setattr(channels, "ours", lambda: files)
    monkeypatch.setattr(channels, "channel_to", lambda *_args, **_options: Channel())
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(channels, "time", clock, raising=False)
    link = channels.RenewedChannel("127.0.0.1:1", CertificateRole.ENGINE, options=())
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
