"""Reads a base's tokenizer, templates and special tokens. All reads block on the disk."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sluice.base_files import CHAT_TEMPLATE, TOOLS_TEMPLATE


def read_json(file: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Return a file's JSON object, or an empty object if an optional file is missing.

    Raises OSError if the file cannot be read, or ValueError if it does not contain an object.
    """
    if is_optional and not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold an object")  # noqa: TRY004 - about the file's content
    return content


def read_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer in a `tokenizer.json`, or raise ValueError if the file is invalid."""
    text = file.read_text()
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises no more specific class
        raise ValueError(f"{file} is not a tokenizer: {error}") from error


def template_sources(directory: Path, config: dict[str, Any]) -> tuple[str, str]:
    """Return the sources of the chat template and of the template for requests with tools.

    The sources are equal unless the base has a separate template for tools. Raises ValueError if
    the base has no template.
    """
    separate, for_tools = directory / CHAT_TEMPLATE, directory / TOOLS_TEMPLATE
    source = separate.read_text() if separate.exists() else config.get("chat_template")
    named: dict[Any, Any] = {"default": source}
    if isinstance(source, list):
        entries: list[Any] = [entry for entry in source if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    if for_tools.exists():
        named["tool_use"] = for_tools.read_text()
    plain = named.get("default")
    calling = named.get("tool_use", plain)
    if not isinstance(plain, str) or not isinstance(calling, str):
        raise ValueError(f"{directory}/tokenizer_config.json has no chat_template")  # noqa: TRY004 - about the file's content
    return plain, calling


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates may refer to, by their name, e.g. `bos_token`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def reserved_texts(tokenizer: Tokenizer) -> set[str]:
    """Return the texts that the tokenizer recognizes as special tokens."""
    added = tokenizer.get_added_tokens_decoder().values()
    return {token.content for token in added if token.special and len(token.content) > 1}


def end_ids(tokenizer: Tokenizer, *configs: dict[str, Any]) -> frozenset[int]:
    """Return all token ids that end an answer according to these files."""
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids: list[Any] = value if isinstance(value, list) else [value]
        found.update(i for i in ids if isinstance(i, int))
        text = config.get("eos_token")
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str):
            token_id = tokenizer.token_to_id(text)
            found.update(() if token_id is None else (token_id,))
    return frozenset(found)


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the added tokens by text."""
    return {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
