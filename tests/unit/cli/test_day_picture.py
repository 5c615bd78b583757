"""The picture of a day, and the hours of `sluice scaling day`."""

from datetime import UTC, datetime
from xml.etree import ElementTree as ET

from cli.day_picture import Panel, picture
from cli.scaling_commands import hours_of

BEGIN = datetime(2026, 11, 28, tzinfo=UTC)


def test_a_line_has_a_gap_where_a_minute_is_unknown_and_no_point_twice() -> None:
    panel = Panel("Pool <a>", {"ready": [1, 2, 2, 2, None, 4]}, [False, True, False, False])
    drawn = ET.fromstring(picture([panel], BEGIN))
    texts = [it.text for it in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Pool <a>", "ready", "violated (1 minutes)", "00:00"} <= set(texts)
    (path,) = [
        it.get("d", "")
        for it in drawn.iter("{http://www.w3.org/2000/svg}path")
        if it.get("stroke-width")
    ]
    assert (path.count("M"), path.count("L")) == (2, 2)


def test_an_hour_has_the_most_replicas_and_the_mean_demand() -> None:
    unknown = [None] * 30
    found = {
        "from": "2026-11-28T05:30:00+00:00",
        "missing": "",
        "wanted": [3] * 30 + unknown + [4] * 30,
        "ready": [2] * 30 + unknown + [4] * 30,
        "asleep": [0] * 90,
        "demand": [1.0, 2.0] * 15 + unknown + [3.5] * 30,
        "requests": [1] * 90,
        "violated": [False] * 89 + [True],
    }
    first, second = hours_of(found)
    assert first["hour"] == "2026-11-28 05:30"
    assert (first["wanted"], first["ready"], first["demand"]) == (3, 2, 1.5)
    assert (second["hour"], second["wanted"]) == ("2026-11-28 06:00", 4)
    assert (first["requests"], second["requests"], second["violated"]) == (30, 60, 1)
    without = hours_of(found | {"missing": "away", "requests": [], "violated": []})
    assert {(it["requests"], it["violated"]) for it in without} == {(None, None)}
