"""Tickets that permit a node to fetch the chunks of an artifact from another node. Pure.

The control plane signs a ticket with a key that it shares only with the serving node, as
docs/distribution.md describes. The holder of a ticket may fetch the artifact until the ticket
expires.
"""

import hmac
from collections.abc import Mapping

LIFETIME_S = 300  # validity in seconds, which covers clock skew and short control plane outages
_TICKET_MAX = 512  # most characters of a ticket
_NUMBER_MAX = 15  # most digits of a number in a ticket


def write(key_id: int, key: bytes, digest: str, node_id: str, expires_unix_s: int) -> str:
    """Return a signed ticket.

    Args:
        key_id: Id of the key.
        key: Key of the serving node.
        digest: Digest of the artifact.
        node_id: Id of the node that may fetch the artifact.
        expires_unix_s: Unix time at which the ticket expires.
    """
    mac = _mac(key, digest, node_id, expires_unix_s)
    return f"{key_id}.{expires_unix_s}.{mac}.{node_id}"


def is_valid(ticket: str, keys: Mapping[int, bytes], digest: str, now_unix_s: float) -> bool:
    """Return whether a ticket for an artifact is signed by a known key and not expired.

    Args:
        ticket: Untrusted text from a caller.
        keys: Accepted keys by id.
        digest: Digest of the requested artifact.
        now_unix_s: Unix time in seconds.
    """
    if len(ticket) > _TICKET_MAX or not ticket.isascii():
        return False
    key_id, expires, mac, node_id = (*ticket.split(".", 3), "", "", "", "")[:4]
    if not all(text.isdigit() and len(text) <= _NUMBER_MAX for text in (key_id, expires)):
        return False
    key = keys.get(int(key_id))
    if key is None or int(expires) <= now_unix_s:
        return False
    return hmac.compare_digest(mac, _mac(key, digest, node_id, int(expires)))


def _mac(key: bytes, digest: str, node_id: str, expires_unix_s: int) -> str:
    message = f"{digest}\n{expires_unix_s}\n{node_id}".encode()
    return hmac.digest(key, message, "sha256").hex()
