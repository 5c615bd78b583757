"""The gateway against its own description: schemathesis sends what fits, and what does not."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.endpoints.openapi import document

pytestmark = pytest.mark.real

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
]
DOCUMENT = document()  # takes a quarter of a second of a processor
EXAMPLES = 6  # of each operation and way: making one takes longer than its answer
# Records lie behind the control plane, which this world does not have: 503 is the right answer.
RECORDS = ("/v1/conversations", "/v1/batches", "/v1/files", "/v1/chat/completions/{id}")
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "service_tier": "flex",
    },
    "/v1/completions": {"prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 3},
    "/v1/responses": {
        "input": [{"role": "user", "content": "hi"}],
        "max_output_tokens": 4,
        "metadata": {"a": "b"},
    },
    "/v1/tokenize": {"prompt": "hello"},
    "/v1/detokenize": {"tokens": [5, 6]},
}


@pytest.fixture(scope="module")
def description() -> Any:
    return schemathesis.openapi.from_dict(DOCUMENT)


def sent(case: Case, base_url: str) -> Any:
    headers = {"Authorization": "Bearer sk-one"}
    lists_chats = case.path == "/v1/chat/completions" and case.method == "GET"
    checks = CHECKS[lists_chats or case.path.startswith(RECORDS) :]  # without the first
    return case.call_and_validate(base_url=base_url, headers=headers, checks=checks)


def run(operation: Any, base_url: str, mode: GenerationMode) -> int:
    """Send examples of one operation; returns how many."""
    count = 0

    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        nonlocal count
        count += 1
        if isinstance(case.body, dict):
            model = case.body.get("model")
            if isinstance(model, str) and 0 < len(model) <= 256:  # what is wrong stays wrong
                case.body["model"] = "tiny"  # else nearly everything would end with a 404
        sent(case, base_url)

    send()
    return count


OPERATIONS = [(path, method) for path, item in DOCUMENT["paths"].items() for method in ("get", "post") if method in item and (path, method) != ("/v1/files", "post")]  # fmt: skip


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_every_operation_answers_as_described(
    world: Any, description: Any, path: str, method: str
) -> None:
    has_body = "requestBody" in DOCUMENT["paths"][path][method]
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if has_body else [])]
    async with world() as made:
        for mode in modes:
            operation = description[path][method]
            assert await asyncio.to_thread(run, operation, made.base_url, mode) > 0


@pytest.mark.parametrize("path", GOOD)
async def test_good_answers_are_as_described(world: Any, description: Any, path: str) -> None:
    async with world() as made:
        case = description[path]["post"].Case(
            body={"model": "tiny"} | GOOD[path], media_type="application/json"
        )
        response = await asyncio.to_thread(sent, case, made.base_url)
        assert response.status_code == 200, response.text


async def test_the_description_needs_no_key(world: Any) -> None:
    async with world() as made, made.http("none") as http:
        response = await http.get("/openapi.json", headers={"Authorization": ""})
        assert response.status_code == 200
        assert response.json() == DOCUMENT


async def test_models_are_as_described(world: Any, description: Any) -> None:
    async with world() as made:
        case = description["/v1/models/{id}"]["get"].Case(path_parameters={"id": "tiny"})
        assert (await asyncio.to_thread(sent, case, made.base_url)).status_code == 200
