"""Log probabilities reach who asked for them: each once, beside its token."""

import pytest

from router.core.types.batch import GatewayBatch
from sluice.wire.engine.v1 import engine_pb2 as engine

STOP = engine.FINISH_REASON_STOP
NAME = "replica-0"


def told(batch: GatewayBatch) -> dict[int, list[tuple[int, float, dict[int, float]]]]:
    """Return, by handle, (token, logprob, alternatives) of those who have log probabilities."""
    columns = batch.logprobs
    if columns is None:
        return {}
    tokens: dict[int, list[int]] = {}
    start = 0
    for handle, count in zip(batch.handles, batch.counts, strict=True):
        tokens.setdefault(handle, []).extend(batch.tokens[start : start + count])
        start += count
    rows: dict[int, list[tuple[int, float, dict[int, float]]]] = {}
    start = 0
    for handle, logprob, count in zip(
        columns.sequence, columns.logprob, columns.top_count, strict=True
    ):
        tops = slice(start, start + count)
        start += count
        own = rows.setdefault(handle, [])
        top = dict(zip(columns.top_token[tops], columns.top_logprob[tops], strict=True))
        own.append((tokens[handle][len(own)], logprob, top))
    assert start == len(columns.top_token) == len(columns.top_logprob)
    assert all(len(own) == len(tokens[handle]) for handle, own in rows.items())
    return rows


def row(token: int) -> tuple[int, float, dict[int, float]]:
    """Return what an engine says of a token; each token has values of its own."""
    return token, -token / 8, {token: -token / 8, token + 1: -token / 4}


def rows(dispatch, *tokens: int):
    return [(dispatch, *row(token)[1:]) for token in tokens]


def test_only_requests_with_logprobs_get_them_and_each_gateway_its_own(bench):
    world = bench(replicas=1)
    world.core.on_gateway(2, world.now)
    asked, silent, elsewhere = world.submit(), world.submit(), world.submit(gateway=2)
    a, b, c = (world.dispatch(handle) for handle in (asked, silent, elsewhere))
    world.frame(
        NAME,
        tokens={a: [1, 2], b: [3], c: [4]},
        logprobs=[*rows(a, 1), *rows(c, 4), *rows(a, 2)],
    )
    world.frame(NAME, tokens={a: [5], b: [6]}, logprobs=rows(a, 5))
    assert told(world.batch()) == {asked: [row(1), row(2), row(5)]}
    assert told(world.batch(2)) == {elsewhere: [row(4)]}
    assert world.batch().tokens == [1, 2, 3, 5, 6]


def test_without_any_the_batch_has_none(bench):
    world = bench(replicas=1)
    dispatch = world.dispatch(world.submit())
    world.frame(NAME, tokens={dispatch: [1]})
    assert world.batch().logprobs is None


def test_no_logprobs_are_sent_for_an_ended_request(bench):
    world = bench(replicas=1)
    ended, lives = world.submit(), world.submit()
    a, b = world.dispatch(ended), world.dispatch(lives)
    world.core.cancel(1, ended)
    world.frame(NAME, tokens={a: [1], b: [2]}, logprobs=[*rows(a, 1), *rows(b, 2)])
    assert told(world.batch()) == {lives: [row(2)]}


def resumed(dispatch, *tokens: int) -> engine.Resumed:
    entry = engine.Resumed(sequence=dispatch.sequence, output=tokens)
    for token in tokens:
        _, logprob, top = row(token)
        entry.logprobs.sequence.append(dispatch.sequence)
        entry.logprobs.logprob.append(logprob)
        entry.logprobs.top_count.append(len(top))
        entry.logprobs.top_token.extend(top)
        entry.logprobs.top_logprob.extend(top.values())
    return entry


def test_a_resumed_attachment_sends_the_logprobs_of_missed_tokens(bench):
    world = bench(replicas=1)
    missed, complete, silent = (world.submit() for _ in range(3))
    a, b, c = (world.dispatch(handle) for handle in (missed, complete, silent))
    world.frame(NAME, tokens={a: [1], b: [2, 3], c: [4]}, logprobs=[*rows(a, 1), *rows(b, 2, 3)])
    world.core.on_broken(NAME, 1)
    entries = [
        resumed(a, 1, 10, 11),
        resumed(b, 2, 3),
        engine.Resumed(sequence=c.sequence, output=[4, 5]),
    ]
    world.core.on_resumed(NAME, 1, 2, entries, world.now)
    world.frame(NAME, epoch=2, tokens={a: [12], b: [20]}, logprobs=[*rows(a, 12), *rows(b, 20)])
    assert told(world.batch()) == {
        missed: [row(1), row(10), row(11), row(12)],
        complete: [row(2), row(3), row(20)],
    }
    assert world.batch().tokens == [1, 2, 3, 4, 10, 11, 5, 12, 20]


def test_a_resumed_sequence_has_them_of_all_its_tokens_or_of_none(bench):
    world = bench(replicas=1)
    dispatch = world.dispatch(world.submit())
    world.frame(NAME, tokens={dispatch: [1]}, logprobs=rows(dispatch, 1))
    world.core.on_broken(NAME, 1)
    entry = resumed(dispatch, 1)
    entry.output.append(2)
    with pytest.raises(ValueError, match="some of its tokens"):
        world.core.on_resumed(NAME, 1, 2, [entry], world.now)


def test_they_go_on_behind_a_preemption(bench):
    world = bench(replicas=1, sequences=1, deadline_default_s=30.0)
    batch = world.submit(is_preemptible=True, output=50)
    dispatch = world.dispatch(batch)
    state = engine.EngineState(running=1, step_us=20_000)
    for token in range(10):
        world.now += 0.02
        world.frame(NAME, tokens={dispatch: [token]}, logprobs=rows(dispatch, token), state=state)
    urgent = world.submit(priority=9, deadline_s=0.3)
    assert world.cancelled[NAME] == [dispatch.sequence]
    world.frame(
        NAME,
        tokens={dispatch: [99]},
        logprobs=rows(dispatch, 99),
        finished={dispatch: engine.FINISH_REASON_CANCELLED},
    )
    fast = world.dispatch(urgent)
    world.frame(NAME, tokens={fast: [7]}, finished={fast: STOP})
    again = world.dispatch(batch)
    world.frame(NAME, tokens={again: [11]}, logprobs=rows(again, 11), finished={again: STOP})
    assert told(world.batch()) == {batch: [*map(row, range(10)), row(11)]}, "not of what was cut"


def _more_rows(message: engine.Logprobs) -> None:
    message.logprob.append(-1.0)


def _fewer_rows(message: engine.Logprobs) -> None:
    del message.sequence[-1], message.logprob[-1], message.top_count[-1]


def _fewer_alternatives(message: engine.Logprobs) -> None:
    del message.top_logprob[-1]


def _endless_alternatives(message: engine.Logprobs) -> None:
    message.top_count[0] = 4_000_000_000


def _of_one_token_twice(message: engine.Logprobs) -> None:
    message.MergeFrom(message.__deepcopy__())


def _of_a_stranger(message: engine.Logprobs) -> None:
    message.sequence[0] += 1000


@pytest.mark.parametrize(
    "spoil",
    [
        _more_rows,
        _fewer_rows,
        _fewer_alternatives,
        _endless_alternatives,
        _of_one_token_twice,
        _of_a_stranger,
    ],
)
def test_columns_that_do_not_agree_are_an_error_and_tell_nothing(bench, spoil):
    world = bench(replicas=1)
    dispatch = world.dispatch(world.submit())
    frame = engine.StepFrame(step=1, steps=1, sequence=[dispatch.sequence], count=[2], token=[1, 2])
    frame.logprobs.CopyFrom(resumed(dispatch, 1, 2).logprobs)
    spoil(frame.logprobs)
    with pytest.raises(ValueError, match="log probabilities"):
        world.core.on_frame(NAME, 1, frame, world.now)
    world.tick()
    assert not world.batch().tokens
    assert world.batch().logprobs is None
