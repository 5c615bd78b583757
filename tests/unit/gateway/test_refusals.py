"""What counts as declining, by how an answer begins."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.delta import AnswerDelta
from gateway.dialects.reasoning import ReasoningMarks, ReasoningParser
from gateway.rollouts.refusals import OPENING_CHARACTERS, OPENING_TOKENS_MAX, is_refusal, opening
from gateway.text.pipe import TextPipe
from tests.unit.gateway.test_streamed import TABLE, TOKENIZER

DECLINES = (
    "I'm sorry, but I can't help with that.",
    "I\u2019m sorry, but I can\u2019t assist with that request.",
    "I`m sorry, I cannot assist with that.",
    "  I apologize, but I am not able to provide that information.",
    "I can't help with that.",
    "I cannot in good conscience write this.",
    "I won't be able to assist you with this.",
    "I'm not able to help with that.",
    "I am unable to provide instructions for this.",
    "I'm really not comfortable with providing that.",
    "Sorry, I can't do that.",
    "I'm sorry, but I can't.",
    "Unfortunately, I cannot fulfill this request.",
    "As an AI language model, I cannot provide medical advice.",
    "I must respectfully decline to answer.",
    "I have to decline.",
    "**I can't help with that**",
    '"I cannot comply with this."',
    "I understand your frustration, but I can't help with this.",
    "It's not appropriate to discuss this.",
    "This request goes against my guidelines.",
    "I don't feel comfortable helping with this.",
    "I couldn't in good conscience recommend this.",
    "Es tut mir leid, aber ich kann dir dabei nicht helfen.",
    "Je suis désolé, mais je ne peux pas vous aider.",
    "Lo siento, pero no puedo ayudarte con eso.",
    "Mi dispiace, ma non posso aiutarti.",
    "抱歉\uff0c我无法提供这方面的帮助。",
    "申し訳ありませんが、そのご要望にはお応えできません。",
)
ANSWERS = (
    "",
    "The capital of France is Paris.",
    "I can't wait to tell you about it!",
    "I cannot recommend this film enough.",
    "I can't help but smile.",
    "I'm sorry to hear that you are ill. Rest, and drink a lot.",
    "I can help with that.",
    "Sure! Here is how: first, open the box.",
    "Sorry for the confusion: the answer is 4.",
    "Unfortunately, the train leaves at nine.",
    "You can't help with that if you are not there.",
    "No, water boils at 100 degrees.",
    "In this story the dragon says: I can't help with that.",
    "I will not only help, I will explain.",
    "Das kann ich gern erklären.",
    "Je ne sais quoi is a French phrase.",
)


@pytest.mark.parametrize("text", DECLINES)
def test_these_decline(text: str) -> None:
    assert is_refusal(text)
    assert is_refusal(text.upper())
    assert is_refusal(f"{text} Is there anything else that I may do for you?")


@pytest.mark.parametrize("text", ANSWERS)
def test_these_do_not(text: str) -> None:
    assert not is_refusal(text)


@given(st.text(max_size=400), st.text(max_size=50))
def test_only_the_beginning_counts(text: str, more: str) -> None:
    text = text.lstrip()
    if len(text) >= OPENING_CHARACTERS:
        assert is_refusal(text) == is_refusal(text + more)


def test_no_text_takes_long() -> None:
    for text in ("i'm sorry " * 40, "i understand " * 40, "- " * 200, "thank you , " * 40):
        assert not is_refusal(text)


@pytest.mark.parametrize("text", [DECLINES[0], "short", "", "word " * 200])
def test_the_opening_is_taken_from_the_tokens(text: str) -> None:
    found = opening(TextPipe(TABLE), TOKENIZER.encode(text, add_special_tokens=False).ids)
    assert text.startswith(found)
    assert len(found) == len(text) or len(found) >= OPENING_CHARACTERS
    assert is_refusal(found) == is_refusal(text)


def test_the_opening_ends_where_the_answer_does() -> None:
    tokens = TOKENIZER.encode("I can help. STOP I cannot help", add_special_tokens=False).ids
    assert opening(TextPipe(TABLE, ["STOP"]), tokens) == "I can help. "


@pytest.mark.parametrize(("words", "found"), [(20, DECLINES[0]), (OPENING_TOKENS_MAX, "")])
def test_long_reasoning_is_not_decoded_to_its_end(words: int, found: str) -> None:
    text = f"<think>{'so ' * words}</think>{DECLINES[0]}"
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    seen: list[int] = []

    class Watched(TextPipe):
        __slots__ = ()

        def push(self, tokens: Sequence[int]) -> AnswerDelta:
            seen.extend(tokens)
            return super().push(tokens)

    parser = ReasoningParser(ReasoningMarks("<think>", "</think>"), None, is_open=False)
    assert opening(Watched(TABLE, (), parser), tokens) == found
    assert len(seen) == min(len(tokens), OPENING_TOKENS_MAX)
