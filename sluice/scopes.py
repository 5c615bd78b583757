"""Scopes of API keys: the closed set of permitted uses."""

from enum import StrEnum


class Scope(StrEnum):
    """A group of endpoints; a key without any scope may use them all."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"  # and back
    MODELS = "models"  # listing them; using one needs the scope of what it is used for
