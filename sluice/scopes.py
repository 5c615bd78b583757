"""Scopes of API keys, as the closed set of permitted uses."""

from enum import StrEnum


class Scope(StrEnum):
    """A group of endpoints. A key without any scope may use all endpoints."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"  # tokenizing and detokenizing
    MODELS = "models"  # the list of models, while using a model needs the scope of the endpoint
