"""Failures of tools, in words that models and clients are shown: no secret, no inner address."""


class ToolCallError(Exception):
    """The attempt of a call has failed.

    Attributes:
        message: For the model and the client.
        may_repeat: Whether another attempt may help, if the call is idempotent.
        is_fault: Whether it speaks against the tool, for its breaker.
    """

    def __init__(self, message: str, *, may_repeat: bool = False, is_fault: bool = True) -> None:
        """Take the words."""
        super().__init__(message)
        self.message, self.may_repeat, self.is_fault = message, may_repeat, is_fault
