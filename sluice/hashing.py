"""Block hashes of the prefix cache: the one function that gateway, router and engine share.

A chain: each full block's hash covers its token ids and, as key, the hash of the block before it;
the first is keyed by a root that names everything else that the KV values depend on. Two prompts
share cached blocks only if all of that is equal.
"""

import hashlib
from array import array
from collections.abc import Sequence
from struct import iter_unpack

BLOCK_TOKENS = 32  # tokens per KV block; fixed by the OpenVINO CPU plugin
HASH_BYTES = 16
_BLOCK = f"{4 * BLOCK_TOKENS}s"  # ids have 4 bytes


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


def session_hash(tenant_id: str, session: str) -> int:
    """Return the hash of a tenant's session, by which it stays together; 0: no session."""
    if not session:
        return 0
    key = tenant_id.encode()
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        key = hashlib.blake2b(key).digest()
    digest = hashlib.blake2b(session.encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def block_hashes(
    tokens: Sequence[int], root: bytes, count: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the hashes of the first `count` full blocks of `tokens`.

    Args:
        tokens: Token ids; at least `count * BLOCK_TOKENS` of them.
        root: Root of the chain, from `cache_root`.
        count: Full blocks wanted.
        known: Hashes of the first blocks, already computed; at most `count`.
    """
    assert len(tokens) >= count * BLOCK_TOKENS, (len(tokens), count)
    hashes = list(known)
    ids = tokens[len(hashes) * BLOCK_TOKENS : count * BLOCK_TOKENS]
    _extend(hashes, ids, hashes[-1] if hashes else root)
    return hashes


def chained_hashes(tokens: Sequence[int], root: bytes, known: bytes = b"") -> bytes:
    """Return the hashes of all full blocks of `tokens`, concatenated.

    Args:
        tokens: Token ids.
        root: Root of the chain, from `cache_root`.
        known: Earlier result for a beginning of `tokens`; only the rest is hashed.
    """
    first = len(known) // HASH_BYTES * BLOCK_TOKENS
    hashes = [known] if known else []
    ids = tokens[first : len(tokens) - len(tokens) % BLOCK_TOKENS]
    _extend(hashes, ids, known[-HASH_BYTES:] or root)
    return b"".join(hashes)


def shared_blocks(one: bytes, other: bytes) -> int:
    """Return how many leading blocks two prompts have in common, by their concatenated hashes."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:  # hashes are chained: an equal one has equal ones before it
        middle = (low + high + 1) // 2
        last = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        low, high = (middle, high) if one[last] == other[last] else (low, middle - 1)
    return low


def _extend(hashes: list[bytes], ids: Sequence[int], key: bytes) -> None:
    """Append the hash of each block of `ids`, which follow the block whose hash is `key`.

    The ids are packed once: cutting a list per block costs as much as the hash. They are unsigned,
    the format that arrays fill fastest; no token id is too large for it.
    """
    blake2b = hashlib.blake2b
    packed = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    for (block,) in iter_unpack(_BLOCK, packed):
        key = blake2b(block, key=key, digest_size=HASH_BYTES).digest()
        hashes.append(key)
