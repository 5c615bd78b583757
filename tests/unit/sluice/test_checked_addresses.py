"""Addresses that others name are called only after a look at each of them."""

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from sluice.addresses import is_public
from sluice.checked_addresses import (
    AddressRefusedError,
    CheckedResolver,
    check_literal,
    checked_addresses,
    refused_for,
)

NUMBERS = {"127.0.0.1", "::1"}


def public_only(host: str, port: int, address: str) -> str:
    return "" if is_public(address) else f"{host}:{port} is {address}"


def all_but_ipv4(_host: str, _port: int, address: str) -> str:
    return "no IPv4" if "." in address else ""


async def test_a_name_is_resolved_to_addresses_that_may_be_called_or_not_at_all() -> None:
    with pytest.raises(AddressRefusedError, match="localhost:80 is "):
        await CheckedResolver(public_only).resolve("localhost", 80)
    found = await CheckedResolver(lambda *_: "").resolve("localhost", 80)
    assert {item["port"] for item in found} == {80}
    assert {item["hostname"] for item in found} == {"localhost"}
    assert {item["host"] for item in found} <= NUMBERS


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.1"])
async def test_one_bad_address_of_a_name_is_enough(host: str) -> None:
    with pytest.raises(AddressRefusedError, match="no IPv4"):
        await checked_addresses(host, 80, all_but_ipv4)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_an_address_in_a_url_is_looked_at(host: str) -> None:
    with pytest.raises(AddressRefusedError):
        check_literal(host, 80, public_only)
    check_literal(host, 80, lambda *_: "")


def test_names_and_public_addresses_in_a_url_pass() -> None:
    for host in ("8.8.8.8", "2606:4700::1111", "example.com"):
        check_literal(host, 80, public_only)


def test_a_refusal_is_known_inside_an_error_of_aiohttp() -> None:
    refused = AddressRefusedError("not this one")
    key = ConnectionKey("h", 80, False, True, None, None, None)
    assert refused_for(refused) == "not this one"
    assert refused_for(aiohttp.ClientConnectorDNSError(key, refused)) == "not this one"
    assert refused_for(aiohttp.ClientConnectorDNSError(key, OSError("no name"))) == ""
    assert refused_for(TimeoutError()) == ""
