"""Errors that prevent the start of a stack, with messages that contain the correction."""


class StackError(RuntimeError):
    """The stack cannot start or stop. The message is one line for people."""
