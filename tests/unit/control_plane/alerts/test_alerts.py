"""Who is told of what alert, when, and in which words; and which addresses are called."""

import hashlib
import hmac
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.alerts import notices
from control_plane.alerts.bodies import MatcherBody
from control_plane.alerts.model import (
    ATTEMPTS_MAX,
    JOIN_MS,
    REPEAT_MS,
    WAIT_MS,
    AlertMatcher,
    GroupAlert,
    GroupStatus,
    ToldGroup,
    fingerprint,
    group_of,
    is_silenced,
    opens_incident,
    rank,
    retry_after_ms,
    telling,
)
from control_plane.alerts.notices import Notice, NoticeAlert
from control_plane.alerts.receivers import ReceiversError, read_receivers, refusal

LABELS = {"alertname": "NoRouter", "severity": "P1", "instance": "<a&b>"}
A, B = GroupAlert(fingerprint="a", since_ms=0), GroupAlert(fingerprint="b", since_ms=0)
ONE = NoticeAlert(
    labels=LABELS,
    annotations={"summary": "No router", "runbook_url": "https://runbooks.example/NoRouter"},
    starts_at="2026-11-26T05:43:00.000Z",
)
FIRING = Notice(group="NoRouter/P1", status=GroupStatus.FIRING, alerts=[ONE])
OVER = Notice(group="NoRouter/P1", status=GroupStatus.RESOLVED, alerts=[ONE])


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=6))
def test_the_order_of_labels_names_nothing_else(labels: dict[str, str]) -> None:
    assert fingerprint(labels) == fingerprint(dict(reversed(labels.items())))
    assert fingerprint(labels) != fingerprint(labels | {"other": "label"})


def test_pages_and_rollouts_sent_back_open_incidents() -> None:
    assert opens_incident({"alertname": "X", "severity": "critical"})
    assert opens_incident({"alertname": "RolloutRolledBack", "severity": "P2"})
    assert not opens_incident({"alertname": "X", "severity": "P2"})
    assert [rank({"severity": it}) for it in ("P1", "page", "p2", "P3", "", "?")] == [
        *(1, 1, 2, 3, 3, 3)
    ]
    assert group_of(LABELS) == "NoRouter/P1"


@pytest.mark.parametrize(
    ("firing", "told", "now_ms", "status"),
    [
        ([A], None, WAIT_MS - 1, None),
        ([A], None, WAIT_MS, GroupStatus.FIRING),
        ([], None, WAIT_MS, None),
        ([A], (("a",), 0), REPEAT_MS - 1, None),
        ([A], (("a",), 0), REPEAT_MS, GroupStatus.FIRING),
        ([A, B], (("a",), 0), JOIN_MS - 1, None),
        ([A, B], (("a",), 0), JOIN_MS, GroupStatus.FIRING),
        ([A], (("a", "b"), 0), JOIN_MS, None),
        ([], (("a",), 0), 1, GroupStatus.RESOLVED),
        ([], ((), 0), REPEAT_MS, None),
        ([A], ((), 0), WAIT_MS, GroupStatus.FIRING),
    ],
)
def test_a_group_is_sent_at_its_time(firing, told, now_ms, status) -> None:
    before = None
    if told is not None:
        before = ToldGroup(fingerprints=frozenset(told[0]), told_ms=told[1])
    assert telling(firing, before, now_ms) is status


def test_an_acknowledged_alert_is_not_repeated() -> None:
    seen = GroupAlert(fingerprint="a", since_ms=0, is_acknowledged=True)
    told = ToldGroup(fingerprints=frozenset("a"), told_ms=0)
    assert telling([seen], told, 9 * REPEAT_MS) is None
    assert telling([seen, B], told, JOIN_MS) is GroupStatus.FIRING


@given(st.integers(0, 50), st.integers(0, 10**9))
def test_tries_end_and_pauses_are_bounded(attempts: int, asked_ms: int) -> None:
    wait_ms = retry_after_ms(attempts, asked_ms)
    assert (wait_ms is None) == (attempts >= ATTEMPTS_MAX)
    assert wait_ms is None or 1000 <= wait_ms <= 300_000


def test_a_silence_needs_all_its_matchers_and_at_least_one() -> None:
    name = AlertMatcher("alertname", "=", "NoRouter")
    assert is_silenced(LABELS, [[name]])
    assert not is_silenced(LABELS, [[]])
    assert not is_silenced(LABELS, [[name, AlertMatcher("severity", "!=", "P1")]])
    assert is_silenced(
        LABELS, [[AlertMatcher("alertname", "=~", "No.*"), AlertMatcher("x", "=", "")]]
    )
    assert not is_silenced(LABELS, [[AlertMatcher("alertname", "=~", "Router")]])
    assert is_silenced(LABELS, [[AlertMatcher("alertname", "!~", "Router")]])


@pytest.mark.parametrize("value", ["(a+)+", "(a*)*b", r"(a)\1", "(", "(?=a)b"])
def test_a_pattern_that_takes_long_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        MatcherBody(name="a", operator="=~", value=value)
    MatcherBody(name="a", operator="=", value=value)


def test_notices_have_the_form_of_their_receiver() -> None:
    body = json.loads(notices.encoded(notices.webhook(FIRING)))
    assert (body["status"], body["alerts"][0]["labels"]) == ("firing", LABELS)
    assert "&lt;a&amp;b&gt;" in notices.slack(FIRING)["attachments"][0]["text"]
    event = notices.pagerduty(FIRING, "key", "here")
    assert (event["event_action"], event["payload"]["severity"]) == ("trigger", "critical")
    over = notices.pagerduty(OVER, "key", "here")
    assert (over["event_action"], over["dedup_key"]) == ("resolve", event["dedup_key"])
    mail = notices.email(FIRING, "a@b.example", ["c@d.example"], "1")
    assert mail["Subject"] == "[P1] NoRouter: No router"
    assert "https://runbooks.example/NoRouter" in mail.get_content()


def test_no_label_gets_into_the_head_of_a_mail() -> None:
    evil = NoticeAlert(
        labels=LABELS,
        annotations={"summary": "a\r\nBcc: all@example.com"},
        starts_at=ONE.starts_at,
    )
    notice = Notice(group="x/P1", status=GroupStatus.FIRING, alerts=[evil])
    mail = notices.email(notice, "a@b.example", ["c@d.example"], "1")
    assert mail["Bcc"] is None
    assert "\n" not in mail["Subject"]


def test_a_signature_proves_body_and_time() -> None:
    body = b'{"a":1}'
    shown = notices.signature("secret", body, 7)
    expected = hmac.new(b"secret", b"7." + body, hashlib.sha256).hexdigest()
    assert shown == f"t=7,v1={expected}"


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "fd00::1", "fe80::1%e"),
        *("::ffff:127.0.0.1", "100.64.0.1"),
    ],
)
def test_the_own_network_is_called_only_where_that_is_allowed(address: str) -> None:
    assert "is_internal" in refusal(address, is_internal=False)
    assert refusal(address, is_internal=True) == ""


def test_unroutable_addresses_are_never_called() -> None:
    for address in ("0.0.0.0", "224.0.0.1", "::"):
        assert refusal(address, is_internal=True)
    assert refusal("8.8.8.8", is_internal=False) == ""


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"name": "a"}, "list"),
        ([{"name": "a", "kind": "fax"}], "kind"),
        ([{"name": "a", "kind": "webhook", "url": "https://a"}], "secret"),
        ([{"name": "a", "kind": "slack", "url": "ftp://a"}], "https://"),
        ([{"name": "a", "kind": "email", "url": "smtp://a:25"}], "sender"),
        ([{"name": "a", "kind": "slack", "url": "https://a"}] * 2, "one name"),
        ([{"name": "a", "kind": "slack", "url": "https://a", "hidden-7": 1}], "hidden"),
    ],
)
def test_a_file_of_receivers_names_its_mistake(tmp_path: Path, entries, word) -> None:
    file = tmp_path / "receivers.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(ReceiversError, match=word):
        read_receivers(file)


def test_secrets_of_receivers_are_in_no_text(tmp_path: Path) -> None:
    file = tmp_path / "receivers.json"
    entry = {"name": "a", "kind": "pagerduty", "secret": "deadbeef-secret"}
    file.write_text(json.dumps([entry]))
    assert "deadbeef" not in repr(read_receivers(file))
    file.write_text(json.dumps([entry | {"kind": "fax"}]))
    with pytest.raises(ReceiversError) as told:
        read_receivers(file)
    assert "deadbeef" not in str(told.value)
    assert read_receivers(None) == ()
