"""Every answer names its request and its trace; the access log names all errors and no key."""

import httpx
import pytest
from structlog.testing import capture_logs

from sluice.tracecontext import attempt_traceparent

pytestmark = pytest.mark.real

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENT = {
    "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
    "tracestate": "vendor=1",
    "x-request-id": "mine-7",
}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def check(response: httpx.Response) -> None:
    version, trace, span, flags = response.headers["traceresponse"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert len(span) == 16
    assert response.headers["x-request-id"] == "mine-7"
    assert response.headers["server"] == "sluice"


async def test_every_answer_carries_request_and_trace(world) -> None:
    async with world() as w, w.http() as http:
        whole = await http.post("/v1/chat/completions", json=CHAT, headers=SENT)
        stream = await http.post(
            "/v1/chat/completions", json={**CHAT, "stream": True}, headers=SENT
        )
        assert (whole.status_code, stream.status_code) == (200, 200)
        wrong = await http.post("/v1/chat/completions", json={}, headers=SENT)
        unknown = await http.get("/nowhere", headers=SENT)
        probe = await http.get("/readyz", headers=SENT)
        for response in (whole, stream, wrong, unknown, probe):
            check(response)
        spans = {r.headers["traceresponse"] for r in (whole, stream, wrong, unknown, probe)}
        assert len(spans) == 5
        passed_on = [submit.traceparent for submit in w.router.submits]
        parents = [r.headers["traceresponse"] for r in (whole, stream)]
        assert passed_on == [attempt_traceparent(parent, 0, 0) for parent in parents]
        assert {submit.tracestate for submit in w.router.submits} == {"vendor=1"}


async def test_errors_are_always_logged_and_successes_sampled(world) -> None:
    async with world(log_every=10) as w, w.http() as http:
        with capture_logs() as told:
            for _ in range(21):
                assert (await http.get("/healthz")).status_code == 200
            for _ in range(5):
                assert (await http.get("/nowhere")).status_code == 404
            bad = await http.get("/v1/models", headers={"authorization": "Bearer sk-very-secret"})
            assert bad.status_code == 401
        ended = [entry for entry in told if entry["event"] == "request_ended"]
        assert sum(entry["status"] == 200 for entry in ended) == 3
        assert sum(entry["status"] == 404 for entry in ended) == 5
        assert sum(entry["status"] == 401 for entry in ended) == 1
        assert all(entry["request_id"] for entry in ended)
        assert "sk-" not in repr(told)


async def test_paths_and_methods_make_no_labels(world) -> None:
    async with world() as w, w.http() as http:
        for number in range(50):
            await http.get(f"/v1/models/none-{number}")
            await http.get(f"/path-{number}")
            await http.request("DELETE", f"/v1/models/none-{number}")
        page = (await http.get("/metrics")).text
        lines = [x for x in page.splitlines() if x.startswith("gateway_requests_total{")]
        assert {line.split('endpoint="')[1].split('"')[0] for line in lines} == {
            "/v1/models/*",
            "other",
        }
        assert len(lines) == 3
