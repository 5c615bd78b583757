"""Keys of contents: numbers that are never used again, sealed anew under a new secret."""

import pytest

from control_plane.content.model import KEYS_MAX, erased, renewed, rotated, shown_keys
from sluice.errors import PlatformError
from sluice.sealing import Sealer, SealError
from sluice.shared_secret import SharedSecret
from sluice.stored_content import KEY_BYTES, key_place

OLD, NEW = "x" * 32, "y" * 32
SEALER = Sealer(SharedSecret([OLD]), "p")


def test_a_rotation_adds_a_key_and_an_erasure_leaves_a_new_one() -> None:
    first = rotated("t", [], SEALER, 5)
    both = rotated("t", first, SEALER, 6)
    assert shown_keys(both) == [
        {"number": 1, "made_at_unix_ms": 5},
        {"number": 2, "made_at_unix_ms": 6},
    ]
    opened = {SEALER.opened(it["sealed"], key_place("t", it["number"])) for it in both}
    assert {len(bytes.fromhex(it)) for it in opened} == {KEY_BYTES}
    assert len(opened) == 2
    with pytest.raises(SealError):
        SEALER.opened(both[0]["sealed"], key_place("other", 1))
    left = erased("t", both, SEALER, 7)
    assert shown_keys(left) == [{"number": 3, "made_at_unix_ms": 7}]
    assert erased("t", [], SEALER, 7) == [], "in the clear before, in the clear after"


def test_keys_have_a_bound() -> None:
    keys = [{"number": n, "sealed": "", "made_at_unix_ms": 0} for n in range(KEYS_MAX)]
    with pytest.raises(PlatformError):
        rotated("t", keys, SEALER, 1)


def test_keys_are_sealed_anew_after_the_secret_was_replaced() -> None:
    keys = rotated("t", rotated("t", [], SEALER, 5), SEALER, 6)
    assert renewed("t", keys, SEALER) is None
    made = renewed("t", keys, Sealer(SharedSecret([NEW, OLD]), "p"))
    assert made is not None
    alone = Sealer(SharedSecret([NEW]), "p")
    for before, after in zip(keys, made, strict=True):
        place = key_place("t", after["number"])
        assert alone.opened(after["sealed"], place) == SEALER.opened(before["sealed"], place)
    assert renewed("t", keys, alone) is None, "none of them can be opened"
