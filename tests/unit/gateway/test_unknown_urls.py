"""A wrong URL is answered with the right one."""

import pytest

from gateway.server.unknown_urls import unknown_url

KNOWN = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/*", "/healthz")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/healthz", "/healthz"),
        ("/models", "/v1/models"),
        ("/models/tiny", "/v1/models/tiny"),
    ],
)
def test_a_near_url_is_suggested(path: str, meant: str) -> None:
    text = unknown_url(path, KNOWN)
    assert f" {path}." in text
    assert f"Did you mean {meant}?" in text


@pytest.mark.parametrize("path", ["/chat/completions", "/models"])
def test_a_base_url_without_v1(path: str) -> None:
    assert "ends in /v1" in unknown_url(path, KNOWN)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/threads", "/v1/uploads/b1", "/v1/audio/speech", "/v1/completions/x", "/v1/evals"),
        *("/v1/evals/e1/runs", "/v1/containers/c1/files", "/v1/organization/usage/completions"),
        "/v1/skills",
    ],
)
def test_an_openai_url_that_is_not_served_is_named(path: str) -> None:
    assert "is not served here" in unknown_url(path, KNOWN)


def test_anything_else_is_shown_as_far_as_it_goes() -> None:
    text = unknown_url("/" + "x" * 10_000, KNOWN)
    assert len(text) < 300
    assert "/openapi.json" in text
