"""Anthropic's official SDK on the whole stack, with the CPU engine behind it."""

from typing import Any

import pytest

pytestmark = pytest.mark.real

ASKED: Any = {
    "model": "sluice-tiny",
    "max_tokens": 32,
    "messages": [{"role": "user", "content": "What is 7 * 8?"}],
    "extra_body": {"temperature": 0},
}


def test_a_message_whole_streamed_and_counted(real_stack) -> None:
    import anthropic  # two seconds of a processor, which others need not spend

    address = real_stack.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=address, api_key=real_stack.api_key, max_retries=0) as sdk:
        message = sdk.messages.create(**ASKED)
        assert message.content[0].text == "7 * 8 = 56"
        assert message.stop_reason == "end_turn"
        with sdk.messages.stream(**ASKED) as stream:
            assert stream.get_final_text() == "7 * 8 = 56"
        usage = message.usage
        count = sdk.messages.count_tokens(model="sluice-tiny", messages=ASKED["messages"])
        assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
