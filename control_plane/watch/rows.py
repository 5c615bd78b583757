"""Turns rows into objects of the wire, with one table of kinds for snapshots and deltas."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from google.protobuf.message import Message
from sqlalchemy import Column, Table, select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from sluice.wire.control.v1 import control_pb2 as wire

_BATCH = 100


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """The table and the message of a kind of object.

    Columns have the names of the message's fields.
    """

    name: str
    table: Table
    message: type[Message]

    @property
    def key(self) -> Column[str]:
        """The primary key, which is the id of the object in the message."""
        return next(iter(self.table.primary_key.columns))

    @property
    def columns(self) -> list[Column[Any]]:
        """The columns that are sent, and further columns that affect the sent values."""
        fields = {field.name for field in self.message.DESCRIPTOR.fields}
        return [c for c in self.table.columns if c.name in fields or c.name == "is_draining"]

    def to_wire(self, row: Mapping[str, Any]) -> Message:
        """Return the object of a row.

        NULL, zero and empty values become the default of the field.
        """
        values = {name: value for name, value in row.items() if value}
        if self.name == "replicas":
            is_draining = values.pop("is_draining", False)
            sleeps = values.get("sleeps", False)
            state = wire_state(values.get("state", 0), is_draining=is_draining, sleeps=sleeps)
            values["state"] = state
        return self.message(**values)


KINDS = {
    kind.name: kind
    for kind in (
        ObjectKind("tiers", tables.tiers, wire.Tier),
        ObjectKind("tenants", tables.tenants, wire.Tenant),
        ObjectKind("keys", tables.api_keys, wire.ApiKey),
        ObjectKind("bases", tables.bases, wire.Base),
        ObjectKind("models", tables.models, wire.Model),
        ObjectKind("pools", tables.pools, wire.Pool),
        ObjectKind("cells", tables.cells, wire.Cell),
        ObjectKind("replicas", tables.replicas, wire.Replica),
        ObjectKind("aliases", tables.aliases, wire.Alias),
        ObjectKind("releases", tables.releases, wire.Release),
        ObjectKind("splits", tables.splits, wire.Split),
        ObjectKind("budget_stops", tables.budget_stops, wire.BudgetStops),
        ObjectKind("text_policies", tables.text_policies, wire.TextPolicy),
        ObjectKind("guard_sets", tables.guard_sets, wire.GuardSet),
        ObjectKind("server_tools", tables.server_tools, wire.ServerTool),
        ObjectKind("auto_policies", tables.auto_policies, wire.AutoPolicy),
        ObjectKind("warm_prompts", tables.warm_prompts, wire.WarmPrompts),
        ObjectKind("model_pools", tables.model_pools, wire.ModelPools),
        ObjectKind("content_keys", tables.content_keys, wire.ContentKeys),
    )
}


def wire_state(observed: int, *, is_draining: bool, sleeps: bool = False) -> int:
    """Return a replica's state for readers.

    A running replica that is to be stopped counts as draining. A ready replica that is about to
    sleep counts as sleeping, so that it gets no new request.
    """
    ended = (wire.REPLICA_STATE_STOPPED, wire.REPLICA_STATE_FAILED, wire.REPLICA_STATE_LOST)
    if is_draining and observed not in ended:
        return wire.REPLICA_STATE_DRAINING
    is_falling_asleep = sleeps and observed == wire.REPLICA_STATE_READY
    return wire.REPLICA_STATE_SLEEPING if is_falling_asleep else observed


async def read(connection: AsyncConnection, kind: ObjectKind, keys: Sequence[str]) -> list[Message]:
    """Return the objects of one kind with the given keys."""
    query = select(*kind.columns).where(kind.key.in_(keys))
    found = (await connection.execute(query)).mappings()
    return [kind.to_wire(cast("Mapping[str, Any]", row)) for row in found]


async def read_all(
    connection: AsyncConnection, kind: ObjectKind
) -> AsyncGenerator[wire.WatchResponse]:
    """Yield all objects of a kind in batches of `_BATCH`, each built in less than a millisecond.

    One message with many objects uses less memory than many messages with one object each.
    """
    found = await connection.execute(select(*kind.columns))
    names = tuple(found.keys())
    # A dict from a tuple costs a third of SQLAlchemy's row mapping.
    rows = (dict(zip(names, row, strict=True)) for row in found)
    while batch := [kind.to_wire(row) for row in islice(rows, _BATCH)]:
        part = wire.WatchResponse(is_part=True)
        getattr(part.upserts, kind.name).extend(batch)
        yield part
