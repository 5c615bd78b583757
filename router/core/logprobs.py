"""Copies log probabilities from engines' frames to the batches of gateways."""

from collections import Counter
from collections.abc import Iterable
from itertools import repeat

from router.core.fleet.replica import ReplicaBook
from sluice.wire.engine.v1 import engine_pb2 as engine


def check(frame: engine.StepFrame) -> None:
    """Check that a frame has log probabilities of all tokens of a sequence, or of no token.

    Raises:
        ValueError: Only some tokens have log probabilities, or the columns do not agree.
    """
    columns = frame.logprobs
    _check_columns(columns)
    tokens: Counter[int] = Counter()
    for sequence, number in zip(frame.sequence, frame.count, strict=True):
        tokens[sequence] += number
    for sequence, number in Counter(columns.sequence).items():
        if tokens[sequence] != number:
            raise ValueError(f"log probabilities of {number} tokens, there are {tokens[sequence]}")


def file(book: ReplicaBook, columns: engine.Logprobs) -> None:
    """Append the log probabilities of a checked frame to the batches of the gateways."""
    dispatches = book.dispatches
    top_tokens, top_logprobs = columns.top_token[:], columns.top_logprob[:]
    start = 0
    rows = zip(columns.sequence[:], columns.logprob[:], columns.top_count[:], strict=True)
    for sequence, logprob, top_count in rows:
        end = start + top_count
        dispatch = dispatches.get(sequence)
        if dispatch is not None and dispatch.is_open:
            batch = dispatch.gateway.batch
            told = batch.logprobs
            if told is None:
                told = batch.logprobs = engine.Logprobs()
            told.sequence.append(dispatch.handle)
            told.logprob.append(logprob)
            told.top_count.append(top_count)
            if top_count:
                told.top_token.extend(top_tokens[start:end])
                told.top_logprob.extend(top_logprobs[start:end])
        start = end


def file_prompts(book: ReplicaBook, parts: Iterable[engine.PromptLogprobs]) -> None:
    """Append log probabilities of prompt tokens to the batches of their requests' gateways.

    Raises:
        ValueError: The columns do not agree.
    """
    for part in parts:
        rows, tops = len(part.logprob), len(part.top_token)
        agree = len(part.top_count) == rows and len(part.top_logprob) == tops
        if not agree or sum(part.top_count) != tops or not part.first:
            raise ValueError("the columns of a prompt's log probabilities do not agree")
        dispatch = book.dispatches.get(part.sequence)
        if dispatch is not None and dispatch.is_open:
            told = engine.PromptLogprobs()
            told.CopyFrom(part)
            told.sequence = dispatch.handle
            dispatch.gateway.batch.prompt_logprobs.append(told)


def missed(entry: engine.Resumed, known: int) -> engine.Logprobs:
    """Return the log probabilities of a resumed sequence without its first `known` tokens.

    Raises:
        ValueError: Some tokens have no log probabilities, or the columns do not agree.
    """
    columns = entry.logprobs
    _check_columns(columns)
    if len(columns.logprob) != len(entry.output):
        raise ValueError("a resumed sequence has log probabilities of some of its tokens only")
    first = sum(columns.top_count[:known])
    return engine.Logprobs(
        sequence=repeat(entry.sequence, len(entry.output) - known),
        logprob=columns.logprob[known:],
        top_count=columns.top_count[known:],
        top_token=columns.top_token[first:],
        top_logprob=columns.top_logprob[first:],
    )


def _check_columns(columns: engine.Logprobs) -> None:
    rows, tops = len(columns.logprob), len(columns.top_token)
    if (
        len(columns.sequence) != rows
        or len(columns.top_count) != rows
        or len(columns.top_logprob) != tops
        or sum(columns.top_count) != tops
    ):
        raise ValueError("the columns of log probabilities do not agree")
