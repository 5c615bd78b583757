import pytest

from sluice.ids import is_request_id, new_id, new_secret


def test_ids_are_unique_sortable_and_prefixed() -> None:
    ids = [new_id("req") for _ in range(1000)]
    assert len(set(ids)) == len(ids)
    assert all(len(i) == len("req_") + 26 for i in ids)
    assert sorted(i[:14] for i in ids) == [i[:14] for i in ids]


def test_secrets_carry_their_prefix_and_enough_randomness() -> None:
    assert new_secret("sk-sluice").startswith("sk-sluice-")
    assert len(new_secret("x")) >= 2 + 43
    assert new_secret("x") != new_secret("x")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("req_1", True), ("a.b:c-d", True), ("...", True), (".", False), ("..", False), ("", False)],
)
def test_request_ids_are_segments_of_a_path(text: str, is_one: bool) -> None:
    assert is_request_id(text) is is_one
