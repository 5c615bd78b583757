"""Errors that stop a stack from starting, in words that name the fix."""


class StackError(RuntimeError):
    """The stack cannot start or stop; the message is one line for people."""
