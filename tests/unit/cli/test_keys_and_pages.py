"""When a key ends, as people say it; and lists that are longer than a page."""

import pytest
import typer

from cli.api import ApiClient
from cli.key_commands import duration_s, expiry_unix_ms
from cli.render import show_objects


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("30m", 1800), ("12h", 43_200), ("90d", 7_776_000), ("0s", 0)],
)
def test_durations(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds
    assert expiry_unix_ms(text, 1.5) == seconds * 1000 + 1500


@pytest.mark.parametrize(
    "text", ["", "1", "d", "1.5d", "-1d", "1 d", "1w", "9999999d", "2030-02-30"]
)
def test_malformed_times_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        expiry_unix_ms(text, 0)


def test_a_day_is_the_last_one_and_never_is_never() -> None:
    assert expiry_unix_ms("1970-01-01", 0) == 86_400_000
    assert expiry_unix_ms("2024-02-29", 0) == 1_709_251_200_000  # 2024-03-01T00:00:00Z
    assert expiry_unix_ms("never", 5) == 0


class Pages(ApiClient):
    """A list of 5 tiers, two at a time."""

    asked: list[dict[str, object]]

    async def call(self, method, path, body=None, query=None) -> dict[str, object]:
        self.asked.append(dict(query))
        ids = [name for name in "abcde" if name > query.get("after", "")]
        size = query.get("limit", 2)
        return {"data": [{"id": name} for name in ids[:size]], "has_more": len(ids) > size}


async def test_a_list_is_followed_to_its_end_unless_it_is_limited() -> None:
    async with Pages("http://127.0.0.1:1", "key") as api:
        api.asked = []
        found = await api.list("/v1/tiers", kind="x")
        assert [tier["id"] for tier in found] == list("abcde")
        assert api.asked == [
            {"kind": "x"},
            {"kind": "x", "after": "b"},
            {"kind": "x", "after": "d"},
        ]
        assert len(await api.list("/v1/tiers", limit=3)) == 3


async def test_a_limit_may_be_more_than_a_page(monkeypatch) -> None:
    monkeypatch.setattr("cli.api._PAGE_MAX", 2)
    async with Pages("http://127.0.0.1:1", "key") as api:
        api.asked = []
        found = await api.list("/v1/tiers", limit=3)
        assert [tier["id"] for tier in found] == list("abc")
        assert api.asked == [{"limit": 2}, {"limit": 1, "after": "b"}]


def test_lists_and_limits_in_a_table(capsys) -> None:
    row = {"a": ["x", "y"], "b": {"rpm": 5, "tpm": 6}, "c": [], "d": {}}
    show_objects([row], ("a", "b", "c", "d"), as_json=False)
    line = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert "x, y" in line
    assert "rpm=5, tpm=6" in line
    assert line.split()[-2:] == ["-", "-"]
