"""Each SQL statement of the docs runs on the real schema, and does what the page says."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sim import traces
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry.rows import RowBatch
from telemetry.store import Store
from tests.integration.trace_site import empty_store

pytestmark = pytest.mark.real

DOCS = Path(__file__).parents[2] / "docs"
_STATEMENT = re.compile(
    r"```sql\n(?P<block>.+?)```"
    r'|clickhouse-client[^"\n]* -q "(?P<option>[^"]+)"'
    r"|`(?P<inline>(?:SELECT|WITH)\s[^`]+)`",
    re.DOTALL,
)


def statements() -> dict[str, str]:
    """Return the statements of all pages, by page and number."""
    found: dict[str, str] = {}
    for page in sorted(DOCS.rglob("*.md")):
        for number, match in enumerate(_STATEMENT.finditer(page.read_text()), start=1):
            text = next(part for part in match.groupdict().values() if part)
            found[f"{page.relative_to(DOCS)}#{number}"] = " ".join(text.split())
    return found


STATEMENTS = statements()


@pytest_asyncio.fixture
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with empty_store(shared_tracestore.address) as found:
        yield found


def as_asked(sql: str) -> str:
    """Return a statement for our client: in its own database, in a format of its own."""
    return sql.replace("sluice.", "").removesuffix(";").removesuffix("FORMAT JSONEachRow")


async def test_each_statement_runs(store: Store) -> None:
    assert STATEMENTS, "there are some"
    for place, sql in STATEMENTS.items():
        try:
            await store.query(as_asked(sql), {})
        except Exception as error:  # noqa: BLE001 - whatever the server says belongs to the page
            pytest.fail(f"docs/{place}: {sql}: {error}")


async def test_traffic_that_is_exported_as_documented_can_be_replayed(
    store: Store, tmp_path: Path
) -> None:
    events = [
        RequestEvent(
            event_id=f"e{number}",
            request_id=f"r{number}",
            tenant_id="t",
            received_at_unix_ms=1_790_000_000_000 + 500 * number,
            prompt_tokens=10 * number,
            output_tokens=3,
            session_hash=2**64 - 1,
        )
        for number in (1, 2)
    ]
    await store.insert(RowBatch(events))
    (sql,) = (sql for place, sql in STATEMENTS.items() if place.startswith("routing-study.md"))
    rows = await store.query(as_asked(sql), {})
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = traces.load(path, "sluice")
    assert [it.prompt_tokens for it in trace.requests] == [10, 20]
    assert [it.arrived_s for it in trace.requests] == [0.0, 0.5]
    assert {it.tenant for it in trace.requests} == {"t"}
