"""Ids of responses and records, with their creation time and a proof of their owner.

An id is a prefix, for example `resp_`, and 42 characters. The characters encode the time in
milliseconds and 80 random bits, as in `new_id`. Then follow the first 80 bits of a keyed digest of
that part and of the tenant. So the owner of an id can be verified without a look-up.
"""

import hmac
import re

from sluice.ids import base32, base32_value, new_id
from sluice.shared_secret import SharedSecret

_PREFIX = "resp"
_STEM = len(_PREFIX) + 1 + 26
_TIME = slice(len(_PREFIX) + 1, len(_PREFIX) + 11)
_FORM = re.compile(r"resp_[0-9a-hjkmnp-tv-z]{42}")
_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-hjkmnp-tv-z]{26})i?[0-9a-f]{2,}")
_MAC_BYTES, _MAC_CHARACTERS = 10, 16
_PURPOSE = "ids of responses"
_UNIX_MS_MAX = 4_102_444_800_000  # start of the year 2100


def new_response_id(tenant_id: str, secret: SharedSecret) -> str:
    """Return the id of a new response that belongs to a tenant."""
    stem = new_id(_PREFIX)
    return stem + _proofs(stem, tenant_id, secret)[0]


def new_owned_id(prefix: str, tenant_id: str, secret: SharedSecret) -> str:
    """Return the id of a new object that belongs to a tenant."""
    stem = new_id(prefix)
    return stem + _proofs(stem, tenant_id, secret)[0]


def is_owned(owned_id: str, prefix: str, tenant_id: str, secret: SharedSecret) -> bool:
    """Return whether this installation created an id for a tenant, in constant time."""
    if re.fullmatch(rf"{prefix}_[0-9a-hjkmnp-tv-z]{{42}}", owned_id) is None:
        return False
    stem, given = owned_id[:-_MAC_CHARACTERS], owned_id[-_MAC_CHARACTERS:]
    matches = [hmac.compare_digest(it, given) for it in _proofs(stem, tenant_id, secret)]
    return any(matches)


def response_of_item(item_id: str, tenant_id: str, secret: SharedSecret) -> list[str]:
    """Return the ids that the response of an item may have, or none if the id has another form."""
    found = _ITEM.fullmatch(item_id)
    if found is None:
        return []
    stem = f"{_PREFIX}_{found[1]}"
    return [stem + proof for proof in _proofs(stem, tenant_id, secret)]


def is_response_id(text: str) -> bool:
    """Return whether a text has the form of a response id, without a check of its origin."""
    return _FORM.fullmatch(text) is not None and created_unix_ms(text) < _UNIX_MS_MAX


def belongs_to(response_id: str, tenant_id: str, secret: SharedSecret) -> bool:
    """Return whether this installation created a response id for a tenant.

    The proof is compared in constant time.
    """
    if not is_response_id(response_id):
        return False
    stem, given = response_id[:_STEM], response_id[_STEM:]
    matches = [hmac.compare_digest(it, given) for it in _proofs(stem, tenant_id, secret)]
    return any(matches)


def created_unix_ms(response_id: str) -> int:
    """Return the creation time of a response, in Unix milliseconds, from its id."""
    return base32_value(response_id[_TIME])


def item_stem(response_id: str) -> str:
    """Return the part that the ids of all items of a response have in common."""
    return response_id[len(_PREFIX) + 1 : _STEM]


def _proofs(stem: str, tenant_id: str, secret: SharedSecret) -> list[str]:
    data = f"{stem}\0{tenant_id}".encode()
    macs = secret.short_macs(_PURPOSE, data, _MAC_BYTES)
    return [base32(int.from_bytes(mac, "big"), _MAC_CHARACTERS) for mac in macs]
