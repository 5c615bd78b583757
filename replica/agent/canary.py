"""The only proof of health that counts: a real inference through Triton and the step loop."""

from google.protobuf.message import DecodeError

from replica.agent.replica_state import EngineSpec
from sluice.detector.replies import WrongAnswerError, check_count, check_engine
from sluice.kserve import probe

_MODEL = "llm"
_PROMPT = [1, 2, 3, 4]  # in the vocabulary of every model
_TOKENS = 1


async def llm_canary(address: str, spec: EngineSpec, timeout_s: float) -> int:
    """Let the engine at `address` generate one token, and check that it is the engine we mean.

    Returns:
        How many sequences the engine holds for routers.

    Raises:
        WrongAnswerError: An answer that is none, or of another engine or base.
        FailedError: No answer in time, or an error.
    """
    try:
        reply = await probe(address, _MODEL, _PROMPT, _TOKENS, timeout_s)
    except DecodeError as error:
        message = f"{address} answered the canary with something that is no frame: {error}"
        raise WrongAnswerError(message) from error
    check_count(address, reply.tokens, _TOKENS)
    check_engine(address, (reply.engine, reply.base_digest), (spec.engine, spec.base_digest))
    return reply.active
