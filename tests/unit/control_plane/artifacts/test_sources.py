"""What may be imported: nothing that an operator has not allowed, and no way around that."""

from dataclasses import replace

import pytest

from control_plane.artifacts.fetching import refusal_of
from control_plane.artifacts.sources import (
    Allowed,
    ImportSource,
    ImportSourceError,
    parse_source,
)

ALLOWED = Allowed(("/data/in", "/srv/models"), ("models.example.com", "127.0.0.1:9000"), ("ours",))


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("file:///data/in/a%20b/c", ImportSource("file", "/data/in", "a b/c")),
        ("file:///srv/models", ImportSource("file", "/srv/models", ".")),
        ("s3://ours/some/prefix/", ImportSource("s3", "ours", "some/prefix")),
        (
            "https://Models.Example.com./a/b/",
            ImportSource("https", "models.example.com", "/a/b", 443),
        ),
        ("http://127.0.0.1:9000", ImportSource("http", "127.0.0.1", "", 9000, is_private=True)),
    ],
)
def test_allowed_sources_are_parsed(uri: str, source: ImportSource) -> None:
    assert parse_source(uri, ALLOWED) == source


@pytest.mark.parametrize(
    "uri",
    [
        *("", "x", "/data/in", "file:data/in", "file://host/data/in", "ftp://models.example.com/"),
        *(
            "file:///data/inside",
            "file:///data/in/../out",
            "file:///data/in/%2e%2e/out",
            "file:///",
        ),
        *("s3://theirs/a", "s3:///ours", "s3://ours@theirs/a"),
        *(
            "https://evil.com/",
            "https://models.example.com.evil.com/",
            "https://xmodels.example.com/",
        ),
        *("https://models.example.com:8443/", "http://127.0.0.1/", "http://127.0.0.1:9001/"),
        *("https://models.example.com@evil.com/", "https://evil.com\\@models.example.com/"),
        *(
            "https://evil.com#@models.example.com/",
            "https://models.example.com/?a=b",
            "http://[::1/",
        ),
        *("https://models.example.com:x/", "https://models.example.com:99999/", "http://a\nb/"),
        *("http://0x7f.1:9000/", "http://2130706433:9000/", "http://127.1:9000/"),
        "https://models.example.com/" + "a" * 2048,
    ],
)
def test_other_sources_are_refused(uri: str) -> None:
    with pytest.raises(ImportSourceError):
        parse_source(uri, ALLOWED)


def test_addresses_are_public_unless_the_host_is_allowed_with_its_port() -> None:
    public = ImportSource("https", "models.example.com", "/", 443)
    assert "is not a public address" in refusal_of(public)("models.example.com", 443, "10.0.0.1")
    assert refusal_of(public)("models.example.com", 443, "8.8.8.8") == ""
    private = replace(public, is_private=True)
    assert refusal_of(private)("models.example.com", 443, "10.0.0.1") == ""
