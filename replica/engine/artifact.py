"""Reads a base's number of token ids, length of context and end-of-sequence ids."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

# A byte-level BPE token that is an English word or a part of one, perhaps after a space.
_ORDINARY = re.compile("Ġ?[A-Za-z]+")


class ArtifactError(ValueError):
    """An artifact cannot be served. The message names the file and the defect."""


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """The facts of a base that limit sequences and end them.

    Attributes:
        vocabulary: Number of token ids.
        context_tokens: Largest number of tokens in a sequence for which the base was trained.
        eos_ids: Ids that end a sequence.
        draft_tokens: Number of tokens per draft that the base's authors recommend
            (`prompt_lookup_num_tokens`), or 0 if they recommend none.
    """

    vocabulary: int
    context_tokens: int
    eos_ids: frozenset[int]
    draft_tokens: int = 0


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises ArtifactError if the file is missing or its content is not an object.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; import the whole base directory") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({error}); import the base anew") from None
    if not isinstance(document, dict):
        raise ArtifactError(f"{path} is not a JSON object; import the base anew")
    return cast("dict[str, Any]", document)


def read_base_facts(directory: Path) -> BaseFacts:
    """Return the facts of a base from config.json and, if present, generation_config.json."""
    config = read_json(directory / "config.json")
    try:
        vocabulary = int(config["vocab_size"])
        context_tokens = int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{directory / 'config.json'}: vocab_size or max_position_embeddings is missing"
            f" or not a number ({error!r})"
        ) from None
    generation = directory / "generation_config.json"
    sources = [config, read_json(generation) if generation.exists() else {}]
    eos_ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            eos_ids.update(cast("list[int]", value) if isinstance(value, list) else [int(value)])
    drafts = sources[1].get("prompt_lookup_num_tokens") or 0
    if not isinstance(drafts, int) or drafts < 0:
        raise ArtifactError(f"{generation}: prompt_lookup_num_tokens {drafts!r} is no count")
    return BaseFacts(vocabulary, context_tokens, frozenset(eos_ids), drafts)


def ordinary_token_ids(directory: Path, vocabulary: int) -> list[int]:
    """Return the ids whose text is an English word or part of one, without special tokens.

    If the tokenizer has no such ids, the function returns every id of the vocabulary except the
    first sixteenth, where special tokens usually are.
    """
    path = directory / "tokenizer.json"
    document = read_json(path) if path.exists() else {}
    special = {int(token["id"]) for token in document.get("added_tokens") or ()}
    entries = (document.get("model") or {}).get("vocab") or {}
    found: list[int] = []
    if isinstance(entries, dict):
        words = cast("dict[str, int]", entries)
        found = [
            index
            for text, index in words.items()
            if index < vocabulary and index not in special and _ORDINARY.fullmatch(text)
        ]
    return sorted(found) or list(range(vocabulary // 16, vocabulary))
