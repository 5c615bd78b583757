"""REST of garbage, which shows each artifact's next removal step and runs sweeps on request."""

from datetime import datetime
from typing import Any

from aiohttp import web
from sqlalchemy import (
    ColumnElement,
    FromClause,
    Select,
    Subquery,
    func,
    literal,
    select,
    union_all,
)

from control_plane.access.roles import Action
from control_plane.artifacts.garbage import ArtifactUse, fate
from control_plane.artifacts.model import LIVE_STATES
from control_plane.artifacts.service import Artifacts
from control_plane.artifacts.sweep import Swept, needed
from control_plane.artifacts.tables import artifact_uploads, artifacts
from control_plane.database import Database
from control_plane.http import describe
from control_plane.http.resources import page
from control_plane.http.routes import AdminRoute
from control_plane.http.writes import Write, WriteReply, Writes
from control_plane.tables import bases, models, releases
from sluice.errors import BadRequestError, ErrorCode

Values = dict[str, Any]
_KIND = "artifacts"
_WAIT_S = 8.0  # Seconds to wait for the end of a sweep. Clients wait at least 10 s.
_REASONS = ("model", "release", "base", "upload", "adapter")
_DONE = ("noticed", "needed", "retired", "removed")
SHOWN = (
    *("digest", "kind", "size_bytes", "state", "goes_at", "needed_by", "unreferenced_since"),
    "retired_at",
)
_TYPES = {"size_bytes": describe.INTEGER, "needed_by": describe.TEXTS}
_SWEPT = ("state", *_DONE, "chunks")


class GarbageRoutes:
    """The request handlers of garbage."""

    def __init__(self, database: Database, service: Artifacts) -> None:
        self._database = database
        self._service = service
        self._writes = Writes(database)

    def routes(self) -> list[AdminRoute]:
        """Return the routes, which must precede the routes of artifacts by digest."""
        listing = describe.listing(
            "List artifacts: kept or to be removed, and why",
            describe.shown(SHOWN, types=_TYPES),
            ("is_needed",),
        )
        sweep = describe.operation(
            "Remove due artifacts now (200 done, 202 it goes on)", answer=_swept(), also=(202,)
        )
        read, write = Action.READ_PLATFORM, Action.WRITE_FLEET
        return [
            AdminRoute("GET", "/v1/artifacts/garbage", self.list, read, _KIND, listing),
            AdminRoute("POST", "/v1/artifacts/sweeps", self.sweep, write, _KIND, sweep),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of artifacts with their next removal step."""
        query = _fates()
        match request.query.get("is_needed"):
            case None:
                pass
            case "true":
                query = query.where(needed())
            case "false":
                query = query.where(~needed())
            case _:
                message = "is_needed: send true or false"
                raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="is_needed")
        return await page(self._database, query, artifacts.c.digest, request, self._show)

    async def sweep(self, request: web.Request) -> web.Response:
        """Sweep at once, and wait a few seconds for the end. Grace times are not shortened."""
        sweeps = self._service.sweeps

        async def work(write: Write) -> WriteReply:
            write.record("sweep", _KIND, None, None, owners=[None])
            return WriteReply({"state": "asked"}, _KIND, 202)

        await self._writes.run(request, work)
        swept = await sweeps.request_sweep(_WAIT_S)
        body = _show_swept(swept)
        return web.json_response(body, status=200 if body["state"] == "done" else 202)

    def _show(self, row: Values) -> Values:
        graces = self._service.graces
        reasons = ["pinned"] if row["is_pinned"] else []
        reasons += [f"{name} {row[name]}".strip() for name in _REASONS if row[name] is not None]
        use = ArtifactUse(
            row["digest"], bool(reasons), row["unreferenced_since"], row["retired_at"]
        )
        found = fate(use, row["now"], graces.unused, graces.settle)
        return {
            **{name: row[name] for name in ("digest", "kind", "size_bytes")},
            "state": found.state,
            "goes_at": _moment(found.at),
            "needed_by": reasons,
            "unreferenced_since": _moment(row["unreferenced_since"]),
            "retired_at": _moment(row["retired_at"]),
        }


def _fates() -> Select[Any]:
    """Return the query of all artifacts, each with one example per kind of reference."""
    t = artifacts.c
    live = artifact_uploads.c
    others = artifacts.alias("adapters")
    is_live = live.state.in_(LIVE_STATES)
    is_adapter = (others.c.kind == literal("adapter")) & others.c.retired_at.is_(None)
    examples = {
        "model": _examples(*_both(models.c)),
        "release": _examples(*_both(releases.c)),
        "base": _examples(_pairs(bases.c.digest, bases.c.name)),
        "upload": _examples(
            _pairs(live.digest, live.id).where(is_live),
            _pairs(live.base_digest, live.id).where(is_live),
        ),
        "adapter": _examples(
            _pairs(func.unnest(others.c.base_digests), others.c.digest).where(is_adapter)
        ),
    }
    columns: list[ColumnElement[Any]] = [
        *(t.digest, t.kind, t.size_bytes, t.is_pinned, t.unreferenced_since, t.retired_at),
        func.now().label("now"),
        *(found.c.name.label(name) for name, found in examples.items()),
    ]
    source: FromClause = artifacts
    for found in examples.values():
        source = source.outerjoin(found, found.c.digest == t.digest)
    return select(*columns).select_from(source)


def _both(columns: Any) -> tuple[Select[Any], Select[Any]]:
    """Return the two queries of (digest, name) for digests that models or releases reference."""
    return (
        _pairs(columns.adapter_digest, columns.id),
        _pairs(columns.base_digest, columns.id),
    )


def _pairs(digest: ColumnElement[Any], name: ColumnElement[Any]) -> Select[Any]:
    columns: list[ColumnElement[Any]] = [digest.label("digest"), name.label("name")]
    return select(*columns)


def _examples(*queries: Select[Any]) -> Subquery:
    """Return one name per digest, from the union of some (digest, name) queries."""
    every = union_all(*queries).subquery()
    found = select(every.c.digest, func.min(every.c.name).label("name"))
    return found.group_by(every.c.digest).subquery()


def _swept() -> Values:
    """Return the schema of a sweep's result. Only `state` is replayed for an idempotency key."""
    types = dict.fromkeys(_DONE, describe.TEXTS) | {"chunks": describe.INTEGER}
    return describe.shown(_SWEPT, types=types) | {"required": ["state"]}


def _show_swept(swept: Swept | None) -> Values:
    """Return the JSON of a sweep's result, with lists of digests."""
    if swept is None or swept.decision is None:
        state = "running" if swept is None else "busy"
        return {"state": state, **{name: list[str]() for name in _DONE}, "chunks": 0}
    done = {name: getattr(swept.decision, name) for name in _DONE}
    return {"state": "done", **done, "chunks": swept.chunks}


def _moment(at: datetime | None) -> str:
    return "" if at is None else at.isoformat()
