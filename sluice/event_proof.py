"""Proves that this installation wrote an event, because brokers accept messages of any client."""

from collections.abc import Iterable, Mapping

from sluice.shared_secret import ours

HEADER = "sluice-mac"
_PURPOSE = "event:"

Value = str | bytes | None
Header = tuple[str, Value]


def proof(topic: str, payload: bytes) -> dict[str, str | bytes | None]:
    """Return the headers that prove that a platform process wrote a message for this topic."""
    return {HEADER: ours().mac(_PURPOSE + topic, payload)}


def is_genuine(topic: str, payload: bytes, headers: Mapping[str, Value] | Iterable[Header]) -> bool:
    """Return whether a message is accepted as genuine.

    A message without a proof is accepted only while the installation does not require proofs.
    """
    secret, shown = ours(), dict(headers).get(HEADER)
    if shown is None:
        return not secret.is_required
    given = shown.encode() if isinstance(shown, str) else shown
    return secret.is_mac(_PURPOSE + topic, payload, given)
