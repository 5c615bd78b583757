"""Chromium drives every page of the console on a running stack, and axe looks at each.

With SLUICE_SCREENSHOTS=1 the pictures of docs/console.md are taken anew.
"""

import json
import os
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.support.chromium import BROWSER, Chromium, opened_chromium

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: apt-get install chromium"),
]

MARKUP = '<img src=x onerror="window.wasRun=1"><b>Tenant</b>'
REQUESTS_MAX = 3
IMAGES = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {"overview", "request", "tenant", "fleet"}
_RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}
_AXE = f"""axe.run(document, {json.dumps(_RULES)}).then((found) => found.violations.map(
  (it) => `${{it.id}}: ${{it.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" ; ")}}`))"""
_FETCHED = "performance.getEntriesByType('resource').filter((it) => it.initiatorType === 'fetch').map((it) => it.name)"


@pytest.fixture(scope="module")
def request_id(stack) -> str:
    """A request of a tenant whose name is markup, once the trace store has it."""
    key = stack.new_key("console-markup")
    with stack.admin() as admin:
        body = {"name": MARKUP, "tier_id": "console-markup"}
        admin.put("/v1/tenants/console-markup", json=body).raise_for_status()
        deadline = time.monotonic() + 120
        answer = None
        while answer is None or answer.status_code != 200:
            assert time.monotonic() < deadline, answer and answer.text
            body = {"model": "sluice-tiny", "messages": [{"role": "user", "content": "hello"}]}
            body |= {"stream": True, "max_tokens": 8}
            answer = httpx.post(
                f"{stack.base_url}/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {key}"},
                timeout=60,
            )
        found = answer.headers["x-request-id"]
        while admin.get(f"/console/data/requests/{found}").status_code != 200:
            assert time.monotonic() < deadline, "the trace store never had it"
            time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def incident_id(stack) -> Iterator[str]:
    """The incident of an alert that wakes somebody, whose texts are markup."""
    report = "/v1/alertmanager/api/v2/alerts"
    labels = {"alertname": "ConsoleDrill", "severity": "P1", "drill": MARKUP}
    about = {"summary": MARKUP, "runbook_url": "https://runbooks.example/ConsoleDrill.md"}
    with stack.admin() as admin:
        body = [{"labels": labels, "annotations": about}]
        admin.post(report, json=body).raise_for_status()
        deadline = time.monotonic() + 60
        found = ""
        while not found:
            assert time.monotonic() < deadline, "no incident was opened"
            (alert,) = admin.get("/v1/alerts?is_firing=true&name=ConsoleDrill").json()["data"]
            found = alert["incident_id"]
            time.sleep(0.2)
        yield found
        admin.post(report, json=[body[0] | {"endsAt": "2026-01-01T00:00:00Z"}]).raise_for_status()


@pytest_asyncio.fixture
async def page(tmp_path: Path) -> AsyncGenerator[Chromium]:
    async with opened_chromium(tmp_path / "profile", width=1280, height=800) as found:
        yield found


async def sign_in(page: Chromium, stack, key: str) -> None:
    await page.open(f"{stack.admin_url}/console/")
    await page.until("document.querySelector('input[name=key]')")
    script = "document.querySelector('input[name=key]').value = {key}; document.querySelector('form').requestSubmit()"
    await page.evaluate(script.replace("{key}", json.dumps(key)))
    await page.until("document.querySelector('.side')")


async def show(page: Chromium, where: str) -> list[str]:
    """Go to a page by its URL; return what it fetched."""
    await page.evaluate("performance.clearResourceTimings()")
    await page.evaluate(f"location.hash = {json.dumps(where)}")
    await page.until(f"location.hash === {json.dumps('#' + where.removeprefix('#'))}")
    await page.evaluate("new Promise((done) => setTimeout(done, 100))")
    await page.until(
        "document.querySelector('main h1') && !document.querySelector('.busy')?.innerText"
    )
    return await page.evaluate(_FETCHED)


def pages_of(request_id: str, incident_id: str) -> dict[str, str]:
    """Return each page by its name, with a state in its URL."""
    return {
        "alerts": "#/alerts",
        "alerts over": "#/alerts?view=over",
        "silences": "#/alerts?view=silences",
        "told": "#/alerts?view=told",
        "incidents": "#/incidents",
        "incident": f"#/incidents/{incident_id}",
        "rules": "#/rules",
        "rule set": "#/rules/console-markup",
        "tools": "#/tools?tenant=console-markup",
        "tool": "#/tools/console-markup",
        "auto": "#/auto",
        "policy": "#/auto/console-markup",
        "batches": "#/batches",
        "overview": "#/overview",
        "live": "#/live",
        "requests": "#/requests?tenant=console-markup",
        "request": f"#/requests/{request_id}",
        "tenants": "#/tenants",
        "tenant": "#/tenants/console-markup",
        "usage": "#/usage?by=model",
        "usage by hour": "#/usage?granularity=hour&by=key_id",
        "budgets": "#/budgets",
        "models": "#/models",
        "model": "#/models/sluice-tiny",
        "aliases": "#/models?view=aliases",
        "adapters": "#/models?view=adapters",
        "playground": "#/playground?model=sluice-tiny",
        "rollouts": "#/rollouts",
        "fleet": "#/fleet",
        "scaling": "#/scaling",
        "quality": "#/quality",
        "audit": "#/audit",
        "access": "#/access",
        "search": "#/search?q=console",
    }


async def test_every_page_works_and_everybody_can_read_it(
    page: Chromium, stack, request_id: str, incident_id: str, node_project: Path
) -> None:
    with stack.admin() as admin:
        body = {"owner_tenant_id": "console-markup"}
        body |= {
            "rules": [{"id": "names", "action": "rewrite", "words": [MARKUP], "replacement": "-"}]
        }
        admin.put("/v1/guard-sets/console-markup", json=body).raise_for_status()
        tool = {"owner_tenant_id": "console-markup", "kind": "http", "name": "look_up"}
        tool |= {"description": MARKUP, "url": "https://tools.example/look-up"}
        admin.put("/v1/tools/console-markup", json=tool).raise_for_status()
        policy = {"candidates": [{"model": "sluice-tiny", "output_price": 1.5}]}
        admin.put("/v1/auto-policies/console-markup", json=policy).raise_for_status()
        pool_id = admin.get("/v1/pools").raise_for_status().json()["data"][0]["id"]
    pages = pages_of(request_id, incident_id) | {"day": f"#/scaling/{pool_id}?view=day"}
    axe = (node_project / "node_modules" / "axe-core" / "axe.min.js").read_text()
    await sign_in(page, stack, stack.admin_key)
    await page.evaluate(f"{axe}; undefined")
    found: dict[str, object] = {}
    for name, where in pages.items():
        fetched = await show(page, where)
        if len(fetched) > REQUESTS_MAX or await page.evaluate(
            "document.querySelectorAll('.note.bad').length"
        ):
            found[name] = (fetched, await page.evaluate("document.querySelector('main').innerText"))
        for scheme in ("dark", "light") if name in PICTURES else ("light",):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await page.call("Emulation.setEmulatedMedia", features=media)
            if violations := await page.evaluate(_AXE):
                found[f"{name}, {scheme}"] = violations
        if name in PICTURES and os.environ.get("SLUICE_SCREENSHOTS"):
            await page.picture(IMAGES / f"console-{name}.webp")
    assert not found, json.dumps(found, indent=1)
    assert not page.errors
    await show(page, "#/tenants/console-markup")
    assert MARKUP in await page.evaluate("document.querySelector('h1').innerText")
    assert await page.evaluate("window.wasRun === undefined")


# An admin's pages are all pages: the test above looks at each of them.
@pytest.mark.parametrize("role", ["reader", "publisher", "viewer", "operator"])
async def test_each_role_can_read_each_page_that_it_is_shown(
    page: Chromium, stack, request_id: str, role: str
) -> None:
    is_of_tenant = role in {"reader", "publisher"}
    body = {"role": role} | ({"tenant_id": "console-markup"} if is_of_tenant else {})
    with stack.admin() as admin:
        key = admin.post("/v1/admin-keys", json=body).json()["key"]
    await sign_in(page, stack, key)
    links = "[...document.querySelectorAll('.side a[href^=\"#/\"]')].map((it) => it.hash)"
    shown = await page.evaluate(links)
    assert len(shown) >= {"reader": 4, "publisher": 10, "viewer": 18, "operator": 18}[role], shown
    bad = {}
    for where in shown:
        await show(page, where)
        if await page.evaluate("document.querySelectorAll('.note.bad').length"):
            bad[where] = await page.evaluate("document.querySelector('main').innerText")
    assert not bad
    # A stack without a price list: the page of costs says so.
    assert not [it for it in page.errors if "data/costs" not in it]


async def test_a_key_is_made_with_the_mouse_and_shown_once(
    page: Chromium, stack, request_id: str
) -> None:
    await sign_in(page, stack, stack.admin_key)
    await show(page, "#/tenants/console-markup")
    button = "[...document.querySelectorAll('button')].find((it) => it.innerText === 'Make a key')"
    await page.until(button)
    await page.evaluate(f"{button}.click()")
    await page.until("document.querySelector('dialog[open] form')")
    assert "shown once" in await page.evaluate("document.querySelector('dialog').innerText")
    await page.evaluate("document.querySelector('dialog form').requestSubmit()")
    await page.until("document.querySelector('.secret')")
    key = await page.evaluate("document.querySelector('.secret').innerText")
    assert key.startswith("sk-sluice-")
    await page.evaluate("document.querySelector('dialog[open] .primary').click()")
    await page.until("!document.querySelector('.secret')")
    assert key not in await page.evaluate("document.documentElement.outerHTML")
    assert not page.errors


async def test_an_alert_is_acknowledged_and_silenced_and_its_incident_closed_with_the_mouse(
    page: Chromium, stack, incident_id: str
) -> None:
    await sign_in(page, stack, stack.admin_key)
    await show(page, "#/alerts?name=ConsoleDrill")
    row = await page.evaluate("document.querySelector('main tbody').innerText")
    assert MARKUP in row
    assert "ConsoleDrill.md" in row
    await act(page, "Acknowledge", "hear nothing more", note="Ada looks")
    await page.until("document.querySelector('tbody').innerText.includes('acknowledged by')")
    await act(page, "Silence", "1 alerts of this rule fire now", hours="1", reason="a drill")
    await show(page, "#/alerts?view=silences")
    assert "alertname=ConsoleDrill" in await page.evaluate("document.body.innerText")
    await act(page, "End", "1 alerts fit it")
    await show(page, f"#/incidents/{incident_id}")
    await act(page, "Close", "1 of its alerts still fire", text="It was a drill.")
    await page.until("document.querySelector('main').innerText.includes('closed by')")
    told = await page.evaluate("document.querySelector('main').innerText")
    assert "It was a drill." in told
    assert "acknowledged" in told
    assert not page.errors


async def act(page: Chromium, label: str, says: str, **fields: str) -> None:
    """Press the page's last button of this label, read what it will do, fill in, and do it."""
    buttons = "[...document.querySelectorAll('main button')]"
    button = f"{buttons}.findLast((it) => it.innerText === {json.dumps(label)})"
    await page.until(button)
    await page.evaluate(f"{button}.click()")
    await page.until("document.querySelector('dialog[open] form')")
    assert says in await page.evaluate("document.querySelector('dialog[open] p').innerText")
    for name, value in fields.items():
        field = f"document.querySelector('dialog[open] [name={name}]')"
        await page.evaluate(f"{field}.value = {json.dumps(value)}")
    await page.evaluate("document.querySelector('dialog[open] form').requestSubmit()")
    await page.until("!document.querySelector('dialog[open]')")


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_the_playground_asks_two_models_in_each_dialect(
    page: Chromium, stack, is_stream: bool
) -> None:
    key = stack.new_key("console-play")
    await sign_in(page, stack, stack.admin_key)
    for dialect in ("chat", "completions", "responses", "messages"):
        await show(page, f"#/playground?dialect={dialect}&model=sluice-tiny&other=nobodys-model")
        form = {"key": key, "prompt": "hello", "most": "8"}
        await page.evaluate(
            f"""for (const [name, value] of Object.entries({json.dumps(form)})) {{
              const field = document.querySelector(`form.play [name=${{name}}]`);
              field.value = value; field.dispatchEvent(new Event('input', {{bubbles: true}}));
            }}
            if (document.querySelector('[name=stream]').checked !== {json.dumps(is_stream)})
              document.querySelector('[name=stream]').click();"""
        )
        await page.evaluate("document.querySelector('form.play').requestSubmit()")
        sections = "[...document.querySelectorAll('.split section')].map((it) => it.innerText)"
        await page.until(f"{sections}[0].includes('8 out')")
        await page.until(
            f"{sections}[1].includes('nobodys-model') && {sections}[1].includes('404')"
        )
        answer, _ = await page.evaluate(sections)
        assert "req" in answer
        line = await page.evaluate("document.querySelector('.curl').innerText")
        assert "$OPENAI_API_KEY" in line
        assert key not in await page.evaluate("document.documentElement.outerHTML")
    # The browser itself tells of each answer that is an error.
    assert all("404" in it for it in page.errors)


async def test_a_session_that_ends_elsewhere_ends_here(page: Chromium, stack) -> None:
    with stack.admin() as admin:
        made = admin.post("/v1/admin-keys", json={"role": "viewer", "name": "Vera"}).json()
        await sign_in(page, stack, made["key"])
        await show(page, "#/tenants")
        assert not await page.evaluate("document.querySelectorAll('main button.danger').length")
        admin.delete(f"/v1/admin-keys/{made['id']}").raise_for_status()
    await page.evaluate("location.hash = '#/models'")
    await page.until("document.body.innerText.includes('Your session has ended')")


async def test_a_key_in_the_url_is_taken_away_and_told(page: Chromium, stack) -> None:
    await page.open(f"{stack.admin_url}/console/#/?key={stack.admin_key}")
    await page.until("document.body.innerText.includes('rotate it')")
    assert stack.admin_key not in await page.evaluate("location.href")
    assert await page.evaluate("document.querySelector('input[name=key]').value === ''")
