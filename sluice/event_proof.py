"""Proof that an event is of this installation: brokers take messages from whoever reaches them."""

from collections.abc import Iterable

from sluice.shared_secret import ours

HEADER = "sluice-mac"
_PURPOSE = "event:"


def proof(topic: str, payload: bytes) -> list[tuple[str, bytes]]:
    """Return the headers of a message that prove that one of ours made it for this topic."""
    return [(HEADER, ours().mac(_PURPOSE + topic, payload))]


def is_genuine(topic: str, payload: bytes, headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether a message may count.

    One that proves nothing may where the installation does not require it (yet).
    """
    secret = ours()
    shown = [value or b"" for name, value in headers if name == HEADER]
    if not shown:
        return not secret.is_required
    return secret.is_mac(_PURPOSE + topic, payload, shown[0])
