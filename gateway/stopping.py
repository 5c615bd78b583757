"""The error for new requests to a process that stops, and for requests that its stop ends."""

from sluice.errors import ErrorCode, RejectedError

STOPPING_TEXT = "This server is stopping; try again, another one will answer."
STOPPING_RETRY_S = 1.0


def stopping() -> RejectedError:
    """Return the refusal of a request because the process is stopping."""
    return RejectedError(ErrorCode.DRAINING, STOPPING_TEXT, retry_after_s=STOPPING_RETRY_S)
