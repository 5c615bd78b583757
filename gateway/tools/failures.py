"""Failures of tools, in words for models and clients: without secrets and inner addresses."""


class ToolCallError(Exception):
    """The attempt of a call has failed.

    Attributes:
        message: Text for the model and the client.
        may_repeat: Whether another attempt may help, if the call is idempotent.
        is_fault: Whether the tool's breaker counts the failure.
    """

    def __init__(self, message: str, *, may_repeat: bool = False, is_fault: bool = True) -> None:
        """Take text and flags."""
        super().__init__(message)
        self.message, self.may_repeat, self.is_fault = message, may_repeat, is_fault
