"""What waits for a socket: merged, bounded, and in the right order."""

import pytest

from router import hub
from router.core.model import Batch, CoreConfig, EngineLimits, ReplicaPlan
from router.core.router import RouterCore
from router.hub import GatewayLink, HostOutbox
from sluice.wire.router.v1 import router_pb2 as wire


def batch(handle: int, *tokens: int) -> Batch:
    made = Batch()
    made.handles.append(handle)
    made.counts.append(len(tokens))
    made.tokens += tokens
    return made


def taken(link: GatewayLink) -> wire.ConnectResponse:
    data = link.take()
    assert data is not None
    return wire.ConnectResponse.FromString(data)


async def test_batches_merge_while_the_socket_is_busy():
    link = GatewayLink(1, "gateway")
    link.put(batch(1, 10, 11))
    link.put(batch(2, 20))
    assert not link.is_flushed
    message = taken(link)
    assert list(message.handle) == [1, 2]
    assert list(message.count) == [2, 1]
    assert list(message.token) == [10, 11, 20]
    assert link.is_flushed
    assert not link.ready.is_set()
    assert link.take() is None


async def test_a_sign_of_life_is_an_empty_message():
    link = GatewayLink(1, "gateway")
    link.put(Batch())
    assert link.ready.is_set()
    assert link.take() == b""
    assert link.take() is None


async def test_a_link_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "PENDING_TOKENS_MAX", 100)
    link = GatewayLink(1, "gateway")
    for _ in range(1000):
        link.put(batch(1, *range(10)))
    assert link.cut.is_set()
    assert len(taken(link).token) <= 110


async def test_a_dispatch_carries_everything_the_engine_needs():
    core = RouterCore(CoreConfig())
    core.on_gateway(1)
    core.on_cells(["cell"], [ReplicaPlan("replica", "cell")], 0.0)
    core.on_attached("replica", 7, EngineLimits(1000, 4, 256, 100, 16), 0.0)
    submit = wire.Submit(
        handle=5,
        cell_id="cell",
        prompt=[0, 1, 127, 128, 300_000, 2**32 - 1],
        output_tokens_max=40,
        stop_token_ids=[2, 3],
        temperature=0.5,
        top_p=0.75,
        top_k=9,
        seed=0,
        cache_root=b"r" * 16,
        adapter_digest="sha256:aa",
        tier_priority=4,
        ignore_eos=True,
    )
    core.submit(1, submit, 0.0)
    [slot] = core.tick(0.0).dispatches["replica"]
    outbox = HostOutbox(7)
    outbox.dispatch([slot])
    outbox.cancel([slot.sequence])
    outbox.credit(32)
    credit, request, cancel = outbox.take()
    assert (credit.credit.epoch, credit.credit.frames) == (7, 32)
    assert list(cancel.cancel.sequences) == [slot.sequence]
    assert request.submit.epoch == 7
    [sequence] = request.submit.sequences
    assert list(sequence.prompt) == list(submit.prompt)
    assert list(sequence.stop_token_ids) == [2, 3]
    assert sequence.output_tokens_max == 40
    assert sequence.sampling.HasField("seed")
    assert (sequence.sampling.temperature, sequence.sampling.top_p) == (0.5, 0.75)
    assert (sequence.sampling.top_k, sequence.priority, sequence.ignore_eos) == (9, 4, True)
    assert (sequence.cache_root, sequence.adapter_digest) == (b"r" * 16, "sha256:aa")
    assert outbox.take() == []
