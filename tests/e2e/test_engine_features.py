"""What the CPU engine can do beyond text, as the official SDK asks for it."""

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


def test_a_stream_tells_what_became_of_its_prediction(client) -> None:
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
