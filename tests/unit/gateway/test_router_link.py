"""What a link makes of a router's messages, and what it sends."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from gateway.dialects.delta import AnswerDelta
from gateway.dispatch import router_link
from gateway.dispatch.generation import EndKind, WholeGeneration
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.router_link import RouterLink
from gateway.text.pipe import TextPipe
from gateway.text.sse import DONE
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import NeverLags
from tests.unit.gateway.test_streamed import (
    SPEC,
    TABLE,
    TOKENIZER,
    Transport,
    stream,
    texts,
    unframed,
)


class BrokenPipe(TextPipe):
    """A parser that a text has brought out of step."""

    def push(self, tokens: Sequence[int]) -> AnswerDelta:
        raise AssertionError(f"{len(tokens)} tokens too many")


def up() -> RouterLink:
    link = RouterLink("a:1", "g", lambda: None, AttemptPace(NeverLags()))
    link._connect(wire.ConnectResponse(welcome=wire.Welcome(router_id="r")))
    return link


def tokens_for(*handles: int) -> wire.ConnectResponse:
    return wire.ConnectResponse(handle=handles, count=[1] * len(handles), token=[40] * len(handles))


def test_an_answer_that_cannot_be_read_ends_and_no_other() -> None:
    link = up()
    broken = WholeGeneration(SPEC._replace(new_pipe=lambda: BrokenPipe(TABLE)))
    good = WholeGeneration(SPEC)
    handles = [link.submit(it, "c", 0, 0) for it in (broken, good)]
    link.deliver(tokens_for(*handles), 1.0)
    link.deliver(tokens_for(*handles), 2.0)
    assert broken.ending is not None
    assert (broken.ending.kind, broken.ending.code) == (EndKind.REFUSED, ErrorCode.INTERNAL)
    assert "too many" not in broken.ending.message
    assert (list(good.emitted), good.ending) == ([40, 40], None)
    assert link.in_flight == 1


def test_closings_of_others_go_on_as_they_came() -> None:
    told: list[bytes] = []
    link = RouterLink("a:1", "g", lambda: None, AttemptPace(NeverLags()), told.append)
    link.deliver(wire.ConnectResponse(closings=[b"one", b"two"]), 1.0)
    assert told == [b"one", b"two"]


def test_one_message_holds_as_much_as_a_router_takes() -> None:
    link = up()
    small, large = SPEC._replace(prompt=[1]), SPEC._replace(prompt=[2] * 300_000)
    handles = [
        link.submit(WholeGeneration(spec), "c", 0, 0)
        for spec in (small, large, large, large, large, small, small)
    ]
    link.cancel(handles[-1])
    sent: list[int] = []
    batches = list(iter(link.take_batch, None))
    for batch in batches:
        sent += [submit.handle for submit in batch.submits]
        assert batch.ByteSize() < 4 << 20
    assert sent == handles
    assert len(batches) > 1
    assert [list(batch.cancels) for batch in batches if batch.cancels] == [handles[-1:]]
    assert batches[-1].cancels, "no cancel comes before its submit"


def test_an_answer_does_not_keep_a_routers_message() -> None:
    link, answer = up(), WholeGeneration(SPEC)
    handle = link.submit(answer, "c", 0, 0)
    message = wire.ConnectResponse(placed=[wire.Placed(handle=handle, replica_id="replica-1")])
    link.deliver(message, 1.0)
    message.placed[0].replica_id = "changed"
    assert answer.placed is not None
    assert answer.placed.replica_id == "replica-1"


def test_the_last_token_leaves_together_with_the_end_of_a_good_answer() -> None:
    link, answers = up(), [stream(), stream()]
    transports = [Transport(), Transport()]
    handles = [link.submit(answer, "c", 0, 0) for answer in answers]
    for answer, transport in zip(answers, transports, strict=True):
        answer.go_live(transport, is_chunked=True)
    link.deliver(tokens_for(*handles), 1.0)
    before = [transport.written for transport in transports]
    message = tokens_for(*handles)
    kinds = (wire.OUTCOME_KIND_LENGTH, wire.OUTCOME_KIND_LOST)
    for handle, kind in zip(handles, kinds, strict=True):
        message.outcomes.add(handle=handle, kind=kind)
    link.deliver(message, 2.0)
    ended, lost = (transport.written for transport in transports)
    assert ended == before[0]
    shown = texts(unframed(ended) + answers[0].last_chunks("length") + DONE)
    assert [text for text in shown if text] == [TOKENIZER.decode([40])] * 2
    assert len(lost) > len(before[1]), "it goes on elsewhere: nothing is kept back until then"


async def test_a_router_that_takes_nothing_is_given_up_though_it_speaks(monkeypatch) -> None:
    monkeypatch.setattr(router_link, "_NAP_S", 0.001)
    link = up()

    class Call:
        async def write(self, _: wire.ConnectRequest) -> None:
            await asyncio.Event().wait()

    async def speak() -> None:
        for number in itertools.count():
            link._received_at_s = float(number)
            await asyncio.sleep(0.0005)

    link.submit(WholeGeneration(SPEC), "c", 0, 0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(it) for it in (link._write(Call()), speak())]
        with pytest.raises(TimeoutError, match="takes nothing"):
            await link._watch()
        for other in others:
            other.cancel()
