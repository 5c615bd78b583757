"""Builds the body of a notice for each kind of receiver, such as Slack or e-mail. Pure."""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Any

from control_plane.alerts.model import NAME, GroupStatus, rank

PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
_SHOWN_MAX = 20  # Largest number of alerts listed in a text. Further alerts are only counted.
_PAGERDUTY = {1: "critical", 2: "error", 3: "warning"}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeAlert:
    """An alert in a notice.

    Attributes:
        labels: Labels of the alert.
        annotations: Summary, description and runbook_url of the alert.
        starts_at: Time at which the alert began to fire, in RFC 3339.
        ends_at: Time at which the alert ended, or empty while it fires.
    """

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: str
    ends_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice about a group of alerts.

    Attributes:
        group: Key of the group.
        status: Whether any alert of the group fires.
        alerts: Alerts that fire. The last notice of a group contains the alerts that have ended.
    """

    group: str
    status: GroupStatus
    alerts: Sequence[NoticeAlert]

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of the first alert. All alerts of a group have the same name and severity."""
        return self.alerts[0].labels if self.alerts else {}

    @property
    def title(self) -> str:
        """The title of the notice, in one line."""
        name = self.labels.get(NAME) or self.group.rpartition("/")[0]
        count = f" ({len(self.alerts)})" if len(self.alerts) > 1 else ""
        summary = self.alerts[0].annotations.get("summary", "") if self.alerts else ""
        is_over = "" if self.status is GroupStatus.FIRING else "over: "
        return f"[P{rank(self.labels)}] {is_over}{name}{count}{': ' if summary else ''}{summary}"

    @property
    def text(self) -> str:
        """The text of the notice, with one line per alert and the links to runbooks."""
        lines = [_line(alert) for alert in self.alerts[:_SHOWN_MAX]]
        if len(self.alerts) > _SHOWN_MAX:
            lines.append(f"and {len(self.alerts) - _SHOWN_MAX} more")
        runbooks = {alert.annotations.get("runbook_url", "") for alert in self.alerts} - {""}
        return "\n".join([*lines, *(f"Runbook: {url}" for url in sorted(runbooks))])


def _line(alert: NoticeAlert) -> str:
    labels = ", ".join(f"{k}={v}" for k, v in sorted(alert.labels.items()) if k != NAME)
    said = alert.annotations.get("description") or alert.annotations.get("summary", "")
    return f"{said} ({labels}) since {alert.starts_at}".strip()


def webhook(notice: Notice) -> Json:
    """Return the body for a generic webhook."""
    return {
        "version": "1",
        "group": notice.group,
        "status": str(notice.status),
        "title": notice.title,
        "alerts": [
            {
                "status": str(notice.status),
                "labels": dict(alert.labels),
                "annotations": dict(alert.annotations),
                "starts_at": alert.starts_at,
                "ends_at": alert.ends_at or None,
            }
            for alert in notice.alerts
        ],
    }


def slack(notice: Notice) -> Json:
    """Return the body for an incoming webhook of Slack, Mattermost or compatible servers."""
    colour = "good" if notice.status is GroupStatus.RESOLVED else "danger"
    text = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {
        "text": notice.title,
        "attachments": [{"color": colour, "text": text, "fallback": notice.title}],
    }


def pagerduty(notice: Notice, routing_key: str, source: str) -> Json:
    """Return an event of PagerDuty's Events API v2, in which a group is one incident."""
    is_firing = notice.status is GroupStatus.FIRING
    event: Json = {
        "routing_key": routing_key,
        "event_action": "trigger" if is_firing else "resolve",
        "dedup_key": f"sluice/{notice.group}"[:255],
    }
    if not is_firing:
        return event
    runbooks = {alert.annotations.get("runbook_url", "") for alert in notice.alerts}
    return event | {
        "payload": {
            "summary": notice.title[:1024],
            "source": source,
            "severity": _PAGERDUTY[rank(notice.labels)],
            "component": notice.labels.get("job", "sluice"),
            "group": notice.group,
            "custom_details": {"alerts": [_line(it) for it in notice.alerts[:_SHOWN_MAX]]},
        },
        "links": [
            {"href": url, "text": "Runbook"} for url in sorted(runbooks) if url.startswith("http")
        ],
    }


def alertmanager(notice: Notice) -> list[Json]:
    """Return the body of POST /api/v2/alerts. Alertmanager then groups the alerts."""
    return [
        {
            "labels": dict(alert.labels),
            "annotations": dict(alert.annotations),
            "startsAt": alert.starts_at,
            **({"endsAt": alert.ends_at} if alert.ends_at else {}),
        }
        for alert in notice.alerts
    ]


def email(notice: Notice, sender: str, to: Sequence[str], message_id: str) -> EmailMessage:
    """Return the e-mail of a notice. All e-mails about a group belong to one thread."""
    message = EmailMessage()
    message["Subject"] = " ".join(notice.title.split())
    message["From"], message["To"] = sender, ", ".join(to)
    message["Message-ID"] = f"<{message_id}@sluice.invalid>"
    message["References"] = (
        f"<{hashlib.sha256(notice.group.encode()).hexdigest()[:32]}@sluice.invalid>"
    )
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(notice.text or notice.title)
    return message


def signature(secret: str, body: bytes, now_s: int) -> str:
    """Return the header that proves sender and time of a body, an HMAC-SHA256 of `TIME.BODY`."""
    mac = hmac.new(secret.encode(), f"{now_s}.".encode() + body, hashlib.sha256)
    return f"t={now_s},v1={mac.hexdigest()}"


def encoded(body: object) -> bytes:
    """Return JSON in the exact form that is signed and sent."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def rfc3339(unix_ms: int) -> str:
    """Return a Unix time as an RFC 3339 text."""
    moment = datetime.fromtimestamp(unix_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
