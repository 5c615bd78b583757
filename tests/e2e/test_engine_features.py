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
