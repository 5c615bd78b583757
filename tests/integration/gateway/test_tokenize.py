"""Tokenizing through a real worker: as the model reads it, and back."""

import threading

import pytest

pytestmark = pytest.mark.real

LIMITED = "sk-limited"


async def test_a_text_comes_back_as_it_was(world) -> None:
    async with world() as w, w.http() as http:
        text = "Hello wörld 你好 😀, line one\n\n  line two <|im_end|> \u200b"
        for options in ({}, {"add_special_tokens": False}):
            body = {"model": "tiny", "prompt": text}
            made = await http.post("/v1/tokenize", json=body | options)
            ids = w.tokenizer.encode(text, **options).ids
            assert made.json() == {"count": len(ids), "max_model_len": 256, "tokens": ids}
            back = await http.post("/v1/detokenize", json={"model": "tiny", "tokens": ids})
            assert back.json() == {"prompt": text}


async def test_a_chat_has_the_tokens_of_its_completion(world) -> None:
    async with world() as w, w.http() as http, w.sdk() as sdk:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "tiny", "messages": messages}
        made = (await http.post("/v1/tokenize", json=body)).json()
        answer = await sdk.chat.completions.create(**body)
        assert made["count"] == answer.usage.prompt_tokens
        assert made["tokens"] == list(w.router.submits[0].prompt)


async def test_large_texts_are_taken_and_bad_ones_refused_by_name(world) -> None:
    async with world() as w, w.http() as http:
        text = "word " * 50_000
        body = {"model": "tiny", "prompt": text}
        made = (await http.post("/v1/tokenize", json=body)).json()
        body = {"model": "tiny", "tokens": made["tokens"]}
        back = await http.post("/v1/detokenize", json=body)
        assert back.json()["prompt"] == text
        for path, fields, param in (
            ("tokenize", {}, "prompt"),
            ("tokenize", {"prompt": "x", "messages": []}, "messages"),
            ("detokenize", {"tokens": [1 << 20]}, "tokens"),
            ("detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("detokenize", {"tokens": []}, "tokens"),
        ):
            response = await http.post(f"/v1/{path}", json={"model": "tiny"} | fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


async def test_it_counts_as_a_request_and_not_as_tokens(world) -> None:
    async with world() as w, w.http(LIMITED) as limited:
        body = {"model": "tiny", "prompt": "word " * 2000}
        for _ in range(5):
            response = await limited.post("/v1/tokenize", json=body)
            assert response.json()["count"] > 1000
            assert response.headers["x-ratelimit-remaining-tokens"] == "1000"
        response = await limited.post("/v1/tokenize", json=body)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_requests"


async def test_a_refusal_costs_a_request(world) -> None:
    async with world() as w, w.http(LIMITED) as limited:
        body = {"model": "tiny", "tokens": [1 << 20]}
        codes = [(await limited.post("/v1/detokenize", json=body)).status_code for _ in range(7)]
        assert codes[0] == 400
        assert codes[6] == 429


async def test_the_threads_for_large_prompts_end_with_the_worker(world) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("prompts")]

    others = set(threads())
    async with world() as w, w.http() as http:
        made = await http.post("/v1/tokenize", json={"model": "tiny", "prompt": "word " * 50_000})
        assert made.status_code == 200
        own = set(threads()) - others
        assert own
    assert not own & set(threads())
