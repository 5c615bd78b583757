import pytest

from replica.engine.emission import emit, report_prompts
from replica.engine.plan import ScheduledSequence, StepOutput
from replica.engine.types import (
    Finish,
    PromptLogprobs,
    SequenceRequest,
    StepEvents,
    TokenLogprobs,
)

STOP = 9


def sequence(key: int, count: int = 10, prompt: int = 2) -> ScheduledSequence:
    request = SequenceRequest(key, [1] * prompt, count)
    return ScheduledSequence(request, key, b"", frozenset({STOP}))


def entries(key: int, count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(key, -float(index)) for index in range(count)]


def test_runs_stand_together_and_end_at_a_stop_token_or_the_last_token() -> None:
    sampled = [sequence(1), sequence(2), sequence(3, 3), sequence(4), sequence(5)]
    output = StepOutput(
        tokens=[10, 20, 30, STOP, 50],
        more={1: [21, STOP, 22], 2: [31, 32, 33, 34], 3: [41], 4: [51]},
        logprobs={index: entries(index + 1, 6) for index in (4, 2, 1, 3)},
    )
    events = StepEvents()
    ended, runs = emit(sampled, output, events)
    assert events.keys == [1, 2, 2, 2, 3, 3, 3, 4, 5, 5]
    assert events.tokens == [10, 20, 21, STOP, 30, 31, 32, STOP, 50, 51]
    assert events.has_runs
    assert [entry.key for entry in events.logprobs] == [2, 2, 2, 3, 3, 3, 4, 5, 5]
    assert {s.request.key: reason for s, reason in ended} == {
        2: Finish.STOP,
        3: Finish.LENGTH,
        4: Finish.STOP,
    }
    assert {s.request.key: count for s, count in runs} == {2: 2, 3: 2, 5: 1}
    assert [s.tokens[2:].tolist() for s in sampled] == [
        [10],
        [20, 21, 9],
        [30, 31, 32],
        [9],
        [50, 51],
    ]


def test_failed_sequences_emit_nothing_and_others_keep_their_extras() -> None:
    sampled = [sequence(key) for key in (1, 2, 3)]
    output = StepOutput(
        tokens=[10, 20, 30],
        more={0: [11], 2: [31]},
        logprobs={0: entries(1, 2), 2: entries(3, 2)},
        failed={0: "stuck"},
    )
    events = StepEvents()
    assert emit(sampled, output, events) == ([], [(sampled[2], 1)])
    assert (events.keys, events.tokens) == ([2, 3, 3], [20, 30, 31])
    assert [entry.key for entry in events.logprobs] == [3, 3]
    assert sampled[0].output_tokens == 0


def test_steps_without_runs_say_so() -> None:
    events = StepEvents()
    emit([sequence(1)], StepOutput(tokens=[STOP], more={0: [3]}), events)
    assert not events.has_runs
    assert events.tokens == [STOP]


def part(first: int, count: int) -> PromptLogprobs:
    values = [TokenLogprobs(1, -float(position)) for position in range(first, first + count)]
    return PromptLogprobs(1, first, tuple(values))


@pytest.mark.parametrize(
    ("parts", "reported"),
    [
        ([part(1, 4), part(5, 5)], [(1, 4), (5, 5)]),
        # the sequence was preempted between the first two parts
        ([part(1, 6), part(1, 6), part(7, 3)], [(1, 6), (7, 3)]),
        ([part(1, 6), part(1, 9)], [(1, 6), (7, 3)]),
        ([part(1, 9), part(6, 8)], [(1, 9)]),  # the part after the first token has no prompt tokens
        ([part(1, 30)], [(1, 9)]),
    ],
)
def test_each_prompt_token_is_reported_once(parts, reported) -> None:
    events = StepEvents()
    report_prompts(parts, {1: sequence(1, prompt=10)}, events)
    found = [(p.first, len(p.tokens)) for p in events.prompt_logprobs]
    assert found == reported
    values = [entry.logprob for p in events.prompt_logprobs for entry in p.tokens]
    assert values == [-float(position) for position in range(1, 10)]
