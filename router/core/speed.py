"""How fast one replica is, learned from its frames.

A step is taken as decode_step_s + token_s * (prompt tokens in it); both follow what the last steps
took, so that a replica that slows down, or whose batch grows, is seen within some steps.
"""

from collections.abc import Sequence
from statistics import median

from sluice.wire.engine.v1 import engine_pb2 as engine

_SMOOTHING = 0.1  # weight of a new sample
_STEP_S = 0.02  # of a full step, until the first samples
_DECODE_STEP_S = 0.01
_SAMPLE_SHARE = 4  # steps with less than this part of the budget say little
_LAG_MAX_S = 1.0
# Attention makes a prompt token dearer by its context: twice as dear at so many tokens before it.
ATTENTION_TOKENS = 4e5


class Speed:
    """Step times of one replica, and how old what we know of it is."""

    __slots__ = ("_decodes", "_lags", "_prefills", "decode_step_s", "lag_s", "token_s")

    def __init__(self, budget: int) -> None:
        self.decode_step_s = _DECODE_STEP_S  # a step without prompt tokens
        self.token_s = _STEP_S / budget  # per prompt token, on top
        self.lag_s = 0.0  # from the end of a step to its frame here, and back to the engine
        self._prefills = self._decodes = self._lags = 0

    def observe(self, state: engine.EngineState, budget: int) -> None:
        """Learn from the last step."""
        step_s = state.step_us * 1e-6
        if not step_s:
            return
        prompt_tokens = state.step_prompt_tokens
        if prompt_tokens * _SAMPLE_SHARE >= budget:
            # Before the first decode the prior stands in: without it a replica's first step would
            # make it look slower than its peers, and nothing would be sent there to correct that.
            self._prefills += 1
            sample_s = max(0.1 * step_s, step_s - self.decode_step_s) / prompt_tokens
            self.token_s += max(_SMOOTHING, 1 / self._prefills) * (sample_s - self.token_s)
        elif not prompt_tokens and state.running:
            self._decodes += 1
            weight = max(_SMOOTHING, 1 / self._decodes)
            self.decode_step_s += weight * (step_s - self.decode_step_s)

    def observe_lag(self, lag_s: float) -> None:
        """Learn from one round trip how old the knowledge in a frame is."""
        self._lags += 1
        sample_s = min(max(lag_s, 0.0), _LAG_MAX_S)
        self.lag_s += max(_SMOOTHING, 1 / self._lags) * (sample_s - self.lag_s)

    def adopt(self, peers: Sequence["Speed"]) -> None:
        """Take over what is usual among peers: what was learned in bad times tells nothing now."""
        if peers:
            self.token_s = median(peer.token_s for peer in peers)
            self.decode_step_s = median(peer.decode_step_s for peer in peers)
        self._prefills = self._decodes = 0

    def full_step_s(self, budget: int) -> float:
        """Return the duration of a step whose token budget is used up."""
        return self.decode_step_s + self.token_s * budget

    def prefill_s(self, uncached: int, cached: int, budget: int) -> float:
        """Return the time that a prompt takes in full steps, without a queue."""
        per_token_s = self.token_s + self.decode_step_s / budget
        return uncached * per_token_s * (1 + (2 * cached + uncached) / ATTENTION_TOKENS)
