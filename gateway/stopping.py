"""The error for requests to a process that is stopping, and for requests that it interrupts."""

from sluice.errors import ErrorCode, RejectedError

STOPPING_TEXT = "This server is stopping; try again, another one will answer."
STOPPING_RETRY_S = 1.0


def stopping() -> RejectedError:
    """Return the refusal of a request because the process is stopping."""
    return RejectedError(ErrorCode.DRAINING, STOPPING_TEXT, retry_after_s=STOPPING_RETRY_S)
