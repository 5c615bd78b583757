"""Clients that were written for other servers: Azure's paths, other headers for keys, browsers."""

import openai
import pytest

pytestmark = pytest.mark.real

HELLO = [{"role": "user", "content": "hello"}]
BODY = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
PAGE = "https://app.example"


async def test_azure_s_client_runs(world) -> None:
    async with world(azure_paths=True) as w:
        root = f"http://127.0.0.1:{w.gateway.settings.port}"
        async with openai.AsyncAzureOpenAI(
            azure_endpoint=root, api_key="sk-one", api_version="2024-10-21", max_retries=0
        ) as azure:
            answer = await azure.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
            assert answer.usage is not None
            own = await azure.chat.completions.create(model="one/own", messages=HELLO, max_tokens=2)
            assert own.model == "one/own"
        async with w.http() as http:
            for path in ("deployments/tiny/chat/completions", "v1/chat/completions"):
                body = BODY if path.startswith("v1") else {"messages": HELLO, "max_tokens": 2}
                assert (await http.post(f"/openai/{path}", json=body)).is_success
            wrong = await http.post("/openai/deployments/tiny/images", json={})
            assert wrong.status_code == 404
            assert "chat/completions" in wrong.json()["error"]["message"]
            for content in (b"{", b"[]"):
                url = "/openai/deployments/tiny/completions"
                assert (await http.post(url, content=content)).status_code == 400


async def test_without_the_setting_azure_s_paths_are_unknown(world) -> None:
    async with world() as w, w.http() as http:
        assert (await http.post("/openai/v1/chat/completions", json=BODY)).status_code == 404


@pytest.mark.parametrize("header", ["api-key", "x-api-key", "Api-Key"])
async def test_a_key_may_come_in_other_headers(world, header: str) -> None:
    async with world() as w, w.http() as http:
        del http.headers["authorization"]
        for key, status in (("sk-one", 200), ("sk-wrong", 401)):
            response = await http.post("/v1/chat/completions", json=BODY, headers={header: key})
            assert response.status_code == status


async def test_pages_of_allowed_origins_may_call_and_read(world) -> None:
    ask = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    async with world(cors_origins=f"https://other.example,{PAGE}") as w, w.http() as http:
        allowed = await http.options("/v1/chat/completions", headers=ask)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        for extra in ({}, {"stream": True}, {"model": "none"}):
            answer = await http.post(
                "/v1/chat/completions", json=BODY | extra, headers={"Origin": PAGE}
            )
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert "Origin" in answer.headers["vary"]
        foreign = await http.options(
            "/v1/chat/completions", headers=ask | {"Origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in foreign.headers


async def test_without_origins_no_page_may_call(world) -> None:
    async with world() as w, w.http() as http:
        ask = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        refused = await http.options("/v1/chat/completions", headers=ask)
        assert refused.status_code == 405
        assert "access-control-allow-origin" not in refused.headers
