"""Checks the health of an embedding engine by a real embedding."""

import math

from replica.agent.replica_state import EngineSpec
from sluice.detector.replies import WrongAnswerError
from sluice.embeddings import EmbeddingClient
from sluice.profiles import EMBED

_TEXT = (1, 2, 3, 4)  # token ids that every vocabulary has
# Seconds that a probe may wait in the engine's queue, for example behind 190 texts of 256 tokens on
# one core. The limit may be long, because a dead stub is detected in other ways, and no stream of
# tokens waits for an embedding engine.
_PATIENCE_S = 10.0


class EmbedCanary:
    """A connection for probes to one embedding engine."""

    def __init__(self, address: str) -> None:
        """Create a client for the Triton at `address` (host:port). The first probe connects."""
        self._address = address
        self._client = EmbeddingClient(address, EMBED.triton_model)

    async def probe(self, spec: EngineSpec, timeout_s: float) -> int:
        """Request an embedding or a score of four tokens, and check the identity of the engine.

        The engine itself checks that an embedding has length 1, and that scores are finite.

        The deadline is at least 10 s, because an engine with a long queue is not dead.

        Returns:
            Always 0. The engine has no routers' sequences, and requests before the probe have
            ended when the probe's answer arrives.

        Raises:
            WrongAnswerError: The vector is invalid, or comes from another base.
            PlatformError: The engine did not answer in time, or answered with an error.
        """
        address = self._address
        embedding = await self._client.embed(
            _TEXT, timeout_s=max(timeout_s, _PATIENCE_S), with_digest=True
        )
        if not all(map(math.isfinite, embedding.values)):
            message = f"{address} answered the canary with a value that is no finite number"
            raise WrongAnswerError(message)
        if embedding.base_digest != spec.base_digest:
            message = (
                f"{address} embeds with base {embedding.base_digest}, wanted is {spec.base_digest}"
            )
            raise WrongAnswerError(message)
        return 0

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()
