"""Signing in to the console by an OpenID Connect provider, with every lie that it or others tell."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio

from sluice.process import free_port
from tests.integration.conftest import ControlPlane, running_control_plane
from tests.support.openid_site import CLIENT, SECRET, OpenIdSite, new_key, openid_site

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


@dataclass(frozen=True)
class Company:
    """A control plane, and the provider that its people are known to."""

    plane: ControlPlane
    site: OpenIdSite

    def browser(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.plane.admin.base_url, timeout=60)

    async def answer(self, client: httpx.AsyncClient, to: str = "") -> httpx.URL:
        """Let a browser go to the provider; return where that sends it."""
        sent = await client.get("/console/login", params={"to": to} if to else {})
        assert sent.status_code == 303, sent.text
        async with httpx.AsyncClient() as provider:
            back = await provider.get(sent.headers["location"])
        assert back.status_code == 302
        return httpx.URL(back.headers["location"])

    async def sign_in(self, client: httpx.AsyncClient, to: str = "") -> httpx.Response:
        """Sign in; return the last answer."""
        return await self.call_back(client, await self.answer(client, to))

    async def call_back(self, client: httpx.AsyncClient, url: httpx.URL) -> httpx.Response:
        answer = await client.get("/console/callback", params=url.params)
        assert answer.status_code == 303, answer.text
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def company_plane(postgres_server, tmp_path_factory) -> AsyncIterator[Company]:
    await postgres_server.execute(f"CREATE DATABASE openid TEMPLATE {postgres_server.template}")
    folder = tmp_path_factory.mktemp("openid")
    file = folder / "openid.json"
    async with openid_site(free_port()) as site:
        settings = {
            "issuer": site.issuer,
            "client_id": CLIENT,
            "client_secret": SECRET,
            "console_url": "https://ops.example/console/",
            "roles": [
                {"claim": "groups", "value": "operators", "role": "operator"},
                {"claim": "groups", "value": "acme", "role": "reader", "tenant_id": "acme"},
            ],
        }
        file.write_text(json.dumps(settings))
        extra = {"CONTROL_PLANE__OPENID": str(file)}
        async with running_control_plane(postgres_server.url("openid"), folder, **extra) as plane:
            await plane.put("tiers/openid")
            for tenant in ("acme", "globex"):
                await plane.put(f"tenants/{tenant}", tier_id="openid")
            yield Company(plane, site)


@pytest.fixture
def company(company_plane: Company) -> Company:
    site = company_plane.site
    site.person = {"sub": "ada", "name": "Ada", "groups": ["operators"]}
    site.changes, site.key, site.algorithm = {}, site.published, "RS256"
    return company_plane


def problem_of(answer: httpx.Response) -> str:
    assert "sluice_console" not in answer.headers.get("set-cookie", "")
    return answer.headers["location"].removeprefix("./#/?problem=")


async def test_a_person_signs_in_and_acts_under_their_name(company: Company) -> None:
    async with company.browser() as client:
        assert (await client.get("/console/session")).json()["has_provider"]
        done = await company.sign_in(client, "#/tenants/acme?x=1")
        assert done.headers["location"] == "./#/tenants/acme?x=1"
        cookies = done.headers.get_list("set-cookie")
        (session,) = [it for it in cookies if it.startswith("sluice_console=")]
        assert "HttpOnly" in session
        assert "SameSite=Strict" in session
        me = (await client.get("/console/session")).json()
        assert (me["actor"], me["role"], me["name"]) == ("person/ada", "operator", "Ada")
        bad = {
            "matchers": [{"name": "alertname", "value": "X"}],
            "duration_s": 60,
            "reason": "test",
        }
        path = "/console/v1/alert-silences"
        assert (await client.post(path, json=bad)).status_code == 403, "no header of our page"
        client.headers["x-csrf-token"] = me["csrf"]
        made = await client.post(path, json=bad)
        assert made.status_code == 201, made.text
        assert made.json()["created_by"] == "person/ada"
        assert (await client.put("/console/v1/tiers/x", json={})).status_code == 403
        assert (await client.delete("/console/sessions")).status_code == 204
        assert (await client.get("/console/v1/tiers")).status_code == 401
    rows = (await company.plane.admin.get("/v1/audit?actor=person/ada")).json()["data"]
    assert {row["actor_name"] for row in rows} == {"Ada"}
    assert {"create", "revoke"} <= {row["action"] for row in rows}


async def test_an_answer_is_of_use_once_and_to_its_browser_alone(company: Company) -> None:
    async with company.browser() as ada, company.browser() as eve:
        url = await company.answer(ada)
        # Somebody who is led to an answer of another's sign-in is not signed in by it.
        assert problem_of(await company.call_back(eve, url)) == "wrong"
        own = await company.answer(eve)
        mixed = own.copy_set_param("state", url.params["state"])
        assert problem_of(await company.call_back(eve, mixed)) == "wrong"
        # A code of one sign-in does not fit the verifier of another.
        other = await company.answer(eve)
        stolen = other.copy_set_param("code", url.params["code"])
        assert problem_of(await company.call_back(eve, stolen)) == "wrong"
        url = await company.answer(ada)
        elsewhere = url.copy_set_param("iss", "https://evil.example")
        assert problem_of(await company.call_back(ada, elsewhere)) == "wrong"
        url = await company.answer(ada)
        assert (await company.call_back(ada, url)).headers["location"] == "./"
        assert problem_of(await company.call_back(ada, url)) == "wrong"


async def test_a_planted_session_is_not_taken_over(company: Company) -> None:
    async with company.browser() as eve, company.browser() as ada:
        await company.sign_in(eve)
        planted = eve.cookies["sluice_console"]
        ada.cookies.set("sluice_console", planted, path="/console")
        done = await company.sign_in(ada)
        assert planted not in str(done.headers)
        assert (await eve.get("/console/session")).json()["actor"] is None


@pytest.mark.parametrize(
    "lie",
    [
        {"nonce": "0" * 64},
        {"iss": "https://evil.example"},
        {"aud": "another-client"},
        {"aud": [CLIENT, "another"]},
        {"exp": 1_600_000_000},
        {"sub": None},
    ],
    ids=str,
)
async def test_an_id_token_with_one_fault_signs_no_person_in(company: Company, lie: Any) -> None:
    company.site.changes = lie
    async with company.browser() as client:
        assert problem_of(await company.sign_in(client)) == "wrong"
        assert (await client.get("/console/session")).json()["actor"] is None


async def test_a_token_signed_by_another_issuer_signs_no_person_in(company: Company) -> None:
    site = company.site
    async with company.browser() as client:
        for key, algorithm in ((new_key(), "RS256"), (SECRET * 3, "HS256"), (None, "none")):
            site.key, site.algorithm = key, algorithm
            assert problem_of(await company.sign_in(client)) == "wrong"


async def test_roles_come_of_claims_and_a_tenants_person_sees_no_other(company: Company) -> None:
    company.site.person = {"sub": "bob", "name": "Bob", "groups": ["acme", "staff"]}
    async with company.browser() as client:
        await company.sign_in(client)
        me = (await client.get("/console/session")).json()
        assert (me["role"], me["tenant_id"]) == ("reader", "acme")
        other = await client.get("/console/data/usage", params={"tenant": "globex"})
        assert other.status_code == 404
        assert (await client.get("/console/v1/models")).status_code == 403
        await company.plane.put("tenants/acme", tier_id="openid", is_disabled=True)
        assert (await client.get("/console/data/batches")).status_code == 401
        await company.plane.put("tenants/acme", tier_id="openid")
    company.site.person = {"sub": "eve", "groups": ["visitors"]}
    async with company.browser() as client:
        assert problem_of(await company.sign_in(client)) == "unknown"


async def test_the_way_back_leads_nowhere_else(company: Company) -> None:
    async with company.browser() as client:
        for to in ("//evil.example", "https://evil.example", "#/x\r\nSet-Cookie: a=b"):
            answer = await client.get("/console/login", params={"to": to})
            assert answer.status_code == 400, to
        sent = await client.get("/console/login", headers={"host": "evil.example"})
        where = urlsplit(sent.headers["location"])
        assert f"{where.scheme}://{where.netloc}" == company.site.issuer
        assert "evil" not in sent.headers["location"]
        state = company.site.asked[-1]["state"]
        denied = await client.get(
            "/console/callback", params={"error": "access_denied", "state": state}
        )
        assert problem_of(denied) == "wrong", "the state of another sign-in"


async def test_without_a_provider_there_is_no_way_to_one(shared_control_plane) -> None:
    for path in ("login", "callback"):
        answer = await shared_control_plane.admin.get(f"/console/{path}")
        assert answer.status_code == 404
        assert "CONTROL_PLANE__OPENID" in answer.json()["detail"]
