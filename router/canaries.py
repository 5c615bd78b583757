"""Sends canary prompts to replicas, whose answers reveal an engine that computes wrongly.

The canary prompt of a base can be continued in many ways, so that its answer depends on every layer
of the model. Some tokens are almost equally probable, so the answers of healthy engines may
diverge. Their log probabilities show whether a divergence is harmless. For an engine without log
probabilities the prompt consists of fixed token ids, whose answers reveal less.
"""

from secrets import token_bytes

from router.core.types.canary import CanaryAnswer
from router.fleet import Target
from sluice.detector.consensus import Text
from sluice.hashing import HASH_BYTES
from sluice.kserve import probe
from sluice.watch import ControlState

# Token ids that are in the vocabulary of every model.
FIXED_PROMPT = tuple(range(1, 13))
CANARY_TOKENS = 16


class CanaryAsker:
    """Sends each replica the canary prompt of its base."""

    def __init__(self, state: ControlState) -> None:
        """Create an asker from `state`, which has the canary prompts of all bases."""
        self._state = state
        self._plain: set[str] = set()  # bases whose engines return no log probabilities

    async def ask(self, target: Target, timeout_s: float) -> CanaryAnswer:
        """Return a replica's answer to its canary prompt.

        Raises:
            FailedError: The replica did not answer within `timeout_s`.
        """
        prompt = self._prompt(target)
        reply = await probe(
            target.address,
            target.model,
            prompt,
            CANARY_TOKENS,
            timeout_s,
            cache_root=token_bytes(HASH_BYTES),  # a random root, so that no block is cached
            wants_logprobs=True,
        )
        if reply.tokens and not reply.logprobs:
            self._plain.add(target.base_digest)
        text = Text(tuple(reply.tokens), tuple(reply.logprobs))
        return CanaryAnswer(text, hash((prompt, bool(reply.logprobs))))

    def _prompt(self, target: Target) -> tuple[int, ...]:
        base = self._state.bases.get(target.base_digest)
        if base is None or base.digest in self._plain:
            return FIXED_PROMPT
        return tuple(base.canary_token_ids) or FIXED_PROMPT
