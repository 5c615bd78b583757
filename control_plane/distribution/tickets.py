"""Derives the keys of nodes and the tickets for chunks from one secret of the fleet. Pure.

The secret never leaves the control plane. The key of a node for an hour is derived from the secret,
the hour and the node's id. So control planes that share a database derive equal keys without
communication, and keys need not be stored. A stolen key permits access to a single node.
"""

import hmac

from sluice import tickets

SECRET_BYTES = 32
_HOUR_S = 3600
_STEP_S = 60  # seconds for which a ticket is reused, so that it is computed only once
_KEPT_MAX = 200_000


class Tickets:
    """Writes the tickets with which nodes fetch chunks from other nodes.

    A node has two keys, for the present hour and for the next hour. The next key is used from the
    middle of the hour on, because all connected nodes have then received it. Tickets of the
    previous key expire before that key is dropped.
    """

    def __init__(self, secret: bytes) -> None:
        """Create the writer from the fleet's secret."""
        assert len(secret) >= SECRET_BYTES
        self._secret = secret
        self._keys: dict[tuple[int, str], bytes] = {}
        self._written: dict[tuple[str, str, str], str] = {}
        self._step = -1

    def keys(self, node_id: str, now_unix_s: float) -> dict[int, bytes]:
        """Return the keys of a node, by hour number."""
        self._tidy(now_unix_s)
        hour = int(now_unix_s // _HOUR_S)
        return {number: self._key(number, node_id) for number in (hour, hour + 1)}

    def write(self, digest: str, source: str, node_id: str, now_unix_s: float) -> str:
        """Return a ticket with which a node may fetch chunks of an artifact from a source."""
        self._tidy(now_unix_s)
        names = digest, source, node_id
        if names not in self._written:
            number = int((now_unix_s + _HOUR_S / 2) // _HOUR_S)
            expires_unix_s = (self._step + 1) * _STEP_S + tickets.LIFETIME_S
            key = self._key(number, source)
            self._written[names] = tickets.write(number, key, digest, node_id, expires_unix_s)
        return self._written[names]

    def _tidy(self, now_unix_s: float) -> None:
        """Drop tickets of earlier minutes, and keys of past hours."""
        step, hour = int(now_unix_s // _STEP_S), int(now_unix_s // _HOUR_S)
        if step != self._step or len(self._written) > _KEPT_MAX:
            self._step, self._written = step, {}
            self._keys = {of: key for of, key in self._keys.items() if of[0] >= hour}

    def _key(self, hour: int, node_id: str) -> bytes:
        if (hour, node_id) not in self._keys:
            message = f"peer key\n{hour}\n{node_id}".encode()
            self._keys[hour, node_id] = hmac.digest(self._secret, message, "sha256")
        return self._keys[hour, node_id]
