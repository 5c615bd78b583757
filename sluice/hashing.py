"""Block hashes of the prefix cache: the one function that gateway, router and engine share.

A chain: each full block's hash covers its token ids and, as key, the hash of the block before it;
the first is keyed by a root that names everything else that the KV values depend on. Two prompts
share cached blocks only if all of that is equal.
"""

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 32  # tokens per KV block; fixed by the OpenVINO CPU plugin
HASH_BYTES = 16


def cache_root(base_digest: str, adapter_digest: str, tenant_salt: bytes) -> bytes:
    """Return the 16-byte root of a chain.

    The parts are length-prefixed, so that no two different triples give the same input. The salt
    keeps tenants from sharing, and so from timing, one another's prompts.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (base_digest.encode(), adapter_digest.encode(), tenant_salt):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def block_hashes(
    tokens: Sequence[int], root: bytes, count: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the hashes of the first `count` full blocks of `tokens`.

    Args:
        tokens: Token ids; at least `count * BLOCK_TOKENS` of them.
        root: From `cache_root`.
        count: Full blocks wanted.
        known: Hashes of the first blocks, already computed; at most `count`.
    """
    assert len(tokens) >= count * BLOCK_TOKENS, (len(tokens), count)
    hashes = list(known)
    for index in range(len(hashes), count):
        ids = array("i", tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]).tobytes()
        key = hashes[-1] if hashes else root
        hashes.append(hashlib.blake2b(ids, key=key, digest_size=HASH_BYTES).digest())
    return hashes
