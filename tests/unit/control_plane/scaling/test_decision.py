"""Tests the warning of a decision that is old."""

from control_plane.scaling.decision import age_warnings


def test_a_plan_that_no_control_plane_renews_is_told() -> None:
    assert age_warnings(0.0, 15.0) == age_warnings(59.0, 15.0) == []
    assert age_warnings(29.0, 1.0) == [], "a slow round is no outage"
    (told,) = age_warnings(180.0, 15.0)
    assert told.startswith("this plan is 180 s old")
