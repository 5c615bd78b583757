"""The speed of one replica, learned from its frames.

The modelled duration of a step is decode_step_s, plus token_s + attention_s * (preceding tokens)
for every prompt token in the step. All three parameters follow the latest steps, so that a slower
replica or a larger batch is noticed within some steps.
"""

from statistics import median
from typing import TYPE_CHECKING

from router.core.fleet.decode_cost import DecodeCost
from sluice.wire.engine.v1 import engine_pb2 as engine

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMOOTHING = 0.1  # weight of a new sample
_TREND_SMOOTHING = 0.03  # weight of a new sample in the fit of cost over context
_STEP_S = 0.02  # assumed seconds of the prompt tokens of a full step, until the first samples
_DECODE_STEP_S = 0.01  # assumed seconds of a step without prompts, until the first samples
_SAMPLE_SHARE = 4  # only steps with at least a quarter of the budget are samples of prompt costs
_LAG_MAX_S = 1.0
# First steps with prompts, in which an engine compiles kernels. Placement learns from them, because
# a replica that is slow now should get fewer requests. Scaling does not.
_COLD_PREFILLS = 3
_CONTEXT_SPREAD_MIN = 500.0  # least standard deviation of contexts, in tokens, for a slope


class MeanSpeed:
    """The mean speed of a cell's replicas.

    Placement compares the costs of prompts at the mean speed. With individual speeds, requests
    would wait for a fast replica while a slow replica is idle.
    """

    __slots__ = ("attention_s", "token_s")

    def __init__(self, speeds: "Sequence[Speed]" = ()) -> None:
        """Set the mean speed of replicas, or zero costs without replicas."""
        count = max(1, len(speeds))
        self.token_s = sum(speed.token_s + speed.decode_step_s / speed.budget for speed in speeds)
        self.token_s /= count
        self.attention_s = sum(speed.attention_s for speed in speeds) / count

    def prefill_s(self, uncached: float, cached: float) -> float:
        """Return the prefill seconds of a prompt in full steps, without a queue."""
        return uncached * (self.token_s + self.attention_s * (cached + uncached / 2))


class Speed:
    """Step times of one replica, and the delay of its frames.

    Attributes:
        budget: Most tokens per step.
        decode_step_s: Seconds of a step without prompt tokens.
        token_s: Additional seconds per prompt token at the start of a context.
        attention_s: Additional seconds per prompt token for each preceding token.
        lag_s: Seconds from the end of a step until the engine receives the router's reply to its
            frame.
        decode_cost: Model of the decode step time for any number of sequences.
        settled_token_s: Mean seconds per prompt token without the first steps, or 0 if unknown.
    """

    __slots__ = (
        *("_contexts", "_costs", "_covariance", "_decodes", "_lags", "_prefills", "_variance"),
        *("attention_s", "budget", "decode_cost", "decode_step_s", "lag_s", "settled_token_s"),
        "token_s",
    )

    def __init__(self, budget: int) -> None:
        """Start with assumed speeds."""
        self.budget = budget
        self.decode_step_s = _DECODE_STEP_S
        self.token_s = self.assumed_token_s
        self.attention_s = 0.0
        self.lag_s = 0.0
        self.settled_token_s = 0.0
        self.decode_cost = DecodeCost()
        self._prefills = self._decodes = self._lags = 0
        self._contexts = self._costs = self._variance = self._covariance = 0.0  # moments of the fit

    def observe(self, state: engine.EngineState, context: float) -> None:
        """Update the speed with a step.

        `context` is the mean number of tokens that precede the step's prompt tokens.
        """
        step_s = state.step_us * 1e-6
        if not step_s:
            return
        prompt_tokens = state.step_prompt_tokens
        if prompt_tokens * _SAMPLE_SHARE >= self.budget:
            # Before the first decode step, the deducted `decode_step_s` is the prior. Without the
            # deduction, a replica would seem slower than its peers after its first step. Then it
            # would receive no requests that correct the estimate.
            cost_s = max(0.1 * step_s, step_s - self.decode_step_s)
            self._learn(cost_s / prompt_tokens, context)
        elif not prompt_tokens and state.running:
            self._decodes += 1
            weight = max(_SMOOTHING, 1 / self._decodes)
            self.decode_step_s += weight * (step_s - self.decode_step_s)
            self.decode_cost.observe(state.running, step_s)

    def _learn(self, cost_s: float, context: float) -> None:
        """Fit the cost per token as a linear function of the context, with decaying moments."""
        self._prefills += 1
        if (settled := self._prefills - _COLD_PREFILLS) > 0:
            weight = max(_TREND_SMOOTHING, 1 / settled)
            self.settled_token_s += weight * (cost_s - self.settled_token_s)
        weight = max(_TREND_SMOOTHING, 1 / self._prefills)
        off_context, off_cost = context - self._contexts, cost_s - self._costs
        self._contexts += weight * off_context
        self._costs += weight * off_cost
        keep = 1 - weight
        self._variance = keep * (self._variance + weight * off_context * off_context)
        self._covariance = keep * (self._covariance + weight * off_context * off_cost)
        if self._variance > _CONTEXT_SPREAD_MIN * _CONTEXT_SPREAD_MIN:
            trend_s = max(0.0, self._covariance / self._variance)
            self.attention_s = min(trend_s, self._costs / max(self._contexts, 1.0))
        self.token_s = max(self._costs - self.attention_s * self._contexts, 0.1 * self._costs)

    def observe_lag(self, lag_s: float) -> None:
        """Update the delay of frames with one measured round trip."""
        self._lags += 1
        sample_s = min(max(lag_s, 0.0), _LAG_MAX_S)
        self.lag_s += max(_SMOOTHING, 1 / self._lags) * (sample_s - self.lag_s)

    def adopt(self, peers: "Sequence[Speed]") -> None:
        """Replace a speed, learned while the replica was unhealthy, by the peers' median speed."""
        if peers:
            self.token_s = median(peer.token_s for peer in peers)
            self.attention_s = median(peer.attention_s for peer in peers)
            self.decode_step_s = median(peer.decode_step_s for peer in peers)
            self._costs = median(peer.token_mean_s for peer in peers)
        self.settled_token_s = 0.0
        self._prefills = self._decodes = 0
        self._contexts = self._variance = self._covariance = 0.0

    @property
    def assumed_token_s(self) -> float:
        """Seconds per prompt token that are assumed before any measurement."""
        return _STEP_S / self.budget

    @property
    def token_mean_s(self) -> float:
        """Mean seconds per prompt token at the usual context lengths."""
        return max(self._costs, self.token_s)

    def prompt_work_s(self, uncached: float, cached: float) -> float:
        """Return the seconds that the prefill of a prompt adds to steps."""
        return uncached * (self.token_s + self.attention_s * (cached + uncached / 2))

    def prefill_s(self, uncached: float, cached: float) -> float:
        """Return the prefill seconds of a prompt in full steps, without a queue."""
        return self.prompt_work_s(uncached, cached) + uncached / self.budget * self.decode_step_s

    def full_step_s(self) -> float:
        """Return the seconds of a step full of prompt tokens, at the usual context lengths."""
        return self.decode_step_s + self.budget * self.token_mean_s
