"""Checks the engine, the base and the token count of one reply, without a comparison."""

from collections.abc import Sequence

from sluice.errors import ErrorCode, FailedError


class WrongAnswerError(FailedError):
    """Raised for an engine that answered in time but wrongly, so that waiting longer is useless."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.ENGINE_FAILED, message)


def check_engine(address: str, found: tuple[str, str], wanted: tuple[str, str]) -> None:
    """Check the (engine, base digest) of a reply.

    Raises:
        WrongAnswerError: Another engine, or another base, answered.
    """
    if found != wanted:
        message = (
            f"{address} runs {found[0]} with base {found[1]}, wanted are {wanted[0]} and"
            f" {wanted[1]}"
        )
        raise WrongAnswerError(message)


def check_count(address: str, tokens: Sequence[int], wanted: int) -> None:
    """Check that a reply has the requested number of tokens.

    Raises:
        WrongAnswerError: The number of tokens is wrong.
    """
    if len(tokens) != wanted:
        message = f"the canary asked {address} for {wanted} token and got {len(tokens)}"
        raise WrongAnswerError(message)
