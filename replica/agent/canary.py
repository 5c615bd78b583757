"""Checks an engine's health by a real inference through Triton and the step loop."""

from google.protobuf.message import DecodeError

from replica.agent.replica_state import EngineSpec
from sluice.channels import RenewedChannel
from sluice.detector.replies import WrongAnswerError, check_count, check_engine
from sluice.identity import CertificateRole
from sluice.kserve import CHANNEL_OPTIONS, probe

_MODEL = "llm"
_PROMPT = [1, 2, 3, 4]  # token ids that every vocabulary has
_TOKENS = 1


class LlmCanary:
    """A connection for probes to one engine that generates text."""

    def __init__(self, address: str) -> None:
        """Create a client for the Triton at `address` (host:port). The first probe connects."""
        self._address = address
        self._link = RenewedChannel(address, CertificateRole.ENGINE, options=CHANNEL_OPTIONS)

    async def probe(self, spec: EngineSpec, timeout_s: float) -> int:
        """Request one token from the engine, and check the identity of the engine.

        Returns:
            Number of routers' sequences in the engine.

        Raises:
            WrongAnswerError: The answer is invalid, or comes from another engine or base.
            FailedError: The engine did not answer in time, or answered with an error.
        """
        address = self._address
        channel = await self._link.current()
        try:
            reply = await probe(address, _MODEL, _PROMPT, _TOKENS, timeout_s, channel=channel)
        except DecodeError as error:
            message = f"{address} answered the canary with an invalid frame: {error}"
            raise WrongAnswerError(message) from error
        check_count(address, reply.tokens, _TOKENS)
        check_engine(address, (reply.engine, reply.base_digest), (spec.engine, spec.base_digest))
        return reply.active

    async def close(self) -> None:
        """Close the connection."""
        await self._link.aclose()
