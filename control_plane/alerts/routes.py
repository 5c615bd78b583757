"""REST of alerts, silences and incidents. Reports of alerts have Prometheus' form."""

import asyncio
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.access.roles import Action
from control_plane.alerts import repository
from control_plane.alerts.bodies import AlertNote, AlertReports, IncidentText, SilenceBody
from control_plane.alerts.tables import (
    alerts,
    incident_events,
    incidents,
    notifications,
    silences,
)
from control_plane.database import Database
from control_plane.fleet.node_routes import shown_times
from control_plane.http import describe
from control_plane.http.bodies import path_id, read_body
from control_plane.http.columns import columns
from control_plane.http.resources import Values, fetch, first, page, shown
from control_plane.http.routes import ACTOR, AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.ids import new_id

_BODY_TIMEOUT_S = 10.0
_EVENTS_MAX = 1000
# The content of a notice would only repeat labels. `receiver` and `group_key` identify the notice.
_NOTICE_FIELDS = (
    *("id", "receiver", "group_key", "status", "state", "attempts", "told_at", "error"),
    "fingerprints",
)
_ALERT = tuple(alerts.c.keys())
_SILENCE = tuple(silences.c.keys())
_INCIDENT = tuple(incidents.c.keys())
_EVENT = ("id", "at", "kind", "text", "actor")
_EVENTS = {"type": "array", "items": describe.shown(_EVENT, types=columns(incident_events))}


_NEW = describe.shown(("new",), types={"new": describe.INTEGER})


class AlertRoutes:
    """The request handlers of alerts, silences and incidents."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes."""
        return [*self._reads(), *self._changes()]

    def _reads(self) -> list[AdminRoute]:
        read, told = Action.READ_PLATFORM, describe.operation
        alert = describe.shown(_ALERT, types=columns(alerts))
        silence = describe.shown(_SILENCE, types=columns(silences) | _MATCHERS)
        incident = describe.shown(_INCIDENT, types=columns(incidents))
        whole = describe.shown((*_INCIDENT, "events"), types=columns(incidents) | _WHOLE)
        sent = describe.shown(_NOTICE_FIELDS, types=columns(notifications))
        listed = describe.listing
        alert_filters = ("is_firing", "name", "incident_id")
        return [
            AdminRoute(
                "GET",
                "/v1/alerts",
                self.list_alerts,
                read,
                "alerts",
                listed("List alerts, the newest first", alert, alert_filters),
            ),
            AdminRoute(
                "GET",
                "/v1/alerts/{id}",
                self.show_alert,
                read,
                "alerts",
                told("Show an alert", answer=alert),
            ),
            AdminRoute(
                "GET",
                "/v1/alert-silences",
                self.list_silences,
                read,
                "alert-silences",
                listed("List silences, the newest first", silence),
            ),
            AdminRoute(
                "GET",
                "/v1/alert-notifications",
                self.list_notifications,
                read,
                "alert-notifications",
                listed("List the last notice of each group to each receiver", sent),
            ),
            AdminRoute(
                "GET",
                "/v1/incidents",
                self.list_incidents,
                read,
                "incidents",
                listed("List incidents, the newest first", incident, ("is_open",)),
            ),
            AdminRoute(
                "GET",
                "/v1/incidents/{id}",
                self.show_incident,
                read,
                "incidents",
                told("Show an incident and its events", answer=whole),
            ),
        ]

    def _changes(self) -> list[AdminRoute]:
        write, told = Action.WRITE_FLEET, describe.operation
        alert = describe.shown(_ALERT, types=columns(alerts))
        silence = describe.shown(_SILENCE, types=columns(silences) | _MATCHERS)
        incident = describe.shown(_INCIDENT, types=columns(incidents))
        summary = "Report alerts, as Prometheus does to an Alertmanager (API v2)"
        report = told(summary, answer=_NEW)
        return [
            AdminRoute(
                "POST",
                "/v1/alertmanager/api/v2/alerts",
                self.report,
                write,
                "alerts",
                report,
                is_audited=False,  # rules send the reports, so they are not an operator's action
            ),
            AdminRoute(
                "POST",
                "/v1/alerts/{id}/acknowledge",
                self.acknowledge,
                write,
                "alerts",
                told("Acknowledge an alert", answer=alert, body=AlertNote),
            ),
            AdminRoute(
                "POST",
                "/v1/alert-silences",
                self.silence,
                write,
                "alert-silences",
                told("Silence alerts for a while", answer=silence, status=201, body=SilenceBody),
            ),
            AdminRoute(
                "DELETE",
                "/v1/alert-silences/{id}",
                self.unsilence,
                write,
                "alert-silences",
                told("End a silence"),
            ),
            AdminRoute(
                "POST",
                "/v1/incidents/{id}/notes",
                self.note,
                write,
                "incidents",
                told("Add a note to an incident", answer=incident, body=IncidentText),
            ),
            AdminRoute(
                "POST",
                "/v1/incidents/{id}/close",
                self.close,
                write,
                "incidents",
                told("Close an incident with its cause", answer=incident, body=IncidentText),
            ),
        ]

    async def list_alerts(self, request: web.Request) -> web.Response:
        """Return a page of alerts."""
        query = select(alerts)
        if (wanted := _flag(request, "is_firing")) is not None:
            query = query.where(alerts.c.is_firing == wanted)
        for name in ("name", "incident_id"):
            if (value := request.query.get(name)) is not None:
                query = query.where(alerts.c[name] == value.replace("\0", ""))
        key = alerts.c.id
        return await page(self._database, query, key, request, shown_times, newest_first=True)

    async def show_alert(self, request: web.Request) -> web.Response:
        """Return an alert."""
        key = path_id(request)
        rows = await fetch(self._database, select(alerts).where(alerts.c.id == key))
        if not rows:
            raise _missing("alerts", key)
        return shown(request, shown_times(rows[0]))

    async def list_silences(self, request: web.Request) -> web.Response:
        """Return a page of silences."""
        query, key = select(silences), silences.c.id
        return await page(self._database, query, key, request, shown_times, newest_first=True)

    async def list_notifications(self, request: web.Request) -> web.Response:
        """Return a page of notices to receivers, with their delivery state."""
        t = notifications.c
        query = select(*(t[column] for column in _NOTICE_FIELDS))
        return await page(self._database, query, t.id, request, shown_times)

    async def list_incidents(self, request: web.Request) -> web.Response:
        """Return a page of incidents."""
        query = select(incidents)
        if (wanted := _flag(request, "is_open")) is not None:
            query = query.where(incidents.c.is_open == wanted)
        key = incidents.c.id
        return await page(self._database, query, key, request, shown_times, newest_first=True)

    async def show_incident(self, request: web.Request) -> web.Response:
        """Return an incident with its first events."""
        key = path_id(request)
        rows = await fetch(self._database, select(incidents).where(incidents.c.id == key))
        if not rows:
            raise _missing("incidents", key)
        t = incident_events.c
        query = select(*(t[name] for name in _EVENT)).where(t.incident_id == key)
        events = await fetch(self._database, query.order_by(t.at, t.id).limit(_EVENTS_MAX))
        body = shown_times(rows[0]) | {"events": [shown_times(event) for event in events]}
        return shown(request, body)

    async def report(self, request: web.Request) -> web.Response:
        """Store a report of alerts in Prometheus' form."""
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                found = AlertReports.model_validate_json(await request.read()).root
        except TimeoutError:
            message = f"the body did not arrive within {_BODY_TIMEOUT_S:g} s; send it again"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message) from None
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in wrong["loc"])
            message = f"{where}: {wrong['msg']}" if where else wrong["msg"]
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message) from None

        async def work(connection: AsyncConnection) -> int:
            return await repository.report(connection, found)

        return web.json_response({"new": await self._database.run(work)})

    async def acknowledge(self, request: web.Request) -> web.Response:
        """Acknowledge an alert, so that its repetitions cause no further notices."""
        key, body = path_id(request), await read_body(request, AlertNote)

        async def work(write: Write) -> WriteReply:
            row = await _locked(write, alerts, "alerts", key)
            before = shown_times(row)
            actor = write.request[ACTOR].id
            values = {"acknowledged_by": actor, "note": body.note}
            after = await _update(
                write, alerts, key, values | {"acknowledged_at": func.clock_timestamp()}
            )
            if row["incident_id"]:
                text = f"{row['name']} acknowledged{': ' if body.note else ''}{body.note}"
                await repository.add_event(
                    write.connection, row["incident_id"], "acknowledged", text, actor
                )
            write.record("acknowledge", key, before, after, owners=[None])
            return WriteReply(after, key)

        return await self._writes.run(request, work)

    async def silence(self, request: web.Request) -> web.Response:
        """Create a silence (201)."""
        body = await read_body(request, SilenceBody)
        values: Values = {
            "matchers": [matcher.model_dump() for matcher in body.matchers],
            "reason": body.reason,
            "created_by": request[ACTOR].id,
        }

        async def work(write: Write) -> WriteReply:
            key = new_id("silence")
            ends_at = func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, body.duration_s)
            made = insert(silences).values(id=key, ends_at=ends_at, **values).returning(silences)
            row = (await write.connection.execute(made)).mappings().one()
            after = shown_times(dict(row))
            write.record("create", key, None, after, owners=[None])
            return WriteReply(after, key, 201)

        return await self._writes.run(request, work)

    async def unsilence(self, request: web.Request) -> web.Response:
        """End a silence (204)."""
        key = path_id(request)

        async def work(write: Write) -> WriteReply:
            before = shown_times(await _locked(write, silences, "alert-silences", key))
            after = await _update(write, silences, key, {"ends_at": func.clock_timestamp()})
            write.record("delete", key, before, after, owners=[None])
            return WriteReply(None, key, 204)

        return await self._writes.run(request, work)

    async def note(self, request: web.Request) -> web.Response:
        """Add an event to an incident."""
        return await self._add_note(request, closes=False)

    async def close(self, request: web.Request) -> web.Response:
        """Close an incident. A later page of the same group opens a new incident."""
        return await self._add_note(request, closes=True)

    async def _add_note(self, request: web.Request, *, closes: bool) -> web.Response:
        key, text = path_id(request), (await read_body(request, IncidentText)).text

        async def work(write: Write) -> WriteReply:
            row = await _locked(write, incidents, "incidents", key)
            before, actor = shown_times(row), write.request[ACTOR].id
            if closes and not row["is_open"]:
                message = f"incident {key} is closed already, by {row['closed_by']}"
                raise PlatformError(ErrorCode.CONFLICT, message)
            closed: Values = {
                "is_open": False,
                "closed_at": func.clock_timestamp(),
                "closed_by": actor,
                "text": text,
            }
            kind = "closed" if closes else "note"
            await repository.add_event(write.connection, key, kind, text, actor)
            after = await _update(write, incidents, key, closed) if closes else before
            write.record(
                "close" if closes else "note", key, before, after | {"text": text}, owners=[None]
            )
            return WriteReply(after, key)

        return await self._writes.run(request, work)


_MATCHERS: dict[str, Any] = {
    "matchers": {
        "type": "array",
        "items": describe.shown(("name", "operator", "value")),
    }
}
_WHOLE: dict[str, Any] = {"events": _EVENTS}


def _flag(request: web.Request, name: str) -> bool | None:
    text = request.query.get(name)
    if text in (None, "true", "false"):
        return None if text is None else text == "true"
    raise BadRequestError(ErrorCode.INVALID_REQUEST, f"{name}: send true or false", param=name)


async def _locked(write: Write, table: Any, kind: str, key: str) -> Values:
    row = await first(write.connection, select(table).where(table.c.id == key).with_for_update())
    if row is None:
        raise _missing(kind, key)
    return row


async def _update(write: Write, table: Any, key: str, values: Values) -> Values:
    change = update(table).where(table.c.id == key).values(values).returning(table)
    return shown_times(dict((await write.connection.execute(change)).mappings().one()))


def _missing(kind: str, key: str) -> PlatformError:
    return PlatformError(ErrorCode.NOT_FOUND, f"there is no {kind}/{key}")
