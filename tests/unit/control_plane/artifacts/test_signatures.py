"""Signatures of artifacts: whose count, and for what."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.artifacts.model import quota_problem
from control_plane.artifacts.signatures import checked_public_key, signature_problems

DIGEST, OTHER = "ab" * 32, "cd" * 32
KEY, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))


def public(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def signed(key: Ed25519PrivateKey, digest: str) -> str:
    return base64.b64encode(key.sign(digest.encode())).decode()


KEYS = {"ci": public(KEY)}


@pytest.mark.parametrize(
    ("signatures", "is_required", "texts"),
    [
        ({}, False, []),
        ({}, True, ["a signature is required"]),
        ({"ci": signed(KEY, DIGEST)}, True, []),
        ({"ci": signed(KEY, OTHER)}, False, ["is not of digest"]),
        ({"ci": signed(STRANGER, DIGEST)}, True, ["is not of digest"]),
        ({"stranger": signed(STRANGER, DIGEST)}, True, ["no such key counts"]),
        (
            {"ci": signed(KEY, DIGEST), "x": signed(KEY, DIGEST)},
            True,
            ["signature by x: no such key"],
        ),
    ],
)
def test_signatures(signatures: dict[str, str], is_required: bool, texts: list[str]) -> None:
    problems = signature_problems(DIGEST, signatures, KEYS, is_required=is_required)
    assert len(problems) == len(texts)
    for problem, text in zip(problems, texts, strict=True):
        assert text in problem


@pytest.mark.parametrize("text", ["", "ab", "é" * 44, base64.b64encode(bytes(31)).decode()])
def test_malformed_public_keys_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="32 bytes in base64"):
        checked_public_key(text)
    assert checked_public_key(public(KEY)) == public(KEY)


def test_quotas() -> None:
    assert quota_problem(10, 5, 15) == ""
    assert quota_problem(10**15, 5, 0) == ""
    assert "5 bytes more than the 11" in quota_problem(11, 5, 15)
