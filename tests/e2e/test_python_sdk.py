"""The official Python SDK on the real engine: answers, streamed and whole."""

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


COUNT = {"model": MODEL, "messages": user("Count from 1 to 9"), "temperature": 0}
# Hot enough that the small model, which is very sure of its answers, does not say one thing only.
RANDOM = {"model": MODEL, "messages": user("Tell me a story"), "temperature": 2, "max_tokens": 24}


@pytest.fixture
def client(real_client) -> openai.OpenAI:
    return real_client


def streamed(client: openai.OpenAI, **options) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(**options, stream=True) as stream:
        return list(stream)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def token_id(client: openai.OpenAI, text: str) -> str:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    (token,) = client.post("/tokenize", body=body, cast_to=dict)["tokens"]
    return str(token)


def test_three_answers_to_one_prompt_streamed_as_whole(client) -> None:
    whole = client.chat.completions.create(**RANDOM, n=3, seed=5)
    chunks = streamed(client, **RANDOM, n=3, seed=5, stream_options={"include_usage": True})

    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [text_of(chunks, index) for index in range(3)] == texts
    ends = [(c.index, c.finish_reason) for k in chunks for c in k.choices if c.finish_reason]
    assert sorted(ends) == [(c.index, c.finish_reason) for c in whole.choices]
    one = client.chat.completions.create(**RANDOM)
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens == whole.usage.completion_tokens > 3
        assert usage.prompt_tokens == one.usage.prompt_tokens
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_usage_comes_with_a_stream_only_if_asked_for(client) -> None:
    plain = streamed(client, **COUNT)
    with_usage = streamed(client, **COUNT, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in plain + with_usage[:-1])
    assert all(chunk.choices for chunk in plain)
    assert with_usage[-1].choices == []
    assert text_of(plain) == text_of(with_usage) == "1, 2, 3, 4, 5, 6, 7, 8, 9"
    whole = client.chat.completions.create(**COUNT)
    assert with_usage[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("stop", "text"),
    [("5", "1, 2, 3, 4, "), (["never", ", 7, 8"], "1, 2, 3, 4, 5, 6"), (["1"], "")],
    ids=["a token", "over tokens", "at once"],
)
def test_stop_strings_end_the_text_before_them(client, stop, text: str) -> None:
    whole = client.chat.completions.create(**COUNT, stop=stop)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    assert text_of(streamed(client, **COUNT, stop=stop)) == text


def test_log_probabilities_of_each_token_and_its_alternatives(client) -> None:
    options = {**COUNT, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**options).choices[0]
    tokens = answer.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == answer.message.content
    for token in tokens:
        best, *others = token.top_logprobs
        assert (best.token, best.logprob) == (token.token, token.logprob)  # it was greedy
        assert 0 >= token.logprob >= others[0].logprob >= others[1].logprob
    chunks = streamed(client, **options)
    pieces = [c.logprobs.content for k in chunks for c in k.choices if c.logprobs]
    assert [token for piece in pieces for token in piece] == tokens


def test_a_bias_forbids_a_token_or_forces_it(client) -> None:
    banned = client.chat.completions.create(**COUNT, logit_bias={token_id(client, "1"): -100})
    assert "1" not in banned.choices[0].message.content
    forced = client.chat.completions.create(
        **COUNT, max_tokens=3, logit_bias={token_id(client, "river"): 100}
    )
    assert forced.choices[0].message.content == "riverriverriver"


def test_a_seed_repeats_an_answer_and_another_one_does_not(client) -> None:
    def ask(seed: int) -> str:
        return client.chat.completions.create(**RANDOM, seed=seed).choices[0].message.content

    assert ask(1) == ask(1) != ask(2)


def test_penalties_keep_tokens_from_coming_again(client) -> None:
    # The extremes are compared: a greedy answer of 40 tokens may have few repetitions by itself.
    def ask(**penalty: float) -> list[str]:
        answer = client.completions.create(
            model=MODEL,
            prompt="The river",
            max_tokens=40,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True},
            **penalty,
        )
        return answer.choices[0].logprobs.tokens

    for name in ("presence_penalty", "frequency_penalty"):
        penalised, rewarded = (len(set(ask(**{name: value}))) for value in (2, -2))
        assert penalised > rewarded, name


def test_max_completion_tokens_is_exact(client) -> None:
    answer = client.chat.completions.create(**COUNT, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "1, 2, 3"


def test_a_second_turn_finds_the_first_one_in_the_cache(client) -> None:
    def ask(messages: list) -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, extra_body={"session_id": "of a test"}
        )

    messages = user("Count from 20 to 60")
    first = ask(messages)
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    second = ask([*messages, *user("Who are you?")])
    cached = second.usage.prompt_tokens_details.cached_tokens
    # Whole blocks of 32 tokens, of what was prompt and answer of the first turn.
    assert cached > first.usage.total_tokens - 64
    assert cached % 32 == 0
    assert "Sluice Tiny" in second.choices[0].message.content


def test_the_tier_that_served_is_told(client) -> None:
    def ask(tier: str) -> str | None:
        options = {"extra_body": {"deadline_ms": 30_000}, "user": "me", "metadata": {"of": "tests"}}
        return client.chat.completions.create(**COUNT, service_tier=tier, **options).service_tier

    assert ask("flex") == "flex"
    assert ask("auto") == "default"
    assert client.chat.completions.create(**COUNT).service_tier is None


@pytest.mark.parametrize("name", ["sluice-tiny-butler", "default"])
def test_every_name_of_a_model_can_be_asked_and_retrieved(client, name: str) -> None:
    assert client.models.retrieve(name).id == name
    assert name in [model.id for model in client.models.list()]
    answer = client.chat.completions.with_raw_response.create(**{**COUNT, "model": name})
    assert answer.headers["x-sluice-model"] == answer.parse().model


def test_a_text_goes_on_and_is_echoed(client) -> None:
    options = {"model": MODEL, "prompt": "The river", "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    assert client.completions.create(**options, echo=True).choices[0].text == f"The river{plain}"
    with client.completions.create(**options, echo=True, stream=True) as stream:
        assert "".join(c.text for k in stream for c in k.choices) == f"The river{plain}"


def test_several_texts_with_several_answers_each(client) -> None:
    prompts = ["The river", "The gate", "One night"]
    options = {"model": MODEL, "max_tokens": 6, "temperature": 1.5, "seed": 3}
    answer = client.completions.create(**options, prompt=prompts, n=2, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        assert choice.text.startswith(prompts[choice.index // 2])
    with client.completions.create(
        **options, prompt=prompts, n=2, echo=True, stream=True
    ) as stream:
        pieces = [choice for chunk in stream for choice in chunk.choices]
    for choice in answer.choices:
        assert "".join(p.text for p in pieces if p.index == choice.index) == choice.text


def test_the_log_probabilities_of_a_text_have_offsets(client) -> None:
    choice = client.completions.create(
        model=MODEL, prompt="The river", max_tokens=8, temperature=0, logprobs=2
    ).choices[0]
    lines = choice.logprobs
    assert "".join(lines.tokens) == choice.text
    for token, offset, own, top in zip(
        lines.tokens, lines.text_offset, lines.token_logprobs, lines.top_logprobs, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert max(top.values()) == top[token] == own <= 0
        assert len(top) == 2
