"""Whether a request may wait at all; refused here it was never queued."""

from router.core.cell_book import CellBook
from router.core.model import CoreConfig
from router.core.outcomes import Ending
from sluice.errors import ErrorCode
from sluice.wire.router.v1 import router_pb2 as wire

DRAINING_RETRY_S = 0.5
_RELOCATION_S = 1.0  # a cell without owner here: about the time until one is assigned


def rejection(
    submit: wire.Submit, cell: CellBook | None, config: CoreConfig, *, router_is_draining: bool
) -> Ending | None:
    """Return why a request is refused, with an honest time to try again, or None."""
    rejected = wire.OUTCOME_KIND_REJECTED
    if router_is_draining:
        message = "this router is shutting down; try again"
        return Ending(rejected, ErrorCode.DRAINING, message, retry_after_s=DRAINING_RETRY_S)
    if cell is None or not cell.is_owned:
        message = f"this router does not own cell {submit.cell_id}; try again"
        return Ending(rejected, ErrorCode.NO_CAPACITY, message, retry_after_s=_RELOCATION_S)
    prompt = len(submit.prompt)
    longest = cell.prompt_tokens_max
    if longest is not None and prompt > longest:
        message = f"the prompt has {prompt} tokens, {longest} fit; shorten it"
        return Ending(rejected, ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
    queue = cell.queue
    full = queue.requests >= config.queue_requests_max
    if full or queue.tokens + prompt > config.queue_tokens_max:
        message = f"{queue.requests} requests wait for this model; try again later"
        wait_s = cell.retry_after_s()
        return Ending(rejected, ErrorCode.QUEUE_FULL, message, retry_after_s=wait_s)
    return None
