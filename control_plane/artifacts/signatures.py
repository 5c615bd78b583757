"""Checks that an artifact was signed with an accepted key. Pure.

A signature is a detached Ed25519 signature of the 64 hexadecimal digits of the artifact's digest.
The digest covers all names and bytes, so nothing else has to be signed.
"""

import base64
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def checked_public_key(text: str) -> str:
    """Return an Ed25519 public key (32 bytes in base64). Raises ValueError if it is not valid."""
    try:
        Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except ValueError:
        raise ValueError("an Ed25519 public key is expected, its 32 bytes in base64") from None
    return text


def signature_problems(
    digest: str, signatures: Mapping[str, str], keys: Mapping[str, str], *, is_required: bool
) -> list[str]:
    """Return the reasons why an artifact's signatures are not sufficient, one sentence each.

    Args:
        digest: Digest of the artifact.
        signatures: Signatures in base64, by the key's id.
        keys: Public keys accepted for the artifact's tenant, in base64, by id.
        is_required: Whether a signature is required.
    """
    if is_required and not signatures:
        return ["a signature is required here: sign the digest with a key that is registered"]
    problems: list[str] = []
    for key_id, signature in signatures.items():
        if key_id not in keys:
            problems.append(
                f"signature by {key_id}: no such key counts for this tenant: register it, or sign"
                " with another one"
            )
            continue
        public_key = Ed25519PublicKey.from_public_bytes(base64.b64decode(keys[key_id]))
        try:
            public_key.verify(base64.b64decode(signature), digest.encode())
        except InvalidSignature:
            problems.append(f"signature by {key_id} is not of digest {digest}: sign this digest")
    return problems
