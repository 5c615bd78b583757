"""What the CPU engine can do beyond text, as the official SDK asks for it."""

import re
import time

import httpx
import openai
import pytest

pytestmark = pytest.mark.real

BASE = "sluice-tiny"
GBNF = """root ::= verb " " noun
verb ::= "open" | "close"
noun ::= "gate" [1-9] | "river"
"""
LARK = """start: VERB " " noun
VERB: "open" | "close"
noun: "gate" /[1-9]/ | "river"
"""
SENTENCES = {
    f"{verb} {noun}"
    for verb in ("open", "close")
    for noun in ("river", *[f"gate{number}" for number in range(1, 10)])
}


@pytest.fixture
def client(real_client) -> openai.OpenAI:
    return real_client


@pytest.mark.parametrize(
    "body",
    [{"structured_outputs": {"grammar": GBNF}}, {"guided_grammar": GBNF}, {"grammar": LARK}],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_follows_a_grammar(client, body: dict, temperature: float) -> None:
    message = {"role": "user", "content": "What shall we do?"}
    answer = client.chat.completions.create(
        model=BASE, messages=[message], extra_body=body, temperature=temperature, max_tokens=30
    )
    assert answer.choices[0].message.content in SENTENCES
    text = client.completions.create(
        model=BASE, prompt="We", extra_body=body, temperature=temperature, max_tokens=30
    )
    assert text.choices[0].text in SENTENCES


@pytest.mark.parametrize(
    "grammar", ["root ::= missing", "start: (", "root ::= root", "start: X\nX: (/a/{999}){999}"]
)
def test_a_grammar_that_cannot_be_used_is_a_400_with_its_name(client, grammar: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=BASE, prompt="We", extra_body={"guided_grammar": grammar})
    assert caught.value.param == "grammar"


STORY = "One two three four five six seven. The gate is open."


def repeated(client: openai.OpenAI, **extra: object) -> openai.types.chat.ChatCompletion:
    message = {"role": "user", "content": "Spell the word river"}
    return client.chat.completions.create(
        model=BASE, messages=[message], temperature=0, max_tokens=60, **extra
    )


def test_a_prediction_is_accepted_where_the_answer_follows_it(client) -> None:
    plain = repeated(client)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        predicted = repeated(client, prediction={"type": "content", "content": content})
        details = predicted.usage.completion_tokens_details
        assert predicted.choices[0].message.content == text
        assert predicted.usage.completion_tokens == plain.usage.completion_tokens
        assert details.accepted_prediction_tokens > 0
        assert details.rejected_prediction_tokens >= 0
    half = text[: len(text) // 2] + STORY
    wrong = repeated(client, prediction={"type": "content", "content": half})
    assert wrong.choices[0].message.content == text
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_a_stream_reports_how_much_of_its_prediction_was_accepted(client) -> None:
    text = repeated(client).choices[0].message.content
    chunks = list(
        repeated(
            client,
            prediction={"type": "content", "content": text},
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_sampling_with_a_seed_is_the_same_with_a_prediction(client) -> None:
    message = {"role": "user", "content": "Tell me a story."}
    options = {"model": BASE, "messages": [message], "temperature": 1, "seed": 5, "max_tokens": 40}
    text = client.chat.completions.create(**options).choices[0].message.content
    prediction = {"type": "content", "content": text}
    again = client.chat.completions.create(**options, prediction=prediction)
    assert again.choices[0].message.content == text


def test_a_prediction_longer_than_the_context_is_a_400(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        repeated(client, prediction={"type": "content", "content": "river and gate " * 5000})
    assert caught.value.param == "prediction"


PROMPT = "Once upon a time there was a river, and at the river stood a gate. The gate was old."


def ids_of(client: openai.OpenAI, text: str) -> list[int]:
    answer = client.post("/tokenize", body={"model": BASE, "prompt": text}, cast_to=httpx.Response)
    return answer.json()["tokens"]


def columns_of(choice: openai.types.CompletionChoice) -> list[list[object]]:
    told = choice.logprobs
    return [told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset]


def test_an_echoed_prompt_has_its_log_probabilities(client) -> None:
    plain = {"model": BASE, "temperature": 0, "logprobs": 3}
    free = client.completions.create(prompt=PROMPT, max_tokens=12, **plain).choices[0]
    both = client.completions.create(prompt=PROMPT, max_tokens=12, echo=True, **plain).choices[0]
    assert both.text == PROMPT + free.text
    tokens, logprobs, tops, offsets = columns_of(both)
    assert len(tokens) == len(logprobs) == len(tops) == len(offsets)
    assert logprobs[0] is None
    assert tops[0] is None
    assert all(value <= 0 for value in logprobs[1:])
    assert all(3 <= len(top) <= 4 for top in tops[1:])
    assert offsets[0] == 0
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(both.text)], strict=True):
        assert both.text[begin:end] in (token, "")
    # What was generated, given as a prompt, has the same probabilities.
    alone = client.completions.create(prompt=both.text, max_tokens=0, echo=True, **plain).choices[0]
    assert alone.text == both.text
    assert alone.finish_reason == "length"
    assert len(alone.logprobs.tokens) == len(ids_of(client, both.text))
    assert alone.logprobs.tokens == tokens[: len(alone.logprobs.tokens)]
    for again, before in zip(alone.logprobs.token_logprobs[1:], logprobs[1:], strict=False):
        assert again == pytest.approx(before, abs=0.2)  # bf16 and u8, another batch


def test_evaluation_harnesses_send_ids_and_count_columns(client) -> None:
    prompts = [ids_of(client, PROMPT), ids_of(client, "Hello there")]
    answer = client.completions.create(
        model=BASE, prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        tokens, logprobs, tops, offsets = columns_of(choice)
        assert len(tokens) == len(logprobs) == len(tops) == len(offsets) == len(prompt) + 1
        assert logprobs[0] is None
        assert None not in logprobs[1:]
    assert answer.choices[0].text.startswith(PROMPT)
    # A second time most of it is cached, and all of it is told.
    again = client.completions.create(
        model=BASE, prompt=prompts, max_tokens=0, logprobs=1, echo=True, temperature=0
    )
    assert again.usage.completion_tokens == 0
    assert again.usage.total_tokens == again.usage.prompt_tokens == sum(map(len, prompts))
    for prompt, choice in zip(prompts, again.choices, strict=True):
        assert len(choice.logprobs.tokens) == len(prompt)
    several = client.completions.create(
        model=BASE, prompt=PROMPT, max_tokens=3, n=2, echo=True, logprobs=1, temperature=1, seed=3
    )
    first, second = [columns_of(choice)[1] for choice in several.choices]
    assert first[: len(prompts[0])] == second[: len(prompts[0])]
    one = client.completions.create(
        model=BASE, prompt=prompts[0][:1], max_tokens=0, logprobs=0, echo=True
    )
    assert one.choices[0].logprobs.token_logprobs == [None]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "stream"),
    ],
)
def test_an_echo_with_unsupported_parameters_is_refused_by_name(
    client, extra: dict, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=BASE, prompt=PROMPT, **extra)
    assert caught.value.param == param


def test_a_warm_prompt_stays_in_the_cache_of_its_engine(client, real_stack, tmp_path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("You are the keeper of a gate by a river, and answer briefly. " * 10)
    done = real_stack.sluice("models", "warm", "set", BASE, "--file", str(prompt))
    assert "1 warm prompt of" in done.stdout, done.stdout + done.stderr
    messages = [
        {"role": "system", "content": prompt.read_text()},
        {"role": "user", "content": "Who are you?"},
    ]
    deadline = time.monotonic() + 30
    while not blocks_pinned(real_stack):  # gateways hear of it, and engines tell, within seconds
        assert time.monotonic() < deadline
        client.chat.completions.create(model=BASE, messages=messages, max_tokens=1)
    done = real_stack.sluice("models", "warm", "remove", BASE)
    assert done.returncode == 0, done.stdout + done.stderr


def blocks_pinned(stack) -> float:
    with stack.admin() as http:
        replicas = http.get("/v1/replicas").json()["data"]
    texts = [
        httpx.get(f"http://{it['metrics_address']}/metrics", timeout=60).text for it in replicas
    ]
    found = re.findall(r"^llm_kv_blocks_pinned\S* (\S+)$", "".join(texts), re.MULTILINE)
    return sum(map(float, found))
