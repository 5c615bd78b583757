"""Actuators on real sockets: the API server's protocol by HTTPS, and a signed webhook."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from control_plane.alerts import sending
from control_plane.alerts.notices import signature
from control_plane.alerts.sending import SendError
from control_plane.scaling import asking
from control_plane.scaling.actuators import Actuator
from control_plane.scaling.asking import NodeAsking
from control_plane.scaling.kubernetes import set_scale
from control_plane.scaling.nodes import NodesAsk
from tests.support.kubernetes_api import StandInApi, kubernetes_api

pytestmark = [pytest.mark.real, pytest.mark.asyncio]

THREE = NodesAsk(wanted=3, held=0, present=3)


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[StandInApi]:
    async with kubernetes_api(tmp_path) as found:
        found.add("gpu-node", 1)
        yield found


def _actuator(api: StandInApi, name: str = "gpu", **others: object) -> Actuator:
    return Actuator.model_validate(api.actuator(name, **others))


async def test_a_set_is_brought_to_the_number_and_written_once(api: StandInApi) -> None:
    assert await set_scale(_actuator(api), THREE) == (1, 3)
    assert await set_scale(_actuator(api), THREE) == (3, 3)
    assert api.writes == [3]
    api.add("gpu-node", 0)
    assert await set_scale(_actuator(api), THREE) == (0, 3)
    down = NodesAsk(wanted=1, held=2, present=3)
    assert await set_scale(_actuator(api), down) == (3, 2)


async def test_a_write_between_reading_and_writing_is_seen(api: StandInApi) -> None:
    api.rivals = 2
    assert await set_scale(_actuator(api), THREE) == (1, 3)
    api.rivals = 99
    with pytest.raises(SendError, match="has been modified"):
        await set_scale(_actuator(api), NodesAsk(5, 0, 3))
    assert api.writes == [3]


@pytest.mark.parametrize(
    ("name", "namespace", "words"),
    [
        ("other", "sluice", "status 403.*is forbidden.*components/node-scaling"),
        ("lost", "sluice", "status 404.*not found.*the namespace"),
    ],
)
async def test_refusals_say_how_to_mend_them(
    name: str, namespace: str, words: str, api: StandInApi
) -> None:
    api.allowed.add(("sluice", "lost-node"))
    with pytest.raises(SendError) as caught:
        await set_scale(_actuator(api, name, namespace=namespace), THREE)
    assert re.search(words, caught.value.reason)


async def test_a_token_is_read_anew_and_never_told(api: StandInApi) -> None:
    api.token_file.write_text("an-old-one")
    with pytest.raises(SendError) as caught:
        await set_scale(_actuator(api), THREE)
    assert "refuses the token" in caught.value.reason
    assert "an-old-one" not in caught.value.reason
    api.token_file.unlink()
    with pytest.raises(SendError, match="token"):
        await set_scale(_actuator(api), THREE)


async def test_a_busy_api_server_is_asked_when_it_says(api: StandInApi) -> None:
    api.trouble = (429, "TooManyRequests", "too many requests", {"Retry-After": "7"})
    with pytest.raises(SendError) as caught:
        await set_scale(_actuator(api), THREE)
    assert (caught.value.may_repeat, caught.value.after_ms) == (True, 7000)
    api.trouble = (200, "", "this is no Scale", {})
    with pytest.raises(SendError, match="no Scale"):
        await set_scale(_actuator(api), THREE)


async def test_another_server_with_the_same_address_gets_no_token(
    api: StandInApi, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with kubernetes_api(other) as stranger:
        stranger.add("gpu-node", 1)
        entry = api.actuator("gpu", url=stranger.url)
        with pytest.raises(SendError, match="CERTIFICATE_VERIFY_FAILED"):
            await set_scale(Actuator.model_validate(entry), THREE)
        assert not stranger.writes


class Cloud:
    """Takes what a webhook is told."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, object], str, bytes]] = []
        self.statuses: list[int] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.told.append((json.loads(body), request.headers["Sluice-Signature"], body))
        return web.Response(status=self.statuses.pop(0) if self.statuses else 202)


@pytest_asyncio.fixture
async def cloud() -> AsyncIterator[Cloud]:
    found, app = Cloud(), web.Application()
    app.router.add_post("/nodes", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/nodes"
    yield found
    await runner.cleanup()


def _hook(cloud: Cloud, **others: object) -> Actuator:
    entry = {
        "name": "cloud",
        "kind": "webhook",
        "nodes": "cloud",
        "nodes_max": 9,
        "url": cloud.url,
        "secret": "s3cret",
        "is_internal": True,
    }
    return Actuator.model_validate(entry | others)


class Running:
    """Asks that run, and what was counted."""

    def __init__(self, *actuators: Actuator) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.asking = NodeAsking({it.name: it for it in actuators}, self._count, lambda _: None)

    def _count(self, name: str, result: str) -> None:
        self.counts[name, result] += 1

    async def until(self, name: str, result: str, count: int = 1) -> None:
        for _ in range(2000):
            if self.counts[name, result] >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError((name, result, self.counts))


@asynccontextmanager
async def running(*actuators: Actuator) -> AsyncIterator[Running]:
    found = Running(*actuators)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(found.asking.run())
        yield found
        task.cancel()


async def test_a_webhook_is_called_once_and_signed(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_RETRY_FIRST_S", 0.01)
    cloud.statuses = [503]
    async with running(_hook(cloud)) as asks:
        asks.asking.offer({"cloud": THREE})
        await asks.until("cloud", "failed")
        asks.asking.offer({"cloud": THREE})
        await asks.until("cloud", "changed")
        asks.asking.offer({"cloud": THREE})
        await asks.until("cloud", "kept")
    assert len(cloud.told) == 2
    told, proof, body = cloud.told[-1]
    assert told["nodes_wanted"] == 3
    assert proof == signature("s3cret", body, int(proof.split(",")[0][2:]))


async def test_an_address_of_this_network_is_not_called(cloud: Cloud) -> None:
    async with running(_hook(cloud, is_internal=False)) as asks:
        asks.asking.offer({"cloud": THREE})
        await asks.until("cloud", "failed")
    assert not cloud.told


async def test_an_actuator_that_hangs_delays_no_other_one(
    api: StandInApi, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(asking, "_RETRY_FIRST_S", 0.01)
    api.hangs = True
    async with running(_actuator(api), _hook(cloud)) as asks:
        asks.asking.offer({"gpu": THREE, "cloud": THREE})
        await asks.until("cloud", "changed")
        assert not asks.counts["gpu", "failed"]
        await asks.until("gpu", "failed")
        api.hangs = False
        # Only the newest ask counts.
        asks.asking.offer({"gpu": NodesAsk(2, 0, 2), "cloud": THREE})
        await asks.until("gpu", "changed")
    assert api.writes == [2]
