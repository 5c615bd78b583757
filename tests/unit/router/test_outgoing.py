"""What waits for a socket: merged, bounded, and in the right order."""

import asyncio
from array import array
from itertools import pairwise

import pytest

from router import outgoing
from router import wire as convert
from router.closing import Accounts
from router.core.router import RouterCore
from router.core.types.account import ServiceAccount, TierTotals
from router.core.types.batch import GatewayBatch
from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits, ReplicaPlan
from router.core.types.request import UNLIMITED, Dispatch
from router.counting import TokenCounts
from router.outgoing import PAUSE_S, GatewayLink, HostOutbox, leaves_at
from router.sent_spans import SentSpans
from sim.loop import run
from sluice.hashing import BLOCK_TOKENS, chained_hashes
from sluice.prompt_spans import SPAN_TOKENS
from sluice.token_ids import packed_ids, unpacked_ids
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire


def batch(handle: int, *tokens: int) -> GatewayBatch:
    made = GatewayBatch()
    made.handles.append(handle)
    made.counts.append(len(tokens))
    made.tokens += tokens
    return made


def taken(link: GatewayLink) -> wire.ConnectResponse:
    data = link.take()
    assert data is not None
    return wire.ConnectResponse.FromString(data)


async def test_batches_merge_while_the_socket_is_busy():
    link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))
    link.put(batch(1, 10, 11), 0.0)
    link.put(batch(2, 20), 0.0)
    assert not link.is_flushed
    message = taken(link)
    assert list(message.handle) == [1, 2]
    assert list(message.count) == [2, 1]
    assert list(message.token) == [10, 11, 20]
    assert link.is_flushed
    assert not link.ready.is_set()
    assert link.take() is None


async def test_log_probabilities_stay_in_the_order_of_their_tokens():
    link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))
    link.put(batch(1, 10, 11), 0.0)
    for handle, logprob in ((1, -0.5), (2, -1.0), (1, -1.5)):
        made = batch(handle, 20)
        made.logprobs = engine.Logprobs(
            sequence=[handle],
            logprob=[logprob],
            top_count=[2],
            top_token=[20, 21],
            top_logprob=[logprob, -4.0],
        )
        link.put(made, 0.0)
    link.put(batch(3, 30), 0.0)
    message = taken(link)
    assert list(message.handle) == [1, 1, 2, 1, 3]
    told = message.logprobs
    assert list(told.sequence) == [1, 2, 1]
    assert list(told.logprob) == [-0.5, -1.0, -1.5]
    assert list(told.top_count) == [2, 2, 2]
    assert list(told.top_token) == [20, 21] * 3
    link.put(batch(1, 1), 1.0)
    assert not taken(link).HasField("logprobs")


async def test_a_sign_of_life_is_an_empty_message():
    link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))
    link.put(GatewayBatch(), 0.0)
    assert link.ready.is_set()
    assert link.take() == b""
    assert link.take() is None


async def test_a_link_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outgoing, "PENDING_TOKENS_MAX", 100)
    link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))
    for _ in range(1000):
        link.put(batch(1, *range(10)), 0.0)
    assert link.cut.is_set()
    assert len(taken(link).token) <= 110


def test_a_message_after_a_pause_leaves_at_once():
    assert leaves_at(float("-inf"), 5.0) == 5.0
    assert leaves_at(5.0, 5.0 + PAUSE_S) == 5.0 + PAUSE_S
    assert leaves_at(5.0, 5.0 + 3 * PAUSE_S) == 5.0 + 3 * PAUSE_S


def test_a_message_just_after_another_waits_for_the_rest_of_the_pause():
    assert leaves_at(5.0, 5.0) == 5.0 + PAUSE_S
    assert leaves_at(5.0, 5.0 + PAUSE_S / 2) == 5.0 + PAUSE_S


def test_steps_of_many_engines_share_messages():
    left_at: list[float] = []
    came_at: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))

        async def write() -> None:
            while True:
                await link.ready.wait()
                came_at.extend(taken(link).token)
                left_at.append(loop.time())

        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(write())
            for engine_number in range(1000):
                link.put(batch(engine_number, round(loop.time() * 1e6)), loop.time())
                await asyncio.sleep(PAUSE_S / 10)
            await asyncio.sleep(PAUSE_S)
            assert link.is_flushed
            writer.cancel()

    run(main())
    assert len(came_at) == 1000
    gaps = [later - earlier for earlier, later in pairwise(left_at)]
    assert len(left_at) <= 1 + 1000 / 10 + 1
    assert min(gaps) >= PAUSE_S * 0.999
    assert max(gaps) <= PAUSE_S * 1.2


async def test_two_steps_of_one_stream_do_not_share_a_message():
    link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))
    link.put(batch(1, 10), 0.0)
    assert list(taken(link).token) == [10]
    link.put(batch(1, 11), PAUSE_S / 4)  # waits for other engines
    link.put(batch(2, 20), PAUSE_S / 3)
    assert link.take() is None
    link.put(batch(1, 12), PAUSE_S / 2)
    assert list(taken(link).token) == [11, 20]
    assert not link.is_flushed  # the second step waits for others in turn
    await asyncio.sleep(2 * PAUSE_S)
    assert list(taken(link).token) == [12]
    assert link.is_flushed


async def test_a_joined_message_is_not_followed_by_its_own_next_step_within_it():
    link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))
    link.put(batch(1, 10), 0.0)
    assert list(taken(link).token) == [10]
    link.put(batch(1, 11), PAUSE_S / 4)
    link.put(batch(2, 20), PAUSE_S / 3)
    link.put(batch(2, 21), PAUSE_S / 2)
    assert list(taken(link).token) == [11, 20]


def test_messages_waiting_behind_another_leave_after_their_own_pause():
    left_at: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        link = GatewayLink(1, "gateway", Accounts(TokenCounts("router", 1)))
        for token in range(3):
            link.put(batch(1, token), loop.time())
            if token != 1:  # which waits: a timer is set for it, and the next step comes before
                assert list(taken(link).token) == [max(0, token - 1)]
                left_at.append(loop.time())
            await asyncio.sleep(PAUSE_S / 3)
        async with asyncio.timeout(1):
            await link.ready.wait()
        assert list(taken(link).token) == [2]
        left_at.append(loop.time())

    run(main())
    assert [later - earlier for earlier, later in pairwise(left_at)] == pytest.approx(
        [PAUSE_S * 2 / 3, PAUSE_S]
    )


async def test_a_dispatch_carries_everything_the_engine_needs():
    core = RouterCore(CoreConfig())
    core.on_gateway(1, 0.0)
    core.on_cells(["cell"], [ReplicaPlan("replica", "cell")])
    core.on_attached("replica", 7, EngineLimits(1000, 4, 256, 100, 16, adapter_slots=2), 0.0)
    submit = wire.Submit(
        handle=5,
        cell_id="cell",
        prompt=[0, 1, 127, 128, 300_000, 2**32 - 1],
        output_tokens_max=40,
        stop_token_ids=[2, 3],
        sampling=engine.Sampling(temperature=0.5, top_p=0.75, top_k=9, seed=0, logit_bias=[-100.0]),
        cache_root=b"r" * 16,
        adapter_digest="sha256:aa",
        tier_priority=4,
        ignore_eos=True,
        pinned_blocks=3,
    )
    core.submit(1, convert.request(submit), 0.0)
    [dispatch] = core.tick(0.0).dispatches["replica"]
    outbox = HostOutbox(7)
    outbox.dispatch([dispatch])
    outbox.cancel([dispatch.sequence])
    outbox.credit(32)
    credit, request, cancel = outbox.take()
    assert (credit.credit.epoch, credit.credit.frames) == (7, 32)
    assert list(cancel.cancel.sequences) == [dispatch.sequence]
    assert request.submit.epoch == 7
    [sequence] = request.submit.sequences
    assert list(sequence.prompt) == list(submit.prompt)
    assert list(sequence.stop_token_ids) == [2, 3]
    assert sequence.output_tokens_max == 40
    assert sequence.sampling == submit.sampling
    assert (sequence.priority, sequence.ignore_eos, sequence.pinned_blocks) == (4, True, 3)
    assert (sequence.cache_root, sequence.adapter_digest) == (b"r" * 16, "sha256:aa")
    assert outbox.take() == []


async def test_a_preempted_request_goes_on_behind_its_emitted_tokens():
    submit = wire.Submit(handle=5, prompt=[1, 2, 3, 300_000], output_tokens_max=40)
    submit.is_preemptible = True
    submit.resumed_tokens = 1
    request = convert.request(submit)
    assert request.output == []
    request.output += [70, 80_000]
    dispatch = Dispatch(request, ServiceAccount(TierTotals()), "replica", sequence=3, now=0.0)
    dispatch.output_max = 38
    [sequence] = convert.submit_message(1, [dispatch]).sequences
    assert list(sequence.prompt) == [1, 2, 3, 300_000, 70, 80_000]
    assert dispatch.prompt_tokens == len(sequence.prompt)
    assert sequence.resumed_tokens == 3
    assert sequence.output_tokens_max == 38


@pytest.mark.parametrize("is_new_gateway", [True, False])
@pytest.mark.parametrize("is_new_engine", [True, False])
async def test_a_prompt_goes_from_gateways_to_engines_of_two_releases(
    is_new_gateway: bool, is_new_engine: bool
):
    ids = [1, 2, 3, 300_000]
    submit = wire.Submit(handle=5, output_tokens_max=40, is_preemptible=True)
    if is_new_gateway:
        submit.prompt_ids = packed_ids(ids)
    else:
        submit.prompt.extend(ids)
    request = convert.request(submit)
    assert request.prompt_tokens == 4
    request.output += [70, 80_000]
    dispatch = Dispatch(request, ServiceAccount(TierTotals()), "replica", sequence=3, now=0.0)
    outbox = HostOutbox(7)
    outbox.reads_prompt_ids = is_new_engine
    outbox.dispatch([dispatch])
    [sequence] = outbox.take()[0].submit.sequences
    assert [*sequence.prompt, *unpacked_ids(sequence.prompt_ids)] == [*ids, 70, 80_000]
    assert is_new_engine or not sequence.prompt_ids, "the engine would not read them"


def test_an_incomplete_id_is_refused():
    with pytest.raises(ValueError, match="prompt_ids ends with 3 bytes; send 4"):
        convert.request(wire.Submit(handle=5, prompt_ids=b"1234567"))


async def test_the_core_keeps_the_known_facts_of_a_request():
    submit = wire.Submit(
        handle=5,
        request_id="r",
        cell_id="cell",
        tenant_id="tenant",
        prompt=range(BLOCK_TOKENS * 2 + 1),
        tier_priority=7,
        tier_reserved_permille=100,
        session_hash=9,
        deadline_ms=1500,
        block_hashes=b"a" * 16 + b"b" * 16,
    )
    request = convert.request(submit)
    assert (request.handle, request.request_id, request.cell_id) == (5, "r", "cell")
    assert (request.prompt_tokens, request.output_max) == (2 * BLOCK_TOKENS + 1, UNLIMITED)
    assert (request.priority, request.reserved_permille, request.weight) == (7, 100, 1)
    assert (request.session, request.deadline_s, request.output) == (9, 1.5, None)
    assert len(request.hashes) == 2
    assert request.payload is submit


@pytest.mark.parametrize("blocks", [b"a" * 15, b"a" * 17, b"a" * 32])
async def test_hashes_that_cannot_be_the_prompts_are_the_gateways_error(blocks: bytes):
    submit = wire.Submit(handle=5, prompt=range(2 * BLOCK_TOKENS - 1), block_hashes=blocks)
    with pytest.raises(ValueError, match="block hashes"):
        convert.request(submit)


async def test_a_resumed_attachment_keeps_cancels_and_drops_submits():
    request = convert.request(wire.Submit(handle=5, prompt=[1], output_tokens_max=4))
    dispatch = Dispatch(request, ServiceAccount(TierTotals()), "replica", sequence=3, now=0.0)
    outbox = HostOutbox(7)
    outbox.dispatch([dispatch])
    outbox.cancel([11])
    outbox.credit(32)
    outbox.resume(8)
    [cancel] = outbox.take()
    assert cancel.cancel.epoch == 8
    assert list(cancel.cancel.sequences) == [11]


async def test_a_conversations_next_prompt_is_sent_without_the_spans_of_the_engine():
    ids = array("I", range(2 * SPAN_TOKENS + 7))
    outbox = HostOutbox(7)
    outbox.reads_prompt_ids, outbox.sent = True, SentSpans(1000)

    def sent() -> engine.Sequence:
        submit = wire.Submit(handle=5, output_tokens_max=4, prompt_ids=packed_ids(ids))
        submit.block_hashes = chained_hashes(ids, b"r" * 16)
        submit.is_preemptible = True
        request = convert.request(submit)
        request.output += [70]
        dispatch = Dispatch(request, ServiceAccount(TierTotals()), "replica", sequence=3, now=0.0)
        outbox.dispatch([dispatch])
        [sequence] = outbox.take()[0].submit.sequences
        return sequence

    def is_whole(sequence: engine.Sequence) -> bool:
        whole = [*unpacked_ids(sequence.prompt_ids)] == [*ids, 70]
        return whole and not sequence.known_span and not sequence.known_tokens

    assert is_whole(sent())
    ids.extend(range(500))
    later = sent()
    assert [*unpacked_ids(later.prompt_ids)] == [*ids[2 * SPAN_TOKENS :], 70]
    assert later.known_span == chained_hashes(ids[: 2 * SPAN_TOKENS], b"r" * 16)[-16:]
    assert later.known_tokens == 2 * SPAN_TOKENS
    outbox.lacks_span()
    assert is_whole(sent())
    assert sent().known_tokens
    outbox.resume(8)
    assert is_whole(sent())
    outbox.sent = None  # an engine of the last release
    assert is_whole(sent())
