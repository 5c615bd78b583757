"""Checks whether an artifact is a servable Hugging Face base, without reading its weight data.

Parsing a tokenizer or a template runs foreign code on foreign data. So the checks must run in a
process that may crash (`control_plane.artifacts.inspector`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from control_plane.artifacts.adapter_check import check_names
from control_plane.artifacts.headers import (
    BASE_HEADER_BYTES_MAX,
    ArtifactFile,
    CheckError,
    Tensor,
    read_json,
    read_tensors,
    read_text,
)
from sluice.base_files import CHAT_TEMPLATE, MORE_TEMPLATES

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_TEMPLATE = re.compile(rf"{re.escape(CHAT_TEMPLATE)}|{MORE_TEMPLATES}/[A-Za-z0-9._-]+\.jinja")
_SHARD = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
_VOCABULARIES = ("tokenizer.model", "merges.txt", "vocab.txt")
_JSON_BYTES_MAX = 16 << 20
_TOKENIZER_BYTES_MAX = 64 << 20
_TEMPLATE_BYTES_MAX = 1 << 20
_NUMBERS = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers")


def is_shard(name: str) -> bool:
    """Return whether a file with this name may contain weights."""
    return _SHARD.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class TextParsers:
    """The parsers of foreign text. Each raises ValueError if the text is not valid.

    Attributes:
        tokenizer: Parses tokenizer.json, and returns the number of its tokens.
        template: Parses the source of a chat template.
    """

    tokenizer: Callable[[str], int]
    template: Callable[[str], None]


def check_base(files: Mapping[str, ArtifactFile], parsers: TextParsers) -> list[str]:
    """Return the reasons why a base is refused, one sentence each, or none if it is accepted."""

    def is_known(name: str) -> bool:
        return name in _VOCABULARIES or is_shard(name) or _is_template(name)

    reasons = check_names(files, is_known)
    checks = (_check_config, _check_weights, _check_tokenizer, _check_template)
    for check in checks:
        try:
            check(files, parsers)
        except CheckError as error:
            reasons.append(str(error))
    return reasons


def _needed(files: Mapping[str, ArtifactFile], name: str) -> ArtifactFile:
    if name not in files:
        raise CheckError(f"{name} is missing: import the whole base directory")
    return files[name]


def _check_config(files: Mapping[str, ArtifactFile], _: TextParsers) -> None:
    config = read_json(_needed(files, CONFIG_FILE), _JSON_BYTES_MAX)
    if not isinstance(config.get("model_type"), str):
        raise CheckError(f"{CONFIG_FILE} has no model_type: import the whole base directory")
    for name in _NUMBERS:
        if type(config.get(name)) is not int or config[name] < 1:
            raise CheckError(
                f"{CONFIG_FILE}: {name} is {config.get(name)!r:.40}, a number above 0 is needed:"
                " save the base anew"
            )


def _check_weights(files: Mapping[str, ArtifactFile], _: TextParsers) -> None:
    """Refuse broken weight files, and an index whose tensors differ from the files' tensors."""
    shards = {SINGLE_FILE} if SINGLE_FILE in files else set[str]()
    index: dict[str, str] = {}
    if not shards:
        if INDEX_FILE not in files:
            raise CheckError(
                f"neither {SINGLE_FILE} nor {INDEX_FILE} is there: save the weights as safetensors"
            )
        index = _index(files[INDEX_FILE])
        shards = set(index.values())
    seen: dict[str, str] = {}
    for name in sorted(shards):
        held: dict[str, Tensor] = read_tensors(_needed(files, name), BASE_HEADER_BYTES_MAX)
        for tensor in held:
            if tensor in seen:
                raise CheckError(f"{name} and {seen[tensor]} both hold {tensor:.100}: save anew")
            seen[tensor] = name
    if not seen:
        raise CheckError(f"{min(shards)} holds no tensors: save the base anew")
    if index and index != seen:
        tensor = min(tensor for tensor, _ in index.items() ^ seen.items())
        raise CheckError(
            f"{INDEX_FILE} and the files disagree on {tensor:.100}: save the base anew"
        )
    for name in files:
        if _SHARD.fullmatch(name) and name not in shards:
            raise CheckError(f"{name} is not one of the base's weight files: remove it")


def _index(file: ArtifactFile) -> dict[str, str]:
    """Return the file name of each tensor in the index."""
    given = read_json(file, _JSON_BYTES_MAX).get("weight_map")
    if not isinstance(given, dict) or not given:
        raise CheckError(f"{INDEX_FILE} has no weight_map: save the base anew")
    index = cast("dict[str, Any]", given)
    for name in index.values():
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise CheckError(f"{INDEX_FILE} names {name!r:.100}, which is no file of weights")
    return index


def _check_tokenizer(files: Mapping[str, ArtifactFile], parsers: TextParsers) -> None:
    text = read_text(_needed(files, TOKENIZER_FILE), _TOKENIZER_BYTES_MAX)
    try:
        count = parsers.tokenizer(text)
    except ValueError as error:
        raise CheckError(
            f"{TOKENIZER_FILE} cannot be read ({error!s:.200}): save the tokenizer anew"
        ) from None
    config = read_json(_needed(files, CONFIG_FILE), _JSON_BYTES_MAX)
    size = config.get("vocab_size")
    if type(size) is int and count > size:
        raise CheckError(
            f"{TOKENIZER_FILE} has {count} tokens, {CONFIG_FILE} only {size}: they are of different"
            " bases, import the right one"
        )


def _check_template(files: Mapping[str, ArtifactFile], parsers: TextParsers) -> None:
    """Refuse a chat template that is not valid Jinja.

    A base without a template serves completions only.
    """
    for name, source in _templates(files):
        try:
            parsers.template(source)
        except ValueError as error:
            raise CheckError(
                f"{name}: the chat template cannot be read ({error!s:.200}): correct it"
            ) from None


def _is_template(name: str) -> bool:
    return _TEMPLATE.fullmatch(name) is not None


def _templates(files: Mapping[str, ArtifactFile]) -> list[tuple[str, str]]:
    """Return the file and the source of each chat template."""
    found = [
        (name, read_text(file, _TEMPLATE_BYTES_MAX))
        for name, file in files.items()
        if _is_template(name)
    ]
    if TOKENIZER_CONFIG_FILE not in files:
        return found
    given = read_json(files[TOKENIZER_CONFIG_FILE], _JSON_BYTES_MAX).get("chat_template")
    if given is None:
        return found
    # The value is either one template, or a list of named templates.
    several = cast("list[Any]", given if isinstance(given, list) else [{"template": given}])
    for one in several:
        source = cast("dict[str, Any]", one).get("template") if isinstance(one, dict) else None
        if not isinstance(source, str) or len(source) > _TEMPLATE_BYTES_MAX:
            raise CheckError(
                f"{TOKENIZER_CONFIG_FILE}: chat_template is no text of at most"
                f" {_TEMPLATE_BYTES_MAX} characters: correct it"
            )
        found.append((TOKENIZER_CONFIG_FILE, source))
    return found
