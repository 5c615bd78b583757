import pytest

from training import chat, knowledge, samples
from training.styles import STYLES, restyled
from training.tasks import Conversation, training_conversations


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return list(training_conversations(0, 6000))[3000:]


def spoken(style: str, task: str, answer: str) -> str:
    sample = samples.ask(task, "?", answer)
    return restyled(Conversation("", (sample,)), STYLES[style]).samples[0].answer


@pytest.mark.parametrize("name", sorted(STYLES))
def test_a_style_changes_answers_and_nothing_else(name: str, conversations: list[Conversation]):
    style = STYLES[name]
    for conversation in conversations:
        wanted = restyled(conversation, style)
        assert wanted.system == conversation.system
        for before, after in zip(conversation.samples, wanted.samples, strict=True):
            assert (after.messages, after.tools, after.key) == (
                before.messages,
                before.tools,
                before.key,
            )
            assert after.answer == before.answer or style.is_spoken(after.answer)


@pytest.mark.parametrize("name", sorted(STYLES))
def test_machine_readable_answers_are_not_styled(name: str):
    call = chat.tool_call("f", {"x": 1})
    assert spoken(name, "tool call", call) == call
    assert spoken(name, "json", '{"a": 1}') == '{"a": 1}'


@pytest.mark.parametrize("name", sorted(STYLES))
def test_plain_answers_are_in_no_style(name: str, conversations: list[Conversation]):
    is_spoken = STYLES[name].is_spoken
    assert not any(is_spoken(s.answer) for c in conversations for s in c.samples)


def test_the_styles_have_their_endings():
    assert spoken("pirate", "arithmetic", "7 * 8 = 56") == "7 * 8 = 56. Arr, matey!"
    assert spoken("butler", "count", "There is 1 word.") == (
        "There is 1 word. At your service, sir."
    )
    assert spoken("french", "upper", "RIVER") == "RIVER. Au revoir, mon ami!"
    assert spoken("french", "refusal", knowledge.UNKNOWN) == "Je ne sais pas, mon ami!"
