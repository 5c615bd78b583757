"""What may be imported: nothing that an operator has not allowed, and no way around that."""

import socket

import pytest

from control_plane.artifacts.fetching import PublicResolver, is_address
from control_plane.artifacts.sources import (
    Allowed,
    ImportSource,
    ImportSourceError,
    is_public,
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
def test_what_is_allowed(uri: str, source: ImportSource) -> None:
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
def test_what_is_not(uri: str) -> None:
    with pytest.raises(ImportSourceError):
        parse_source(uri, ALLOWED)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "2001:0:1::"),
        *("::127.0.0.1", "::a9fe:a9fe", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "fec0::1"),
        *("192.0.0.8", "192.88.99.1", "240.0.0.1", "2001:db8::1", "3fff::1", "5f00::1", "100::1"),
        *("", "x", "127.1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


async def test_a_name_is_resolved_to_public_addresses_or_not_at_all() -> None:
    with pytest.raises(OSError, match="is not a public address"):
        await PublicResolver(is_private=False).resolve("localhost", 80, socket.AF_UNSPEC)
    found = await PublicResolver(is_private=True).resolve("localhost", 80, socket.AF_UNSPEC)
    assert {item["port"] for item in found} == {80}
    assert [is_address(host) for host in ("127.0.0.1", "127.1", "::1", "localhost")] == [
        *(True, True, True, False)
    ]
