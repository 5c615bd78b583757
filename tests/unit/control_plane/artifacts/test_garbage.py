"""What is collected: only what nobody has needed for the grace time, and still does not."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from control_plane.artifacts import garbage
from control_plane.artifacts.garbage import ArtifactUse, decide

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GRACE, SETTLE = timedelta(hours=1), timedelta(minutes=1)


def use(*, is_needed: bool = False, since_s: float | None = None, retired_s: float | None = None):
    def moment(ago_s: float | None) -> datetime | None:
        return None if ago_s is None else NOW - timedelta(seconds=ago_s)

    return ArtifactUse("d", is_needed, moment(since_s), moment(retired_s))


def fate(one: ArtifactUse) -> str:
    decision = decide([one], NOW, GRACE, SETTLE)
    found = [name for name in decision.__slots__ if getattr(decision, name)]
    assert len(found) <= 1
    return found[0] if found else "kept"


def test_the_life_of_an_artifact() -> None:
    assert fate(use(is_needed=True)) == "kept"
    assert fate(use()) == "noticed"
    assert fate(use(since_s=3599)) == "kept"
    assert fate(use(since_s=3600)) == "retired"
    assert fate(use(since_s=9999, retired_s=59)) == "kept"
    assert fate(use(since_s=9999, retired_s=60)) == "removed"
    assert fate(use(is_needed=True, since_s=9999)) == "needed"
    assert fate(use(is_needed=True, since_s=9999, retired_s=9999)) == "needed"


AGES = st.none() | st.floats(0, 10_000)


@given(st.booleans(), AGES, AGES)
def test_a_needed_artifact_is_never_removed(is_needed: bool, since_s, retired_s) -> None:
    found = fate(use(is_needed=is_needed, since_s=since_s, retired_s=retired_s))
    if is_needed:
        assert found in {"kept", "needed"}
    if found == "removed":
        assert retired_s is not None
        assert retired_s >= SETTLE.total_seconds()
    if found == "retired":
        assert since_s >= GRACE.total_seconds()


@given(
    st.booleans(),
    st.none() | st.integers(0, 10_000),
    st.none() | st.integers(0, 10_000),
)
def test_the_forecast_of_garbage_equals_its_fate(
    is_needed: bool, since_s: int | None, retired_s: int | None
) -> None:
    one = use(is_needed=is_needed, since_s=since_s, retired_s=retired_s)
    told = garbage.fate(one, NOW, GRACE, SETTLE)
    happens = fate(one)
    expected = {"noticed": "noticed", "retired": "due", "removed": "due", "needed": "kept"}
    if happens != "kept":
        assert (told.state, told.at) == (expected[happens], None)
    elif not is_needed:
        assert told.state == ("grace" if retired_s is None else "retired")
        assert told.at is not None
        assert told.at > NOW
        later = decide([one], told.at, GRACE, SETTLE)
        assert later.retired + later.removed == ["d"]
