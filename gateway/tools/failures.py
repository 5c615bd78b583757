"""Failures of tools, worded for models and clients, without secrets or internal addresses."""


class ToolCallError(Exception):
    """One attempt of a tool call has failed.

    Attributes:
        message: Text that the model and the client read.
        may_repeat: Whether another attempt may succeed, if the call is idempotent.
        is_fault: Whether the tool's circuit breaker counts the failure.
    """

    def __init__(self, message: str, *, may_repeat: bool = False, is_fault: bool = True) -> None:
        """Set the text and the flags."""
        super().__init__(message)
        self.message, self.may_repeat, self.is_fault = message, may_repeat, is_fault
