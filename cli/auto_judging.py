"""`sluice auto judge`: a model grades stored answers. Its verdicts count like users' feedback."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from cli.admin import Tenant, ask, setting
from cli.api import ApiClient, ApiError, Json
from cli.audit_commands import since_moment
from cli.stack_commands import fail
from sluice.auto.judging import judge_body, rating_of

_PREFIX = "evt_"
_REPLY_TIMEOUT_S = 120.0


class AnswerJudge:
    """Requests judgements of answers, a few concurrently, and sends them as feedback."""

    def __init__(self, gateway: ApiClient, judge: str, at_once: int) -> None:
        """Use a gateway, whose client's key must belong to the tenant of the answers."""
        self._gateway, self._judge = gateway, judge
        self._places = asyncio.Semaphore(at_once)
        self.found = Counter[str]()
        self.failure = ""

    async def judge(self, event_id: str, text: Json) -> None:
        """Judge one answer. A failure is counted, and the other answers are still judged."""
        body = judge_body(self._judge, text["prompt"], text["answers"])
        try:
            async with self._places:
                reply = await self._gateway.call("POST", "chat/completions", body)
                rating = rating_of(reply["choices"][0]["message"].get("content") or "")
                if rating is not None:
                    # Feedback names an answer by its event's id, not by the caller's request id.
                    told = {"id": f"chatcmpl-{event_id.removeprefix(_PREFIX)}", "rating": rating}
                    await self._gateway.call("POST", "feedback", told)
        except ApiError as error:
            self.failure = str(error)
            self.found["failed"] += 1
            return
        self.found[rating or "no verdict"] += 1


def judge_answers(
    tenant: Tenant,
    *,
    judge: Annotated[str, typer.Option("--model", help="Model that judges.")],
    sample: Annotated[int, typer.Option(min=1, max=5000, help="Answers to judge at most.")] = 100,
    since: Annotated[str, typer.Option(help="30d ago, as 30d; or a moment, as 2030-12-01.")] = "1d",
    at_once: Annotated[int, typer.Option(min=1, max=64, help="Requests at once.")] = 4,
) -> None:
    """Let a model judge a sample of stored answers that have no judgement yet.

    The tenant's policy must store texts (`sluice tenants texts`). Requests are sent to
    OPENAI_BASE_URL with OPENAI_API_KEY, a key of the tenant, whose limits and bill apply.
    """
    rows = [it for it in logged_rows(tenant, since) if it["good"] is None]
    random.shuffle(rows)  # so that the sample does not come from a single hour
    texts = ask(lambda api: _kept(api, tenant, rows, sample))
    if not texts:
        raise fail(
            f"tenant {tenant} has no kept text of an unjudged answer of auto since {since}: see"
            f" `sluice tenants texts set {tenant} --on`, or give --since"
        )
    url, key = setting("OPENAI_BASE_URL"), setting("OPENAI_API_KEY")

    async def run() -> AnswerJudge:
        base_url = f"{url.rstrip('/')}/"
        async with ApiClient(base_url, key, timeout_s=_REPLY_TIMEOUT_S) as gateway:
            asking = AnswerJudge(gateway, judge, at_once)
            async with asyncio.TaskGroup() as tasks:
                for event_id, text in texts:
                    tasks.create_task(asking.judge(event_id, text))
        return asking

    done = asyncio.run(run())
    if done.found["failed"] == len(texts):
        raise fail(f"no answer was judged: {done.failure}")
    counts = ", ".join(f"{count} {name}" for name, count in sorted(done.found.items()))
    typer.echo(f"answers with kept texts: {len(texts)} ({counts})")
    if done.failure:
        typer.echo(f"the last failure: {done.failure}")


def logged_rows(tenant: str, since: str) -> list[Json]:
    """Return the logged choices of a tenant from telemetry."""
    moment = since_moment(since, datetime.now(UTC), "--since")
    query = {"tenant": tenant, "since": moment}
    found = ask(lambda api: api.call("GET", "/v1/auto/turns", query=query), "SLUICE_TELEMETRY_URL")
    return found["data"]


async def _kept(
    api: ApiClient, tenant: str, rows: Sequence[Json], most: int
) -> list[tuple[str, Any]]:
    """Return the stored texts of at most `most` answers, in the given order, with their event ids.

    A policy may store only a share of the texts, so at most 100 answers are read per wanted text.
    """
    found = list[tuple[str, Any]]()
    for row in rows[: 100 * most]:
        if len(found) >= most:
            break
        try:
            read = await api.call("GET", f"/v1/tenants/{tenant}/texts/{row['request_id']}")
        except ApiError as error:
            if error.status == 404:
                continue
            raise
        found += [(row["event_id"], it) for it in read["data"] if it["event_id"] == row["event_id"]]
    return found
