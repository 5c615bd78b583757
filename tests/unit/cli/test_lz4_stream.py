"""Frames of lz4 are decoded however they are cut."""

import lz4.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.stack.lz4_stream import Lz4Stream

_BLOCKS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=50), st.sampled_from((1, 1000, 30_000))),
    max_size=4,
)


@given(blocks=_BLOCKS, cuts=st.lists(st.integers(7, 5000), min_size=1, max_size=5))
def test_frames_one_after_another_come_out_whole(
    blocks: list[tuple[bytes, int]], cuts: list[int]
) -> None:
    plain = [part * count for part, count in blocks]
    body = b"".join(map(lz4.frame.compress, plain))
    stream, out, turn = Lz4Stream(), [], 0
    while body:
        size = cuts[turn % len(cuts)]
        out.extend(stream.decode(body[:size]))
        body, turn = body[size:], turn + 1
    assert b"".join(out) == b"".join(plain)
    assert stream.is_complete
    assert max(map(len, out), default=0) <= 1 << 20


def test_a_torn_frame_is_not_complete() -> None:
    stream = Lz4Stream()
    whole = lz4.frame.compress(b"x" * 1000)
    assert b"".join(stream.decode(whole + whole[:-8])).startswith(b"x" * 1000)
    assert not stream.is_complete


def test_malformed_frames_are_refused() -> None:
    with pytest.raises(RuntimeError):
        list(Lz4Stream().decode(b"no frame at all"))
