"""Addresses of servers: what is one, and its parts."""

import pytest

from sluice.addresses import host_and_port, is_address, is_public


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("router-0.routers:0", ("router-0.routers", 0)),
        ("[::]:65535", ("::", 65535)),
        ("[2001:DB8::1.2.3.4]:1", ("2001:DB8::1.2.3.4", 1)),
    ],
)
def test_names_and_both_kinds_of_addresses(address: str, parts: tuple[str, int]) -> None:
    assert is_address(address)
    assert host_and_port(address) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        ":1",
        "h:",
        "h:x",
        "h:65536",
        "h:-1",
        "h:1\n",
        "::1:80",
        "[]:1",
        "a b:1",
        "h/:1",
        "h:\u0661",
    ],
)
def test_malformed_addresses_are_refused(text: str) -> None:
    assert not is_address(text)


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
