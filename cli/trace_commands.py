"""`sluice trace`: shows the stages of one request, from the gateway to its last token."""

import os
from typing import Annotated, Any

import typer
from google.protobuf.json_format import ParseDict

from cli import explain
from cli.admin import AsJson, ask, given
from cli.api import ApiClient, ApiError
from cli.render import console, show_json
from cli.stack.home import Home, read_env
from cli.stack_commands import fail
from cli.text_commands import show_texts
from cli.trace_view import lines, reality
from sluice.wire.router.v1 import router_pb2 as wire

_NOT_FOUND = 404


def trace(
    request_id: Annotated[str, typer.Argument(help="The answer's header x-request-id.")],
    *,
    tenant: Annotated[str | None, typer.Option(help="Only a request of this tenant.")] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Also show its kept text; the audit notes it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the time of a request by stage, or the router's facts of a running request."""
    if text and as_json:
        raise typer.BadParameter("--text is for people: with --json leave it out")
    query = given(tenant=tenant)
    found, why_not = ask(lambda api: _find(api, request_id, query), "SLUICE_TELEMETRY_URL")
    if found is None:
        # Routers do not report a request's tenant, so a query for one tenant finds no live request.
        answers = [] if tenant else _live(request_id)
        if not answers:
            raise fail(why_not)
        if as_json:
            show_json({"request": None, "routers": [explain.plain(it) for it in answers]})
            return
        console().print("it has not ended; its router says:")
        explain.show_answer(answers[0])
        return
    if as_json:
        show_json(found)
        return
    out = console()
    for line in lines(found, out.width):
        out.print(line, markup=False)
    for attempt in found.get("attempts") or []:
        if attempt["decision"]:
            out.print(f"\nattempt {attempt['number']}, facts of its router at placement:")
            # A newer service may send fields that are unknown to this program.
            known = ParseDict(attempt["decision"], wire.Explanation(), ignore_unknown_fields=True)
            explain.show_answer(known)
            out.print(reality(attempt), markup=False, soft_wrap=True)
    if text:
        show_texts(found["request"]["tenant_id"], request_id)


async def _find(
    api: ApiClient, request_id: str, query: dict[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Return telemetry's record of a request, or None and the reason why there is none."""
    try:
        return await api.call("GET", f"/v1/requests/{request_id}", query=query), ""
    except ApiError as error:
        if error.status != _NOT_FOUND:
            raise
        return None, str(error)


def _live(request_id: str) -> list[wire.Explanation]:
    """Return the routers' reports of a waiting or running request, empty if none has it."""
    if not (os.environ.get("SLUICE_ADMIN_URL") or read_env(Home.find()).get("SLUICE_ADMIN_URL")):
        return []

    async def answers(api: ApiClient) -> list[wire.Explanation]:
        try:
            found, _ = await explain.find_request(api, request_id)
        except ApiError:
            return []
        return found

    return ask(answers)
