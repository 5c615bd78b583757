"""The files of a base that this process reads; all of it blocks."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def read_json(file: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Return the object in a file, empty when an optional one is missing; OSError, ValueError."""
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
    """Return the tokenizer in a `tokenizer.json`; OSError, ValueError."""
    text = file.read_text()
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
