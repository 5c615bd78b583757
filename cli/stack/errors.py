"""Errors that stop a stack from starting, with messages that say how to fix them."""


class StackError(RuntimeError):
    """The stack cannot start or stop; the message is one line for people."""
