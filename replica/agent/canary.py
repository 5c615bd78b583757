"""The only proof of health that counts: a real inference through Triton and the step loop."""

from google.protobuf.message import DecodeError

from replica.agent.replica_state import EngineSpec
from sluice.errors import ErrorCode, FailedError
from sluice.kserve import probe

_MODEL = "llm"
_PROMPT = [1, 2, 3, 4]  # in the vocabulary of every model
_TOKENS = 1


async def llm_canary(address: str, spec: EngineSpec, timeout_s: float) -> int:
    """Let the engine at `address` generate one token, and check that it is the engine we mean.

    Returns:
        How many sequences the engine holds for routers.

    Raises:
        FailedError: No answer in time, an error, or somebody else's answer.
    """
    try:
        reply = await probe(address, _MODEL, _PROMPT, _TOKENS, timeout_s)
    except DecodeError as error:
        message = f"{address} answered the canary with something that is no frame: {error}"
        raise FailedError(ErrorCode.ENGINE_FAILED, message) from error
    if len(reply.tokens) != _TOKENS:
        message = f"the canary asked {address} for {_TOKENS} token and got {len(reply.tokens)}"
        raise FailedError(ErrorCode.ENGINE_FAILED, message)
    if (reply.engine, reply.base_digest) != (spec.engine, spec.base_digest):
        message = (
            f"{address} runs {reply.engine} with base {reply.base_digest}, wanted are "
            f"{spec.engine} and {spec.base_digest}"
        )
        raise FailedError(ErrorCode.ENGINE_FAILED, message)
    return reply.active
