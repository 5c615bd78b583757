"""Changes a tokenizer so that it encodes the names of added tokens as ordinary text.

The compiler of grammars encodes required text with the tokenizer. An unchanged tokenizer encodes
the name of an added token as that token. So `<|im_end|>` in a schema's `const` would end the
answer, and `<tool_call>` would begin a tool call. This module renames added tokens to names that
occur in no text. It also marks them as special, so that free text in a grammar does not match these
names.

The change has a disadvantage for bases whose added tokens are ordinary text, such as a run of
spaces. In a grammar, such text consists of the model's other tokens or bytes.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, cast

_Document = dict[str, Any]


def spelled(tokenizer_json: str, special_ids: Iterable[int]) -> str:
    """Return a tokenizer with the same ids that uses no added token for text.

    Args:
        tokenizer_json: Text of a Hugging Face tokenizer.json.
        special_ids: Ids that are not text, even if the tokenizer does not list them as added.
    """
    document: _Document = json.loads(tokenizer_json)
    model: _Document = document["model"]
    # The post-processor adds the first and last tokens of a sequence, which a part of a text lacks.
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
    # A unigram model has a list of (text, score) instead of a map.
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
        # In SentencePiece vocabularies, some merges end in an added token. These are dropped.
        model["merges"] = [merge for merge in model["merges"] if _is_kept(merge, names)]


def _is_kept(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left not in names and right not in names and left + right not in names
