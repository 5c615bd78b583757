"""Addresses of servers: what is one, and its parts."""

import pytest

from sluice.addresses import host_and_port, is_address


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
def test_what_is_none(text: str) -> None:
    assert not is_address(text)
