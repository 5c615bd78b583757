"""Texts of requests: which are kept, that they wait in a bounded queue, and where they go."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.endpoints import texts as module
from gateway.endpoints.texts import Texts, is_kept
from gateway.metrics import GatewayMetrics
from gateway.objectives import Objectives
from gateway.text.detokenizer import TokenTable
from gateway.text.pipe import TextPipe
from gateway.texts.shipping import TextShipping, is_over
from sluice.events import EventProducer
from sluice.spool import Spool
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.text_pb2 import TextEvent

POLICY = control.TextPolicy(
    id="acme", is_on=True, share=10_000, retention_days=3, redacted=["email"], words=["falcon"]
)
PIECES = [b" mail", b" a@b", b".de", b" falcon", b" 10.0.0.1"]


class _Task:
    """A request of two messages."""

    def __init__(self, messages: list[object]) -> None:
        self.messages = messages

    def texts(self, table: TokenTable) -> Any:
        assert table.pieces == PIECES
        yield "messages", iter(self.messages)


def new_pipe() -> TextPipe:
    tokenizer: Any = None
    return TextPipe(TokenTable([None] * len(PIECES), PIECES, tokenizer, frozenset()))


def world() -> tuple[Texts, list[TextEvent], GatewayMetrics]:
    metrics, shipped = GatewayMetrics(Objectives(1, 1)), list[TextEvent]()
    return Texts(shipped.append, metrics), shipped, metrics


def ended() -> Any:
    one = SimpleNamespace(id="acme")
    return SimpleNamespace(
        uid="u1", request_id="r1", received_at_unix_ms=1_790_000_000_000, outcome="stop",
        principal=SimpleNamespace(tenant=one), model=SimpleNamespace(id="m"), endpoint="/v1/x",
        specs=[SimpleNamespace(prompt=[0] * 7, new_pipe=new_pipe)], answers_per_prompt=1,
        generations=[SimpleNamespace(emitted=[0, 1, 2, 3, 4])],
    )  # fmt: skip


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        yield
        task.cancel()


def fates(metrics: GatewayMetrics) -> dict[str, float]:
    found = metrics.registry.collect()
    [family] = [it for it in found if it.name == "gateway_texts"]
    return {it.labels["fate"]: it.value for it in family.samples if it.name.endswith("_total")}


async def test_a_text_is_redacted_before_it_is_shipped() -> None:
    texts, shipped, metrics = world()
    task: Any = _Task([{"role": "user", "content": "I am c@d.org of Falcon"}])
    kept = texts.begin(POLICY, task, "r1")
    assert kept is not None
    del task  # as a request does that has begun its answer
    texts.offer(kept, ended())
    async with running(texts.run()):
        await texts.flush(10)
    [event] = shipped
    assert json.loads(event.prompt) == {
        "messages": [{"role": "user", "content": "I am [email] of [word]"}]
    }
    assert json.loads(event.answers) == {"answers": [{"content": " mail [email] [word] 10.0.0.1"}]}
    assert (event.event_id, event.tenant_id, event.model) == ("evt_u1", "acme", "m")
    assert event.expires_at_unix_ms - event.received_at_unix_ms == 3 * 86_400_000
    assert dict(event.redactions) == {"email": 2, "word": 2}
    assert (event.is_prompt_cut, event.is_answer_cut) == (False, False)
    assert fates(metrics)["kept"] == 1


def test_the_share_goes_by_the_id_of_the_request() -> None:
    policy = control.TextPolicy(id="acme", share=2500)
    kept = {f"r{n}" for n in range(4000) if is_kept(policy, f"r{n}")}
    assert 850 < len(kept) < 1150
    assert kept == {name for name in (f"r{n}" for n in range(4000)) if is_kept(policy, name)}
    more = control.TextPolicy(id="acme", share=5000)
    assert all(is_kept(more, name) for name in kept)  # a larger share keeps these, too
    assert is_kept(POLICY, "any")
    task: Any = _Task([])
    [left] = [name for name in ("r0", "r1", "r2", "r3", "r4") if name not in kept][:1]
    assert Texts.begin(policy, task, left) is None


async def test_a_text_without_room_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, shipped, metrics = world()
    task: Any = _Task([])
    kept = texts.begin(POLICY, task, "r1")
    assert kept is not None
    monkeypatch.setattr(module, "QUEUE_MAX", 3)
    for _ in range(5):
        texts.offer(kept, ended())
    assert fates(metrics)["full"] == 2
    monkeypatch.setattr(module, "QUEUE_MAX", 100)
    monkeypatch.setattr(module, "QUEUE_TOKENS_MAX", 40)
    texts.offer(kept, ended())
    assert (fates(metrics)["full"], shipped) == (3, [])
    async with running(texts.run()):
        await asyncio.sleep(0)
    assert fates(metrics)["stopped"] + fates(metrics)["kept"] == 3


async def test_a_failure_is_counted_and_shows_nothing_of_the_text() -> None:
    texts, shipped, metrics = world()

    class _Broken(_Task):
        def texts(self, table: TokenTable) -> Any:
            raise ValueError("my secret prompt")

    task: Any = _Broken([])
    plain: Any = _Task([])
    bad, good = texts.begin(POLICY, task, "r"), texts.begin(POLICY, plain, "r")
    assert bad is not None
    assert good is not None
    with capture_logs() as told:
        texts.offer(bad, ended())
        texts.offer(good, ended())
        async with running(texts.run()):
            await texts.flush(10)
    assert [it["event"] for it in told] == ["text_not_prepared"]
    assert "secret" not in repr(told)
    assert (len(shipped), fates(metrics)["failed"]) == (1, 1)


class _Producer:
    def __init__(self) -> None:
        self.emitted: list[TextEvent] = []
        self.stats = SimpleNamespace(dropped=4, spool_bytes=5)

    def emit(self, payload: bytes) -> None:
        self.emitted.append(TextEvent.FromString(payload))

    def close(self, timeout_s: float) -> None:
        self.closed_s = timeout_s


async def test_a_producer_is_made_with_the_first_text(tmp_path: Path) -> None:
    made: list[Any] = []

    def make() -> Any:
        if not made:
            made.append(None)
            raise OSError("no room")
        made.append(_Producer())
        return made[-1]

    shipping = TextShipping(make, tmp_path)
    await shipping.close(1)
    assert (shipping.dropped, shipping.spool_bytes, made) == (0, 0, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.texts.shipping._RETRY_S", 0.0)
        for number in range(70):
            shipping.ship(TextEvent(request_id=str(number)))
        await shipping.run()
    shipping.ship(TextEvent(request_id="later"))
    ids = [it.request_id for it in made[1].emitted]
    assert ids == [*(str(n) for n in range(64)), "later"]
    assert (shipping.dropped, shipping.spool_bytes) == (6 + 4, 5)
    await shipping.close(1.5)
    assert made[1].closed_s == 1.5


async def test_texts_left_on_disk_by_a_worker_start_a_producer(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "1.spool").touch()
    made = _Producer()
    producer: Any = made
    await TextShipping(lambda: producer, tmp_path).run()
    assert made.emitted == []


async def test_expired_texts_are_not_sent_from_the_spool(tmp_path: Path) -> None:
    now_ms = round(time.time() * 1000)
    over = TextEvent(event_id="over", expires_at_unix_ms=now_ms - 1).SerializeToString()
    live = TextEvent(event_id="live", expires_at_unix_ms=now_ms + 3_600_000).SerializeToString()
    assert not is_over(live)
    assert not is_over(b"\xff")  # telemetry parks it
    spool = Spool(tmp_path, max_bytes=1 << 20, segment_bytes=1 << 20)
    spool.append([over] * 3)
    spool.close()
    nobody = "127.0.0.1:9"
    producer = EventProducer(nobody, "t", spool_directory=tmp_path, is_over=is_over)
    try:  # with no broker at all
        async with asyncio.timeout(10):
            while producer.stats.spool_bytes:  # noqa: ASYNC110 - its thread tells nobody
                await asyncio.sleep(0.01)
        assert (producer.stats.dropped, producer.stats.damaged) == (0, 0)
    finally:
        await asyncio.to_thread(producer.close, 0)
