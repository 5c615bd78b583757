"""Makes a tokenizer spell the text of its added tokens.

The compiler of grammars asks the tokenizer how text that must come is written, and the tokenizer
takes an added token wherever it finds its text: `<|im_end|>` in a schema's `const` would be the end
of the answer, and `<tool_call>` the mark. Under names that no text can contain, they match no text.
As special tokens they do not match their names either, which free text would have room for.

The price: where a base has added mere text, such as a run of spaces, a grammar gets it only in
tokens of the model, or in its bytes.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, cast

_Document = dict[str, Any]


def spelled(tokenizer_json: str, special_ids: Iterable[int]) -> str:
    """Return a tokenizer with the same ids that writes and reads text in its model's tokens alone.

    Args:
        tokenizer_json: A tokenizer of Hugging Face.
        special_ids: Ids that are no text either, though the tokenizer may not list them as added
            tokens.
    """
    document: _Document = json.loads(tokenizer_json)
    model: _Document = document["model"]
    # The first and last tokens of a sequence are named there; only bare text is needed.
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
    # A unigram model has pieces with scores.
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
        # Vocabularies of SentencePiece have merges that end in an added token, too.
        model["merges"] = [merge for merge in model["merges"] if _is_kept(merge, names)]


def _is_kept(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left not in names and right not in names and left + right not in names
