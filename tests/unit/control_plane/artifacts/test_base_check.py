"""Bases: files that can be served, with the real parsers of tokenizers and templates."""

import json
from collections.abc import Callable

import pytest

from control_plane.artifacts.base_check import TextParsers, check_base
from control_plane.artifacts.inspector import compile_template, count_tokens

PARSERS = TextParsers(count_tokens, compile_template)


def edited(content: bytes, **changes) -> bytes:
    return json.dumps(json.loads(content) | changes).encode()


def test_a_base_is_accepted_and_its_weights_are_not_read(base_files) -> None:
    assert check_base(base_files, PARSERS) == []
    weights = base_files["model.safetensors"]
    header = int.from_bytes(weights.content[:8], "little")
    assert weights.reads == [(0, 8), (8, header)]


CASES: list[tuple[str, Callable[[bytes], bytes | None], str]] = [
    ("config.json", lambda _: None, "config.json is missing: import the whole"),
    ("config.json", lambda _: b"{", "config.json is not JSON"),
    ("config.json", lambda c: edited(c, model_type=None), "has no model_type"),
    ("config.json", lambda c: edited(c, vocab_size="1"), "vocab_size is '1', a number above 0"),
    ("config.json", lambda c: edited(c, vocab_size=7), "tokens, config.json only 7"),
    ("tokenizer.json", lambda _: None, "tokenizer.json is missing"),
    ("tokenizer.json", lambda _: b"{}", "tokenizer.json cannot be read"),
    ("tokenizer.json", lambda _: b"\xff", "not UTF-8"),
    (
        "tokenizer_config.json",
        lambda c: edited(c, chat_template="{% if %}"),
        "chat template cannot",
    ),
    (
        "tokenizer_config.json",
        lambda c: edited(c, chat_template="{% break %}"),
        "chat template cannot",
    ),
    ("tokenizer_config.json", lambda c: edited(c, chat_template=[{"name": "x"}]), "is no text of"),
    ("chat_template.jinja", lambda _: b"{{ messages", "chat_template.jinja: the chat template"),
    ("additional_chat_templates/rag.jinja", lambda _: b"{{ messages", "rag.jinja: the chat"),
    ("additional_chat_templates/rag.py", lambda _: b"", "does not belong"),
    ("model.safetensors", lambda _: None, "neither model.safetensors nor"),
    ("model.safetensors", lambda c: c[:-1], "model.safetensors has"),
    ("model.safetensors", lambda _: b"\2\0\0\0\0\0\0\0{}", "holds no tensors"),
    ("other.safetensors", lambda _: b"", "is not one of the base's weight files"),
    ("pytorch_model.bin", lambda _: b"", "may hold pickled objects"),
    ("modeling_x.py", lambda _: b"", "does not belong"),
]


@pytest.mark.parametrize(("name", "change", "text"), CASES)
def test_invalid_bases_are_refused(base_files, file_of, name, change, text) -> None:
    content = base_files[name].content if name in base_files else b""
    changed = change(content)
    if changed is None:
        del base_files[name]
    else:
        base_files[name] = file_of(name, changed)
    reasons = check_base(base_files, PARSERS)
    assert any(text in reason for reason in reasons), reasons


def test_templates_that_people_use_are_accepted(base_files, file_of) -> None:
    sources = (
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "{{ raise_exception('no') if messages is string else strftime_now('%Y') }}",
    )
    config = base_files["tokenizer_config.json"].content
    for source in sources:
        base_files["tokenizer_config.json"] = file_of(
            "tokenizer_config.json",
            edited(config, chat_template=[{"name": "a", "template": source}]),
        )
        assert check_base(base_files, PARSERS) == []
    base_files["tokenizer_config.json"] = file_of(
        "tokenizer_config.json", edited(config, chat_template=None)
    )
    assert check_base(base_files, PARSERS) == []


def test_templates_besides_the_default_one_have_files_of_their_own(base_files, file_of) -> None:
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        base_files[name] = file_of(name, b"{{ messages }}")
    assert check_base(base_files, PARSERS) == []


def test_shards_and_their_index(base_files, file_of) -> None:
    weights = base_files.pop("model.safetensors")
    length = int.from_bytes(weights.content[:8], "little")
    names = json.loads(weights.content[8 : 8 + length])
    first = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(names, first)}
    files = base_files | {
        first: file_of(first, weights.content),
        "model.safetensors.index.json": file_of(
            "model.safetensors.index.json", edited(b"{}", **index)
        ),
    }
    assert check_base(files, PARSERS) == []

    def reasons(**changes) -> list[str]:
        content = edited(b"{}", weight_map={**index["weight_map"], **changes})
        name = "model.safetensors.index.json"
        return check_base(files | {name: file_of(name, content)}, PARSERS)

    assert "disagree on extra.weight" in reasons(**{"extra.weight": first})[0]
    assert "no file of weights" in reasons(**{"extra.weight": "../x.safetensors"})[0]
    assert "b.safetensors is missing" in reasons(**{"extra.weight": "b.safetensors"})[0]
    second = files | {"b.safetensors": file_of("b.safetensors", weights.content)}
    name = "model.safetensors.index.json"
    content = edited(b"{}", weight_map={**index["weight_map"], "x": "b.safetensors"})
    twice = check_base(second | {name: file_of(name, content)}, PARSERS)
    assert "both hold" in twice[0]
