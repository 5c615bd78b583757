"""Converts contents of KV blocks between the wire and the driver, in any thread.

Each block has a checksum of its content together with its hash. The checksum detects damaged
content, and content under a wrong hash. In the cache, either would corrupt answers unnoticed.
"""

import hashlib
from itertools import starmap

from replica.engine.types import KvBlocks, RefusedError
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS, HASH_BYTES
from sluice.wire.engine.v1 import engine_pb2 as wire

# Largest number of bytes of one message. Triton and Python copy a message several times, for about
# 5 ms each, and no step begins meanwhile. A larger block is the only block of its message.
EXPORT_BYTES_MAX = 16 << 20
IMPORT_BYTES_MAX = 64 << 20
CHECKSUM_BYTES = 16


def checksum(block_hash: bytes, content: bytes) -> bytes:
    """Return the checksum of a block's content under its hash."""
    return hashlib.blake2b(content, key=block_hash, digest_size=CHECKSUM_BYTES).digest()


def pack_blocks(blocks: KvBlocks, base_digest: str) -> wire.KvBlocks:
    """Return the message with exported blocks."""
    pairs = zip(blocks.hashes, blocks.data, strict=True)
    return wire.KvBlocks(
        base_digest=base_digest,
        layout=blocks.layout,
        block_tokens=BLOCK_TOKENS,
        block_bytes=len(blocks.data[0]) if blocks.data else 0,
        hashes=b"".join(blocks.hashes),
        checksums=b"".join(starmap(checksum, pairs)),
        data=b"".join(blocks.data),
    )


def unpack_blocks(message: wire.KvBlocks, base_digest: str) -> KvBlocks:
    """Return the blocks of a message after all checks that need no engine.

    Raises:
        RefusedError: With CONFLICT if the blocks are of another base or block size, or with
            INVALID_REQUEST if sizes disagree or a checksum is wrong.
    """
    if message.base_digest != base_digest:
        raise RefusedError(
            ErrorCode.CONFLICT,
            f"the blocks are of base {message.base_digest}; this engine serves {base_digest}",
        )
    if message.block_tokens != BLOCK_TOKENS:
        raise RefusedError(
            ErrorCode.CONFLICT,
            f"the blocks hold {message.block_tokens} tokens; here they hold {BLOCK_TOKENS}",
        )
    names, sums, data = message.hashes, message.checksums, message.data
    if len(data) > IMPORT_BYTES_MAX:
        raise RefusedError(
            ErrorCode.REQUEST_TOO_LARGE,
            f"{len(data)} bytes of blocks; send at most {IMPORT_BYTES_MAX} in one message",
        )
    hashes = [names[start : start + HASH_BYTES] for start in range(0, len(names), HASH_BYTES)]
    count, size = len(hashes), message.block_bytes
    wanted = (count * HASH_BYTES, count * CHECKSUM_BYTES, count * size)
    given = (len(names), len(sums), len(data))
    if not count or not size or given != wanted:
        raise RefusedError(
            ErrorCode.INVALID_REQUEST,
            f"hashes, checksums and data have {given} bytes; {count} blocks of {size} bytes"
            f" have {wanted}",
        )
    contents = [data[start : start + size] for start in range(0, len(data), size)]
    for index, (block_hash, content) in enumerate(zip(hashes, contents, strict=True)):
        start = index * CHECKSUM_BYTES
        if checksum(block_hash, content) != sums[start : start + CHECKSUM_BYTES]:
            raise RefusedError(
                ErrorCode.INVALID_REQUEST,
                f"the checksum of block {index} ({block_hash.hex()}) is wrong; send it again",
            )
    return KvBlocks(message.layout, tuple(hashes), tuple(contents))
