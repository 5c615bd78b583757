"""Rules without a Prometheus: real pages, a real database, and a clock that the test turns."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.alerts.evaluator import RuleEvaluator, open_http
from control_plane.alerts.pages import TargetsError
from control_plane.alerts.rules import RulesError
from control_plane.alerts.tables import alerts
from control_plane.database import Database

pytestmark = [pytest.mark.real, pytest.mark.asyncio]

RULES = """
groups:
  - name: of a test
    rules:
      - record: pages:rate1m
        expr: sum by (job) (rate(pages_total[1m]))
      - alert: PagesFast
        expr: pages:rate1m > 2
        for: 30s
        labels: {severity: P2}
        annotations: {summary: 'It turns {{ $value | humanize }} pages per second in {{ $labels.job }}'}
      - alert: ProcessDown
        expr: up == 0
        annotations: {summary: '{{ with $externalLabels.runbooks }}{{ . }}/{{ end }}down.md'}
"""


class Metrics:
    """A page of metrics that a test writes."""

    def __init__(self) -> None:
        self.text: str | None = ""
        self.address = ""

    async def show(self, _: web.Request) -> web.Response:
        return web.Response(text=self.text or "", status=503 if self.text is None else 200)


@pytest_asyncio.fixture
async def metrics() -> AsyncIterator[Metrics]:
    found, app = Metrics(), web.Application()
    app.router.add_get("/metrics", found.show)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.address = f"127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    found = Database(database_url)
    yield found
    await found.close()


async def firing(database: Database) -> dict[str, tuple[str, bool]]:
    async def read(connection: AsyncConnection) -> dict[str, tuple[str, bool]]:
        rows = (await connection.execute(select(alerts))).all()
        return {row.name: (row.annotations.get("summary", ""), row.is_firing) for row in rows}

    return await database.run(read)


async def test_alerts_fire_and_end_as_the_pages_say(
    database: Database, metrics: Metrics, tmp_path: Path
) -> None:
    file, now_s = tmp_path / "rules.yml", 1_790_000_000.0
    file.write_text(RULES)
    shown: list[tuple[int, int]] = []
    evaluator = RuleEvaluator(
        database,
        f"gateway={metrics.address}",
        str(file),
        15.0,
        lambda series, failed: shown.append((series, failed)),
        lambda: now_s,
        {"runbooks": "https://runbooks.example"},
    )
    async with open_http() as http:
        for count in range(0, 300, 45):
            metrics.text = f'# TYPE pages counter\npages_total{{job="own"}} {count}\nother 1\n'
            await evaluator.step(http)
            now_s += 15
        assert await firing(database) == {
            "PagesFast": ("It turns 3 pages per second in gateway", True)
        }
        metrics.text = None
        await evaluator.step(http)
        found = await firing(database)
        assert found["ProcessDown"] == ("https://runbooks.example/down.md", True)
        metrics.text = "pages_total 180\n"
        for _ in range(6):
            now_s += 15
            await evaluator.step(http)
        found = await firing(database)
        assert [is_firing for _, is_firing in found.values()] == [False, False]
        now_s -= 3600  # the clock was set back: ranges begin anew, nothing fires and nothing fails
        await evaluator.step(http)
    assert shown[-1] == (2, 0)


async def test_mistakes_are_named_before_anything_starts(
    database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "rules.yml"
    for rules, words in (
        ("groups: [{name: a, rules: [{alert: A, expr: 'sum('}]}]", "A: sum"),
        ("groups: [{name: a, rules: [{alert: A, expr: 'topk(1, up)'}]}]", "unknown aggregation"),
        ("groups: [{name: a, rules: [{alert: A, expr: up, for: soon}]}]", "no duration"),
        ("rules: []", "no rule file"),
        ("{", "rules.yml"),
    ):
        file.write_text(rules)
        with pytest.raises(RulesError, match=words):
            RuleEvaluator(database, "gateway=127.0.0.1:1", str(file), 15.0)
    for targets in ("gateway", "nobody=127.0.0.1:1", "gateway=127.0.0.1"):
        with pytest.raises(TargetsError, match="JOB=HOST:PORT"):
            RuleEvaluator(database, targets, "", 15.0)
