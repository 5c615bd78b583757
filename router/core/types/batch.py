"""Collects the output for one gateway until the shell sends it in one message."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.wire.engine.v1 import engine_pb2 as engine
    from sluice.wire.router.v1 import router_pb2 as wire

_U32_MAX = 0xFFFFFFFF


class GatewayBatch:
    """The next message to a gateway, with token columns, placements, outcomes and cell states.

    Attributes:
        handles: Request handle of each row. A request may have several rows.
        counts: Number of tokens in each row.
        tokens: Token ids of all rows, concatenated.
        logprobs: Log probabilities of output tokens, for requests with `logprobs`, or None if there
            are none.
        prompt_logprobs: Log probabilities of prompt tokens, for requests with `prompt_logprobs`.
        sketches: Parts of cells' sketches of cached prefixes.
    """

    __slots__ = (
        *("cells", "counts", "handles", "logprobs", "outcomes", "placed", "prompt_logprobs"),
        *("sketches", "tokens"),
    )

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: engine.Logprobs | None = None
        self.prompt_logprobs: list[engine.PromptLogprobs] = []
        self.placed: list[wire.Placed] = []
        self.outcomes: list[wire.Outcome] = []
        self.cells: list[wire.CellState] = []
        self.sketches: list[wire.CellSketch] = []

    def merge(self, later: "GatewayBatch") -> None:
        """Append a later batch. In the merged message outcomes still follow all tokens."""
        self.handles += later.handles
        self.counts += later.counts
        self.tokens += later.tokens
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.MergeFrom(later.logprobs)  # appends the columns
        self.prompt_logprobs += later.prompt_logprobs
        self.placed += later.placed
        self.outcomes += later.outcomes
        self.cells += later.cells
        self.sketches += later.sketches

    @property
    def entries(self) -> int:
        """Number of tokens and of their alternatives, as a measure of the message's size."""
        tops = 0 if self.logprobs is None else len(self.logprobs.top_token)
        of_prompts = sum(len(it.logprob) + len(it.top_token) for it in self.prompt_logprobs)
        return len(self.tokens) + tops + of_prompts

    def __bool__(self) -> bool:
        """Whether the batch has any content to send."""
        return bool(
            self.handles
            or self.outcomes
            or self.placed
            or self.cells
            or self.sketches
            or self.prompt_logprobs
        )


def wire_us(seconds: float) -> int:
    """Return microseconds for a 32-bit field, at most 2^32 - 1 (71 minutes)."""
    return min(int(seconds * 1e6), _U32_MAX)
