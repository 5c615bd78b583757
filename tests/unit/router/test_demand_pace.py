"""The pace of demand reports: an unchanged report is sent at every third interval."""

from router.core.types.work import TierWork, WorkReport
from router.demand_reports import ReportPace, packed


def report(number: int, *, requests: int = 0) -> WorkReport:
    tiers = {1: TierWork(requests=requests)}
    return WorkReport("cell", 1, number, tiers, {}, 0, 1, None, 0.0)


def test_an_unchanged_report_is_sent_at_every_third_interval() -> None:
    pace = ReportPace()
    sent = [number for number in range(9) if pace.is_due(packed("router", [report(number)]))]
    assert sent == [0, 3, 6]


def test_a_changed_report_is_sent_at_once() -> None:
    pace = ReportPace()
    assert pace.is_due(packed("router", [report(1)]))
    assert not pace.is_due(packed("router", [report(2)]))
    assert pace.is_due(packed("router", [report(3, requests=1)]))
    assert not pace.is_due(packed("router", [report(4, requests=1)]))


def test_the_report_after_a_lost_one_is_sent() -> None:
    pace = ReportPace()
    assert pace.is_due(packed("router", [report(1)]))
    pace.failed()
    assert pace.is_due(packed("router", [report(2)]))
