"""Tags of objects, and the conditions of writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.http.etags import check, etag, is_known
from sluice.errors import BadRequestError, ErrorCode, PlatformError

OBJECT = {"id": "a", "limits": {"rpm": 1, "tpm": 2}, "name": "Zoë"}
OTHER = OBJECT | {"name": "Zoe"}
TAG, OTHER_TAG = etag(OBJECT), etag(OTHER)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON))
def test_a_tag_does_not_depend_on_the_order(shown) -> None:
    tag = etag(shown)
    assert etag(dict(reversed(shown.items()))) == tag
    assert etag(shown | {"one more": 1}) != tag
    check({"If-Match": tag}, shown)


@pytest.mark.parametrize(
    ("headers", "shown", "is_refused"),
    [
        ({}, OBJECT, False),
        ({}, None, False),
        ({"If-Match": TAG}, OBJECT, False),
        ({"If-Match": f"{OTHER_TAG} , {TAG}"}, OBJECT, False),
        ({"If-Match": "*"}, OBJECT, False),
        ({"If-Match": "*"}, None, True),
        ({"If-Match": TAG}, None, True),
        ({"If-Match": TAG}, OTHER, True),
        ({"If-Match": f"W/{TAG}"}, OBJECT, True),
        ({"If-None-Match": "*"}, None, False),
        ({"If-None-Match": "*"}, OBJECT, True),
        ({"If-None-Match": TAG}, OBJECT, True),
        ({"If-None-Match": TAG}, OTHER, False),
    ],
)
def test_conditions(headers, shown, is_refused: bool) -> None:
    try:
        check(headers, shown)
    except PlatformError as error:
        assert (is_refused, error.code) == (True, ErrorCode.PRECONDITION_FAILED)
        assert error.param in headers
        assert "read it" in error.message
    else:
        assert not is_refused


@pytest.mark.parametrize("header", ["", "abc", '"a" "b"', '"a', "*,*", f"{TAG},"])
def test_malformed_tags_are_refused(header: str) -> None:
    with pytest.raises(BadRequestError, match="If-Match"):
        check({"If-Match": header}, OBJECT)
    assert not is_known({"If-None-Match": header.replace(TAG, "")}, TAG)


def test_a_known_tag_means_an_unchanged_object() -> None:
    assert is_known({"If-None-Match": TAG}, TAG)
    assert is_known({"If-None-Match": f'"x", W/{TAG}'}, TAG)
    assert not is_known({"If-None-Match": OTHER_TAG}, TAG)
    assert not is_known({}, TAG)
