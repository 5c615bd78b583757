"""Turns the logits of a step into its new tokens; `replica.engine.sampling` has the order.

A row that a draft leads to is chosen as if the draft were right: its history is known before the
graph has run, and if the draft is wrong, the row is not looked at. So all rows of a step, drafted
or not, are prepared and chosen together.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replica.engine.plan import ScheduledSequence, StepOutput, StepPlan
from replica.engine.sampling import NO_TOKEN, sample
from replica.engine.types import SequenceRequest

_NOT_FINITE = "the model's logits are not finite; the base, the adapter or the precision is broken"


@dataclass(slots=True)
class _Picks:
    """Tokens to choose in a step, one per sampled sequence and one per token of a draft.

    Attributes:
        owners: Index into `plan.sampled`.
        rows: Row of the logits.
        offsets: How many tokens of the draft come before it.
    """

    owners: list[int]
    rows: list[int]
    offsets: list[int]


class Sampler:
    """Chooses tokens for the plans of one engine; used by one thread, but for `check`."""

    def __init__(self, vocabulary: int, eos_ids: frozenset[int]) -> None:
        """Make a sampler for logits of `vocabulary` columns."""
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids

    def check(self, request: SequenceRequest) -> None:
        """Raise RefusedError when the request cannot be sampled here; from any thread."""

    def prepare(self, plan: StepPlan) -> None:
        """Do what needs no logits; meant to be called while the graph computes them."""

    def sample(self, logits: npt.NDArray[np.float32], plan: StepPlan) -> StepOutput:
        """Return the new tokens of a step.

        Args:
            logits: Shape (rows, vocabulary), in the order of `replica.engine.plan`; not changed.
            plan: What was computed.
        """
        picks = _picks(plan)
        sampled = plan.sampled
        parameters = [
            (sampled[owner].request.sampling, len(sampled[owner].tokens) + offset)
            for owner, offset in zip(picks.owners, picks.offsets, strict=True)
        ]
        rows = logits[: len(sampled)] if len(logits) == len(sampled) else logits[picks.rows]
        return _output(plan, sample(rows, parameters))


def _picks(plan: StepPlan) -> _Picks:
    """Return what to choose: sequences in order, a draft's tokens behind their sequence's first."""
    count = len(plan.sampled)
    if not plan.drafts and not plan.fork_of:
        return _Picks(list(range(count)), list(range(count)), [0] * count)
    picks = _Picks([], [], [])
    row = 0
    rows_of: dict[int, int] = {}
    for index in range(count):
        origin = plan.fork_of.get(index)
        length = 1 + len(plan.drafts.get(index, ()))
        rows_of[index] = rows_of[origin] if origin is not None else row
        picks.owners += [index] * length
        picks.rows += range(rows_of[index], rows_of[index] + length)
        picks.offsets += range(length)
        if origin is None:
            row += length
    return picks


def _output(plan: StepPlan, chosen: list[int]) -> StepOutput:
    """Keep of each draft what was right, and the token behind it."""
    output = StepOutput()
    at = 0
    for index, sequence in enumerate(plan.sampled):
        draft = plan.drafts.get(index, [])
        run = _verified(chosen[at : at + 1 + len(draft)], draft, sequence)
        at += 1 + len(draft)
        output.tokens.append(run[0])
        if len(run) > 1:
            output.more[index] = run[1:]
        if NO_TOKEN in run:
            output.failed[index] = _NOT_FINITE
    return output


def _verified(chosen: list[int], draft: list[int], sequence: ScheduledSequence) -> list[int]:
    """Return the leading tokens that count: up to the first that is not the draft's, or a stop."""
    count = 1
    for token, tried in zip(chosen, draft, strict=False):
        if token != tried or token in sequence.stop_ids:
            break
        count += 1
    return chosen[:count]
