"""Changes a tokenizer so that it encodes the text of its added tokens in ordinary tokens.

The compiler of grammars encodes required text with the tokenizer, which uses an added token for
each occurrence of that token's text. So `<|im_end|>` in a schema's `const` would end the answer,
and `<tool_call>` would become the mark of a tool call. This module renames added tokens to names
that occur in no text. It also marks them as special, so that free text in a grammar does not match
the names either.

A disadvantage concerns bases whose added tokens are ordinary text, for example a run of spaces. A
grammar then produces that text only from the model's ordinary tokens or bytes.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, cast

_Document = dict[str, Any]


def spelled(tokenizer_json: str, special_ids: Iterable[int]) -> str:
    """Return a tokenizer with the same ids that reads and writes text only in its model's tokens.

    Args:
        tokenizer_json: Text of a Hugging Face tokenizer.json.
        special_ids: Ids that are no text, even if the tokenizer does not list them as added tokens.
    """
    document: _Document = json.loads(tokenizer_json)
    model: _Document = document["model"]
    # The post-processor names the first and last tokens of a sequence, which bare text does not
    # need.
    document["post_processor"] = None
    added: list[_Document] = document.get("added_tokens") or []
    document["added_tokens"] = added = added + _missing(model, added, special_ids)
    prefix = secrets.token_hex(16)
    names: dict[str, str] = {token["content"]: f"{prefix}-{token['id']}" for token in added}
    for token in added:
        token["content"] = names[token["content"]]
        token["special"] = True
    _rename(model, names)
    return json.dumps(document, ensure_ascii=False)


def _missing(
    model: _Document, added: list[_Document], special_ids: Iterable[int]
) -> list[_Document]:
    wanted = set(special_ids) - {token["id"] for token in added}
    return [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, token in _vocabulary(model)
        if token in wanted
    ]


def _vocabulary(model: _Document) -> Iterable[tuple[str, int]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return cast("dict[str, int]", vocabulary).items()
    # A unigram model has a list of pieces with scores.
    return ((piece[0], token) for token, piece in enumerate(vocabulary))


def _rename(model: _Document, names: Mapping[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): vocabulary[text] for text in vocabulary}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        # SentencePiece vocabularies also have merges that end in an added token, which are dropped.
        model["merges"] = [merge for merge in model["merges"] if _is_kept(merge, names)]


def _is_kept(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left not in names and right not in names and left + right not in names
