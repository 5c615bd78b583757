"""Computes the sums over all answers to one request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.dispatch.attempts import Attempt, AttemptPlacement
from gateway.dispatch.drafts import summed
from gateway.dispatch.generation import Generation
from sluice.wire.engine.v1 import engine_pb2 as engine


@dataclass(slots=True)
class Tally:
    """The sums over a request's answers.

    Attributes:
        prompt_tokens: Tokens of all prompts, each counted once even if it has several answers.
        cached_tokens: Prompt tokens that were found in a prefix cache.
        output_tokens: Tokens of all answers.
        placed_prompt_tokens: Tokens of the prompts that reached a replica.
        submitted_at_s: Monotonic time of the earliest submission, or 0 before any submission.
        pool_id: Pool of the first answer's last attempt.
        cell_id: Cell of the latest submission, or empty before any submission.
        router_id: Id of the router that owns that cell.
        first_at_s: Monotonic time of the first token of any answer, or 0 before the first token.
        placed: Placement of the first answer that a router has placed.
        attempts: Attempts of each answer.
        unshown_tokens: Output tokens of answers that show only their prompts.
        withheld_tokens: Output tokens that a tenant's rule withheld from the client.
        unbilled_tokens: Withheld tokens that are not charged to the tenant.
        drafts: Counts of speculated tokens, or None without speculation.
        is_predicted: Whether the client has sent an expected answer.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    placed_prompt_tokens: int = 0
    session_hash: int = 0
    prefill_us: int = 0
    submitted_at_s: float = 0.0
    pool_id: str = ""
    cell_id: str = ""
    router_id: str = ""
    first_at_s: float = 0.0
    itl_max_s: float = 0.0
    resumes: int = 0
    placed: AttemptPlacement | None = None
    attempts: Sequence[Sequence[Attempt]] = ()
    unshown_tokens: int = 0
    withheld_tokens: int = 0
    unbilled_tokens: int = 0
    drafts: engine.Drafts | None = None
    is_predicted: bool = False


def tally_of(generations: Sequence[Generation], answers_per_prompt: int = 1) -> Tally:
    """Return the sums over generations, in which answers to one prompt are adjacent."""
    if not generations:
        return Tally()
    first = generations[0]
    tally = Tally(
        session_hash=first.spec.session_hash,
        pool_id=first.spec.pool_id,
        prefill_us=first.prefill_us,
        attempts=[it.attempts for it in generations],
        is_predicted=bool(first.spec.prediction),
    )
    latest_at_s = 0.0
    for index, it in enumerate(generations):
        if it.attempts:
            first_attempt, latest = it.attempts[0], it.attempts[-1]
            if not 0 < tally.submitted_at_s <= first_attempt.submitted_at_s:
                tally.submitted_at_s = first_attempt.submitted_at_s
            if latest.submitted_at_s >= latest_at_s:
                latest_at_s = latest.submitted_at_s
                tally.cell_id, tally.router_id = latest.cell_id, latest.router_id
        if index % answers_per_prompt == 0:
            tally.prompt_tokens += len(it.spec.prompt)
            tally.cached_tokens += it.cached_tokens
            if it.placed is not None:
                tally.placed_prompt_tokens += len(it.spec.prompt)
        tally.placed = tally.placed or it.placed
        tally.output_tokens += len(it.emitted)
        tally.unshown_tokens += len(it.emitted) * it.spec.is_echo_alone
        if it.guard is not None:
            withheld = it.guard.withheld_tokens(len(it.emitted))
            tally.withheld_tokens += withheld
            tally.unbilled_tokens += withheld * it.guard.is_withheld_free
        tally.drafts = summed(tally.drafts, it.drafts)
        tally.resumes += it.resumes
        tally.itl_max_s = max(tally.itl_max_s, it.itl_max_s)
        if it.first_at_s and not 0 < tally.first_at_s <= it.first_at_s:
            tally.first_at_s = it.first_at_s
    return tally
