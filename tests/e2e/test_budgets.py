"""A small budget through the official SDK: used up, refused, raised, served again."""

import time

import openai
import pytest

pytestmark = pytest.mark.real

ASK = {
    "model": "sluice-tiny",
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 1,
}


@pytest.fixture
def caller(stack):
    """A tenant of its own, with the SDK's own retries."""
    key = stack.new_key("sdk-budget")
    with openai.OpenAI(base_url=stack.base_url, api_key=key, timeout=60) as client:
        yield client


def test_a_used_up_budget_stops_new_requests_until_there_is_more(stack, caller) -> None:
    def budget(*words: str) -> None:
        done = stack.sluice("tenants", "budget", *words)
        assert done.returncode == 0, done.stderr

    def until(is_served: bool) -> openai.RateLimitError | None:
        """Ask until it is served, or refused; return the refusal."""
        for _ in range(600):
            try:
                caller.chat.completions.create(**ASK)
            except openai.AuthenticationError:
                pass  # the gateway does not know the key yet
            except openai.RateLimitError as refusal:
                if not is_served:
                    return refusal
            else:
                if is_served:
                    return None
            time.sleep(0.1)
        pytest.fail(f"never {'served' if is_served else 'refused'}")

    until(is_served=True)
    running = caller.chat.completions.create(**ASK | {"max_tokens": 300, "stream": True})
    next(iter(running))
    budget("set", "sdk-budget", "daily", "--tokens", "5", "--per", "day")
    refusal = until(is_served=False)
    assert refusal is not None
    assert (refusal.code, refusal.type) == ("insufficient_quota", "insufficient_quota")
    assert "'daily' (5 tokens per day, in UTC)" in refusal.message
    headers = refusal.response.headers
    assert headers["x-sluice-budget"] == "daily"
    assert 0 < int(headers["retry-after"]) <= 86_400
    assert refusal.request.headers["x-stainless-retry-count"] == "0", "the SDK does not insist"
    assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length"
    shown = stack.sluice("tenants", "budget", "show", "sdk-budget").stdout
    assert "stopped" in shown, shown
    budget("set", "sdk-budget", "daily", "--tokens", "100000")
    until(is_served=True)
