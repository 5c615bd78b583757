"""Asks replicas canaries: a prompt whose answer shows an engine that computes wrong.

A prompt of the base, which a model may continue in many ways, depends on every layer. Equally
probable tokens make its answers fork between sound engines, and log probabilities tell these forks.
So an engine without log probabilities is asked a prompt of fixed ids, whose answers say less.
"""

from secrets import token_bytes

from router.core.types.canary import CanaryAnswer
from router.fleet import Target
from sluice.detector.consensus import Text
from sluice.hashing import HASH_BYTES
from sluice.kserve import probe
from sluice.watch import ControlState

# In the vocabulary of every model.
FIXED_PROMPT = tuple(range(1, 13))
CANARY_TOKENS = 16


class CanaryAsker:
    """Asks replicas, each by the prompt of its base."""

    def __init__(self, state: ControlState) -> None:
        """Take the state that has the prompts of bases."""
        self._state = state
        self._plain: set[str] = set()  # bases whose engines tell no log probabilities

    async def ask(self, target: Target, timeout_s: float) -> CanaryAnswer:
        """Return the answer of a replica; FailedError: it did not answer within the time-out."""
        prompt = self._prompt(target)
        reply = await probe(
            target.address,
            target.model,
            prompt,
            CANARY_TOKENS,
            timeout_s,
            cache_root=token_bytes(HASH_BYTES),  # of no cache: everything is computed anew
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
