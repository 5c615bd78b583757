"""docs/api.md: the table of errors against the code that sends them."""

import re
from pathlib import Path

from sluice.errors import ErrorCode
from sluice.limits import METERED

ROOT = Path(__file__).parents[3]
# Nobody reads these answers: the client has gone, or does not take what it is sent.
UNREAD = {ErrorCode.CLIENT_CLOSED, ErrorCode.SLOW_READER}
# The gateway passes a router's codes on.
SENDERS = ("gateway", "router")
OF_LIMITS = {kind.code for kind in METERED}  # the gateway refuses by the table of kinds


def documented() -> dict[ErrorCode, int]:
    rows = re.findall(
        r"^\| (\d{3}) \| ([^|]+) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE
    )
    return {
        ErrorCode(code): int(status)
        for status, codes in rows
        for code in re.findall(r"`(\w+)`", codes)
    }


def named_in(package: str) -> set[ErrorCode]:
    return {
        ErrorCode[name]
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"\bErrorCode\.([A-Z]\w+)", path.read_text())
    }


def test_the_table_has_exactly_the_codes_that_the_gateway_sends():
    of_engines = {code for code in ErrorCode if code.policy.is_of_engine}
    sent = of_engines.union(OF_LIMITS, *(named_in(package) for package in SENDERS)) - UNREAD
    assert set(documented()) == sent


def test_the_statuses_are_right():
    assert {code: code.policy.status for code in documented()} == documented()


def test_every_code_is_used():
    used = OF_LIMITS.union(
        *(named_in(package) for package in (*SENDERS, "control_plane", "telemetry", "replica"))
    )
    assert used == set(ErrorCode)
    assert set(ErrorCode) == used


def test_links_between_the_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "training" / "README.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for name in re.findall(r"\bdocs/[\w-]+\.md", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
