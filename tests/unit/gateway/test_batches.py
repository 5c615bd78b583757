"""A batch says of every scope what its attributes say, whatever is kept packed between batches."""

from collections.abc import Callable
from struct import Struct
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.buckets import BucketScope
from gateway.limits.script import Call, LimitBatch
from tests.unit.gateway.limit_rows import LimitRow, limit_rows

CALL = Struct("<4I")
LIMITS = ({"tpm": 100}, {"rpm": 10}, {"rpm": 10, "tpm": 100, "requests_max": 3})


class Waiter:
    """Waits for nothing."""

    def done(self) -> bool:
        return False

    def set_result(self, result: object, /) -> None:
        raise AssertionError


CHANGES: tuple[Callable[[BucketScope], None], ...] = (
    lambda scope: scope.settle(30, 20, was_served=True),
    lambda scope: scope.settle(30, 30, was_served=False),
    lambda scope: scope.settle_local(30, 40, was_served=True),
    lambda scope: scope.give_back(5),
    lambda scope: scope.take(7, 0.5),
    lambda scope: scope.restore_changes((1, 2, 3, 4)),
    lambda scope: scope.limit({"rpm": 5, "tpm": 6}),
    lambda scope: scope.limit({"rpm": 5, "tpm": 6, "requests_max": 7}),
)

steps = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2), st.sampled_from(range(len(CHANGES)))),
        st.lists(
            st.tuples(st.lists(st.integers(0, 2), min_size=1, unique=True), st.integers(0, 99)),
            max_size=5,
        ),
    ),
    max_size=30,
)


def said(scope: BucketScope) -> LimitRow:
    """Return the row of a scope, from its attributes."""
    return LimitRow(
        dict(scope.limits),
        scope.held if "requests_max" in scope.limits else 0,
        scope.back_requests + max(0, -scope.untold_requests),
        max(0, scope.untold_requests),
        max(0, scope.untold_tokens),
        scope.back_tokens + max(0, -scope.untold_tokens),
    )


def told(scope: BucketScope) -> LimitRow:
    """Return the row of a scope in a batch that calls for it."""
    words = LimitBatch(b"12345678", [(Waiter(), (scope,), (), 1)], []).command()
    (row,) = limit_rows(cast("bytes", words[-3]))
    return without_idle_held(row)


def without_idle_held(row: LimitRow) -> LimitRow:
    """Return a row as the script reads it: how many are held counts where that is limited."""
    return row if "requests_max" in row.limits else row._replace(held=0)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("limits", LIMITS)
def test_every_change_is_told_once(
    limits: dict[str, int], change: Callable[[BucketScope], None]
) -> None:
    scope = BucketScope("s", "", **limits)
    scope.held = 9
    assert told(scope).limits == limits
    change(scope)
    expected = said(scope)
    assert told(scope) == expected
    assert told(scope) == LimitRow(expected.limits, expected.held)


@given(steps=steps)
def test_rows_equal_their_scopes(
    steps: list[tuple[int, int] | list[tuple[list[int], int]]],
) -> None:
    scopes = [BucketScope(f"s{index}", "", **limits) for index, limits in enumerate(LIMITS)]
    for scope in scopes:
        scope.held = 99
    for step in steps:
        if isinstance(step, tuple):
            CHANGES[step[1]](scopes[step[0]])
            continue
        calls: list[Call] = [
            (Waiter(), tuple(scopes[index] for index in places), (), tokens)
            for places, tokens in step
        ]
        others = [scope for scope in scopes if scope.back_tokens]
        expected = {scope.name: said(scope) for scope in scopes}
        words = LimitBatch(b"12345678", calls, others).command()
        names = cast("tuple[bytes, ...]", words[3 : 3 + cast("int", words[2])])
        rows, packed, asked = cast("tuple[bytes, bytes, int]", words[-3:])
        assert len(set(names)) == len(names)
        called = {f"s{index}".encode() for places, _ in step for index in places}
        assert set(names[:asked]) == called
        assert [without_idle_held(row) for row in limit_rows(rows)] == [
            expected[name.decode()] for name in names
        ]
        assert [
            (need, *(names[row - 1].decode() for row in of if row))
            for need, *of in CALL.iter_unpack(packed)
        ] == [(tokens, *(f"s{index}" for index in places)) for places, tokens in step]
        assert {scope.name for scope in others} <= {name.decode() for name in names}
        assert all(not scope.row for scope in scopes)
        assert not any(said(scope)[2:] != (0, 0, 0, 0) for scope in others)
