import dataclasses
from collections.abc import Callable

import pytest

from replica.engine.types import KvBlocks, RefusedError
from replica.host import control as control_module
from replica.host.kv_transfer import checksum, pack_blocks, unpack_blocks
from sluice.errors import ErrorCode
from sluice.hashing import block_hashes
from sluice.wire.engine.v1 import engine_pb2 as wire

NAMES = tuple(letter * 16 for letter in (b"a", b"b", b"c"))
BLOCKS = KvBlocks("u8", NAMES, tuple(name[:8] for name in NAMES))
PROMPT = list(range(96))
HASHES = block_hashes(PROMPT, b"r" * 16, 3)


def test_packed_blocks_are_unpacked() -> None:
    message = pack_blocks(BLOCKS, "base")
    assert unpack_blocks(message, "base") == BLOCKS
    assert (message.block_tokens, message.block_bytes) == (32, 8)


def test_a_checksum_belongs_to_content_and_name() -> None:
    assert checksum(NAMES[0], b"x") != checksum(NAMES[1], b"x")
    assert checksum(NAMES[0], b"x") != checksum(NAMES[0], b"y")


def swap(message: wire.KvBlocks) -> None:
    message.hashes = message.hashes[16:32] + message.hashes[:16] + message.hashes[32:]


def flip(message: wire.KvBlocks) -> None:
    message.data = message.data[:9] + bytes([message.data[9] ^ 1]) + message.data[10:]


@pytest.mark.parametrize(
    ("damage", "code", "text"),
    [
        (lambda m: setattr(m, "base_digest", "other"), ErrorCode.CONFLICT, "serves base"),
        (lambda m: setattr(m, "block_tokens", 16), ErrorCode.CONFLICT, "hold 16 tokens"),
        (swap, ErrorCode.INVALID_REQUEST, "checksum of block 0"),
        (flip, ErrorCode.INVALID_REQUEST, "checksum of block 1"),
        (lambda m: setattr(m, "data", m.data[:-1]), ErrorCode.INVALID_REQUEST, "bytes"),
        (lambda m: setattr(m, "block_bytes", 0), ErrorCode.INVALID_REQUEST, "bytes"),
        (lambda m: setattr(m, "hashes", m.hashes[:-1]), ErrorCode.INVALID_REQUEST, "bytes"),
        (lambda m: setattr(m, "checksums", b""), ErrorCode.INVALID_REQUEST, "bytes"),
        (lambda m: m.Clear(), ErrorCode.CONFLICT, "base"),
    ],
)
def test_damage_is_refused(
    damage: Callable[[wire.KvBlocks], None], code: ErrorCode, text: str
) -> None:
    message = pack_blocks(BLOCKS, "base")
    damage(message)
    with pytest.raises(RefusedError, match=text) as caught:
        unpack_blocks(message, "base")
    assert caught.value.code is code


def test_more_than_a_message_may_hold_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("replica.host.kv_transfer.IMPORT_BYTES_MAX", 23)
    with pytest.raises(RefusedError, match="at most 23"):
        unpack_blocks(pack_blocks(BLOCKS, "base"), "base")


def filled(bench):
    bench.submit(wire.Sequence(id=1, prompt=PROMPT, output_tokens_max=1))
    bench.run()
    return bench


def export(bench, hashes: list[bytes]) -> wire.HostFrame:
    answers: list[wire.HostFrame] = []
    bench.core.control.export_kv(wire.Export(hashes=b"".join(hashes)), answers.append)
    if bench.background.jobs:
        bench.background.finish()
    (answer,) = answers
    return answer


def take_in(bench, blocks: wire.KvBlocks) -> wire.HostFrame:
    answers: list[wire.HostFrame] = []
    bench.core.control.import_kv(wire.Import(blocks=blocks), answers.append)
    if bench.background.jobs:
        bench.background.finish()
    (answer,) = answers
    return answer


def test_blocks_go_from_one_engine_to_another(make_bench) -> None:
    one, two = filled(make_bench()), make_bench()
    exported = export(one, [*HASHES, b"z" * 16]).exported
    assert exported.hashes == b"".join(HASHES)
    two.step()
    assert take_in(two, exported).imported.blocks == 3
    assert two.driver.blocks == one.driver.blocks
    assert (one.core.counters.kv_exported, two.core.counters.kv_imported) == (3, 3)


def test_an_export_holds_consecutive_cached_blocks_and_fits(make_bench, monkeypatch) -> None:
    bench = filled(make_bench())
    assert export(bench, [HASHES[0], b"z" * 16, HASHES[1]]).exported.hashes == HASHES[0]
    assert export(bench, []).exported == wire.KvBlocks(
        base_digest="base", layout="fake u8[8]", block_tokens=32
    )
    assert export(bench, [b"z" * 16]).exported.hashes == b""
    monkeypatch.setattr(control_module, "EXPORT_BYTES_MAX", 17)
    assert export(bench, HASHES).exported.hashes == b"".join(HASHES[:2])


def test_an_impossible_transfer_is_refused_and_counted(make_bench) -> None:
    bench = filled(make_bench())
    exported = export(bench, HASHES).exported
    exported.layout = "f32"
    assert take_in(bench, exported).refused.code == "conflict"
    exported.base_digest = "other"
    assert take_in(bench, exported).refused.code == "conflict"
    assert take_in(bench, pack_blocks(dataclasses.replace(BLOCKS, data=(b"",) * 3), "base"))
    assert bench.core.counters.kv_refused == {"conflict": 2, "invalid_request": 1}
    answer = export(bench, [b"short"])
    assert answer.refused.code == "invalid_request"
    bench.background.is_full = True
    assert export(bench, HASHES).refused.code == "engine_busy"
    assert take_in(bench, exported).refused.code == "engine_busy"
