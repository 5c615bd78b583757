"""Turns the output of a computed step into events, and appends the new tokens to the sequences.

Most sequences have one new token and nothing else. So the common step is one pass over two columns.
Runs of several tokens (accepted drafts), failures and logprobs cost time only in steps with them.
"""

from collections.abc import Iterable, Mapping

from replica.engine.plan import ScheduledSequence, StepOutput
from replica.engine.types import Finish, PromptLogprobs, StepEvents

Ended = list[tuple[ScheduledSequence, Finish]]
Runs = list[tuple[ScheduledSequence, int]]


def emit(
    sampled: list[ScheduledSequence], output: StepOutput, events: StepEvents
) -> tuple[Ended, Runs]:
    """Append the new tokens to their sequences and to `events`. This is the hot loop of an engine.

    A sequence emits no token after a stop token or after its last requested token. A failed
    sequence emits no token.

    Returns:
        The sequences that have ended. Also pairs of a sequence and the number of its additional
        tokens, for sequences with more than one new token.
    """
    if output.failed:
        sampled, output = _without_failed(sampled, output)
    tokens = output.tokens
    assert len(sampled) == len(tokens), (len(sampled), len(tokens))
    ended: Ended = []
    for sequence, token in zip(sampled, tokens, strict=True):
        own = sequence.tokens
        own.append(token)
        if token in sequence.stop_ids:
            ended.append((sequence, Finish.STOP))
        elif len(own) >= sequence.tokens_max:
            ended.append((sequence, Finish.LENGTH))
    keys = [sequence.request.key for sequence in sampled]
    runs: dict[int, int] = {}
    if output.more:
        runs = _extend(sampled, output.more, ended)
        keys, tokens = _with_runs(keys, tokens, output.more, runs)
        events.has_runs = bool(runs)
    events.keys += keys
    events.tokens += tokens
    for index in sorted(output.logprobs):
        events.logprobs += output.logprobs[index][: 1 + runs.get(index, 0)]
    return ended, [(sampled[index], count) for index, count in runs.items()]


def report_prompts(
    parts: Iterable[PromptLogprobs], living: Mapping[int, ScheduledSequence], events: StepEvents
) -> None:
    """Report each prompt position's logprobs once, even if a preempted prompt is recomputed."""
    for part in parts:
        sequence = living[part.key]
        first = max(part.first, sequence.scored)
        end = min(part.first + len(part.tokens), sequence.prompt_tokens)
        if first < end:
            assert first == sequence.scored, (part.key, part.first, sequence.scored)
            tokens = part.tokens[first - part.first : end - part.first]
            if sequence.request.scored_tokens:
                sequence.score(tokens)
            else:
                events.prompt_logprobs.append(PromptLogprobs(part.key, first, tokens))
            sequence.scored = end


def _extend(
    sampled: list[ScheduledSequence], more: Mapping[int, list[int]], ended: Ended
) -> dict[int, int]:
    """Append the additional tokens of sequences, and return index -> number of such tokens."""
    runs: dict[int, int] = {}
    for index in sorted(more):
        sequence = sampled[index]
        reason = _end_of(sequence)
        if reason is not None:
            continue
        count = 0
        for token in more[index]:
            sequence.tokens.append(token)
            count += 1
            reason = _end_of(sequence)
            if reason is not None:
                ended.append((sequence, reason))
                break
        if count:
            runs[index] = count
    return runs


def _end_of(sequence: ScheduledSequence) -> Finish | None:
    if sequence.tokens[-1] in sequence.stop_ids:
        return Finish.STOP
    return Finish.LENGTH if len(sequence.tokens) >= sequence.tokens_max else None


def _with_runs(
    keys: list[int], tokens: list[int], more: Mapping[int, list[int]], runs: Mapping[int, int]
) -> tuple[list[int], list[int]]:
    """Return the columns of keys and tokens, with additional tokens after each first token."""
    all_keys: list[int] = []
    all_tokens: list[int] = []
    done = 0
    for index, count in runs.items():
        end = index + 1
        all_keys += keys[done:end] + [keys[index]] * count
        all_tokens += tokens[done:end] + more[index][:count]
        done = end
    return all_keys + keys[done:], all_tokens + tokens[done:]


def _without_failed(
    sampled: list[ScheduledSequence], output: StepOutput
) -> tuple[list[ScheduledSequence], StepOutput]:
    """Return the sampled sequences that did not fail, and the output for these sequences."""
    kept = [index for index in range(len(sampled)) if index not in output.failed]
    new_index = {index: position for position, index in enumerate(kept)}
    return [sampled[index] for index in kept], StepOutput(
        tokens=[output.tokens[index] for index in kept],
        more={new_index[i]: tokens for i, tokens in output.more.items() if i in new_index},
        logprobs={new_index[i]: part for i, part in output.logprobs.items() if i in new_index},
    )
