"""Alerts from report to receiver: a real database, real HTTP and SMTP servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.alerts import repository
from control_plane.alerts.bodies import AlertReport
from control_plane.alerts.notices import signature
from control_plane.alerts.receivers import Receiver
from control_plane.alerts.service import AlertService
from control_plane.alerts.tables import alerts, incidents, notifications
from control_plane.database import Database

pytestmark = [pytest.mark.real, pytest.mark.asyncio]

PAGE = {"alertname": "NoRouter", "severity": "P1", "instance": "g:1"}


class Inbox:
    """An HTTP server that keeps what is posted, and answers what it is told to."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, Any, dict[str, str], bytes]] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        payload = await request.read()
        self.bodies.append((request.path, json.loads(payload), dict(request.headers), payload))
        status, headers = self.answers.pop(0) if self.answers else (202, {})
        return web.Response(status=status, headers=headers)


@pytest_asyncio.fixture
async def inbox() -> AsyncIterator[Inbox]:
    found, app = Inbox(), web.Application()
    app.router.add_post("/{path:.*}", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest_asyncio.fixture
async def mailbox() -> AsyncIterator[tuple[str, list[str]]]:
    """An SMTP server; yields its URL and the messages that it took."""
    taken: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 here\r\n")
        while line := await reader.readline():
            word = line.split()[0].upper() if line.split() else b""
            if word == b"DATA":
                writer.write(b"354 go on\r\n")
                lines: list[bytes] = []
                while (part := await reader.readline()) not in (b".\r\n", b""):
                    lines.append(part)
                taken.append(b"".join(lines).decode())
            writer.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"smtp://127.0.0.1:{server.sockets[0].getsockname()[1]}", taken


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = Database(database_url)
    yield found
    await found.close()


Report = Callable[..., Awaitable[int]]


@pytest_asyncio.fixture
async def report(database: Database) -> Report:
    async def tell(labels: dict[str, str], *, is_over: bool = False) -> int:
        now = datetime.now(UTC)
        one = AlertReport(
            labels=labels,
            annotations={"summary": "No router"},
            startsAt=now - timedelta(seconds=60),
            endsAt=now if is_over else None,
        )
        return await database.run(lambda connection: repository.report(connection, [one]))

    return tell


async def rows(database: Database, table: Any) -> list[dict[str, Any]]:
    async def read(connection: AsyncConnection) -> list[dict[str, Any]]:
        return [dict(row) for row in (await connection.execute(select(table))).mappings()]

    return await database.run(read)


async def test_an_alert_reaches_every_kind_of_receiver_and_so_does_its_end(
    database, report, inbox, mailbox
) -> None:
    url, mails = mailbox
    local = {"is_internal": True}
    receivers = [
        Receiver(name="hook", kind="webhook", url=f"{inbox.url}/hook", secret="s3cret", **local),
        Receiver(name="chat", kind="slack", url=f"{inbox.url}/chat", **local),
        Receiver(name="duty", kind="pagerduty", url=f"{inbox.url}/duty", secret="key", **local),
        Receiver(name="am", kind="alertmanager", url=inbox.url, **local),
        Receiver(
            name="mail", kind="email", url=url, sender="a@b.example", to=("c@d.example",), **local
        ),
    ]
    service = AlertService(database, receivers)
    assert await report(PAGE) == 1
    assert await report(PAGE) == 0, "the same alert again is no new one"
    await service.step()
    await service.step()
    by_path = {path: (body, headers, raw) for path, body, headers, raw in inbox.bodies}
    assert len(inbox.bodies) == 4, "each is told once"
    body, headers, raw = by_path["/hook"]
    assert body["alerts"][0]["labels"] == PAGE
    shown = headers["Sluice-Signature"]
    at_s = int(shown.partition(",")[0].removeprefix("t="))
    assert shown == signature("s3cret", raw, at_s)
    assert "NoRouter" in by_path["/chat"][0]["text"]
    assert by_path["/duty"][0]["event_action"] == "trigger"
    assert by_path["/api/v2/alerts"][0][0]["labels"] == PAGE
    assert len(mails) == 1
    assert "Subject: [P1] NoRouter: No router" in mails[0]
    (incident,) = await rows(database, incidents)
    assert incident["is_open"]
    inbox.bodies.clear()
    await report(PAGE, is_over=True)
    await service.step()
    by_path = {path: body for path, body, _, _ in inbox.bodies}
    assert by_path["/duty"]["event_action"] == "resolve"
    assert by_path["/hook"]["status"] == "resolved"
    assert by_path["/api/v2/alerts"][0]["endsAt"]
    assert "over: NoRouter" in mails[1]
    assert {row["state"] for row in await rows(database, notifications)} == {"sent"}


async def test_a_receiver_that_is_away_is_asked_again_and_one_that_refuses_is_not(
    database, report, inbox
) -> None:
    told: list[tuple[str, str]] = []
    hook = Receiver(name="hook", kind="webhook", url=inbox.url, secret="s", is_internal=True)
    service = AlertService(database, [hook], lambda *result: told.append(result))
    inbox.answers = [(503, {"Retry-After": "7"}), (202, {})]
    await report(PAGE)
    await service.step()
    (row,) = await rows(database, notifications)
    assert (row["state"], row["attempts"]) == ("pending", 1)
    assert "503" in row["error"]
    await service.step()
    assert len(inbox.bodies) == 1, "not before it asked to be asked"

    async def due(connection: AsyncConnection) -> None:
        await connection.execute(update(notifications).values(next_at_unix_ms=0))

    await database.run(due)
    await service.step()
    (row,) = await rows(database, notifications)
    assert (row["state"], row["attempts"]) == ("sent", 2)
    inbox.answers = [(400, {})]
    await report(PAGE | {"alertname": "Other"})
    await service.step()
    assert told == [("hook", "failed"), ("hook", "sent"), ("hook", "given_up")]


async def test_the_own_network_is_not_called_unless_that_is_allowed(
    database, report, inbox
) -> None:
    by_name = inbox.url.replace("127.0.0.1", "localhost")
    receivers = [
        Receiver(name=name, kind="webhook", url=url, secret="s")
        for name, url in (("literal", inbox.url), ("name", by_name))
    ]
    await report(PAGE)
    await AlertService(database, receivers).step()
    assert inbox.bodies == []
    found = await rows(database, notifications)
    assert {row["state"] for row in found} == {"failed"}
    assert all("is_internal" in row["error"] for row in found)


async def test_a_redirect_leads_nowhere(database, report, inbox) -> None:
    hook = Receiver(name="hook", kind="webhook", url=inbox.url, secret="s", is_internal=True)
    inbox.answers = [(302, {"Location": f"{inbox.url}/elsewhere"})]
    await report(PAGE)
    await AlertService(database, [hook]).step()
    assert [path for path, *_ in inbox.bodies] == ["/"]
    (row,) = await rows(database, notifications)
    assert row["state"] == "failed"


async def test_an_alert_that_is_not_reported_again_is_over(database, report) -> None:
    await report(PAGE)

    async def late(connection: AsyncConnection) -> None:
        past = datetime.now(UTC) - timedelta(seconds=1)
        await connection.execute(update(alerts).values(ends_at=past))

    await database.run(late)
    await AlertService(database, []).step()
    (row,) = await rows(database, alerts)
    assert not row["is_firing"]
    assert await report(PAGE) == 1, "the same labels later are another alert"


async def test_one_control_plane_of_two_tells(database, report, inbox) -> None:
    hook = Receiver(name="hook", kind="webhook", url=inbox.url, secret="s", is_internal=True)
    one, other = AlertService(database, [hook]), AlertService(database, [hook])
    await report(PAGE)
    await one.step()
    await other.step()
    assert len(inbox.bodies) == 1
