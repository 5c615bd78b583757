"""docs/parameters.md has every parameter of OpenAI's SDK and of our bodies, with a test of it."""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
from pydantic import BaseModel

from gateway.bodies.anthropic import AnthropicRequest, CountTokensRequest
from gateway.bodies.chat import ChatRequest
from gateway.bodies.completions import CompletionRequest
from gateway.bodies.embeddings import EmbeddingRequest
from gateway.bodies.judging import ClassifyRequest, ModerationRequest, RerankRequest
from gateway.bodies.socket_messages import CreateMessage
from gateway.bodies.tokenize import DetokenizeRequest, TokenizeRequest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
# Of the SDK's call and not of the body.
OF_THE_CALL = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
SHARED, TOKENIZE = "Chat completions and completions", "Tokenize and detokenize"


def rows() -> list[tuple[str, list[str], str]]:
    """Return section, parameters and test of each row."""
    found: list[tuple[str, list[str], str]] = []
    section = ""
    for line in (ROOT / "docs/parameters.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| `"):
            names, _, test = line.strip("| ").split(" | ")
            found.append((section, re.findall("`([a-z_]+)`", names), test.strip("`")))
    return found


JUDGING = "Moderations, classify and rerank"


def documented(*sections: str) -> set[str]:
    return {name for section, names, _ in rows() for name in names if section in sections}


@pytest.mark.parametrize(
    ("resource", "sections"),
    [
        ("openai.resources.chat.completions:Completions", (SHARED, "Chat completions")),
        ("openai.resources.completions:Completions", (SHARED, "Completions")),
        ("openai.resources.responses:Responses", ("Responses",)),
        ("anthropic.resources.messages:Messages", ("Messages",)),
        ("openai.resources.embeddings:Embeddings", ("Embeddings",)),
    ],
)
def test_every_parameter_of_the_sdk_has_a_row(resource: str, sections: tuple[str, ...]) -> None:
    create = resolve_name(resource).create  # imported here: one takes two seconds of a processor
    wanted = inspect.signature(create).parameters.keys() - OF_THE_CALL
    assert wanted - documented(*sections) == set()


@pytest.mark.parametrize(
    ("bodies", "sections"),
    [
        ((ChatRequest,), (SHARED, "Chat completions")),
        ((CompletionRequest,), (SHARED, "Completions")),
        ((CreateMessage,), ("Responses",)),
        ((AnthropicRequest, CountTokensRequest), ("Messages",)),
        ((EmbeddingRequest,), ("Embeddings",)),
        ((TokenizeRequest, DetokenizeRequest), (TOKENIZE,)),
        ((ModerationRequest, ClassifyRequest, RerankRequest), (JUDGING,)),
    ],
)
def test_the_rows_are_the_fields_of_the_bodies(
    bodies: tuple[type[BaseModel], ...], sections: tuple[str, ...]
) -> None:
    assert {name for body in bodies for name in body.model_fields} == documented(*sections)


@pytest.mark.parametrize("test", sorted({test for _, _, test in rows()}))
def test_the_named_tests_exist(test: str) -> None:
    file, _, name = test.partition("::")
    source = (ROOT / file if "/" in file else HERE / file).read_text()
    assert re.search(rf"^(async )?def {re.escape(name)}\(", source, re.MULTILINE)
