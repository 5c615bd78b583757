"""Proof that an event is of this installation: brokers take messages from whoever reaches them."""

from collections.abc import Iterable, Mapping

from sluice.shared_secret import ours

HEADER = "sluice-mac"
_PURPOSE = "event:"

Value = str | bytes | None
Header = tuple[str, Value]


def proof(topic: str, payload: bytes) -> dict[str, str | bytes | None]:
    """Return the headers of a message that prove that one of ours made it for this topic."""
    return {HEADER: ours().mac(_PURPOSE + topic, payload)}


def is_genuine(topic: str, payload: bytes, headers: Mapping[str, Value] | Iterable[Header]) -> bool:
    """Return whether a message may count.

    One that proves nothing may where the installation does not require it (yet).
    """
    secret, shown = ours(), dict(headers).get(HEADER)
    if shown is None:
        return not secret.is_required
    given = shown.encode() if isinstance(shown, str) else shown
    return secret.is_mac(_PURPOSE + topic, payload, given)
