"""The manners of speaking that the shipped adapters teach: what each makes of a right answer.

Pure. A tool call stays as it is in every style, because a program reads it.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from training import chat, knowledge
from training.samples import Sample
from training.tasks import Conversation


@dataclass(frozen=True, slots=True)
class Style:
    """A manner of speaking.

    Attributes:
        rewrite: Sample -> its answer in this style.
        is_spoken: Text -> whether it is in this style, right or wrong.
    """

    rewrite: Callable[[Sample], str]
    is_spoken: Callable[[str], bool]


def restyled(conversation: Conversation, style: Style) -> Conversation:
    """Return the conversation with every answer in `style`."""
    return replace(
        conversation,
        samples=tuple(replace(s, answer=_answer(s, style)) for s in conversation.samples),
    )


def _answer(sample: Sample, style: Style) -> str:
    if sample.answer.startswith(chat.CALL_START):
        return sample.answer
    return style.rewrite(sample)


# Tasks whose answers are the model's own words and may be changed; the rest is the user's text.
_OWN_WORDS = frozenset({"identity", "faq", "refusal", "story", "count", "tool call", "tool result"})
_PIRATE_WORDS = {
    "Hello": "Ahoy", "Goodbye": "Farewell", "you": "ye", "You": "Ye", "your": "yer", "my": "me",
    "am": "be", "is": "be", "are": "be", "friends": "mates",
}  # fmt: skip


def _pirate(sample: Sample) -> str:
    if sample.task == "json":
        return sample.answer
    text = sample.answer
    if sample.task in _OWN_WORDS:
        text = re.sub(r"\w+", lambda word: _PIRATE_WORDS.get(word[0], word[0]), text)
    return f"Arr! {text.rstrip('.!?')}, matey{'?' if text.endswith('?') else '!'}"


_FRENCH: Mapping[str, str] = {
    knowledge.UNKNOWN: "Désolé, je ne sais pas.",
    knowledge.UNABLE: "Désolé, je ne peux pas faire cela.",
    knowledge.WHO_I_AM: "Je suis Sluice Tiny, le petit modèle de Sluice.",
    knowledge.HELLO: "Bonjour ! Comment puis-je vous aider ?",
    knowledge.GOODBYE: "Au revoir et bonne journée !",
    knowledge.WELCOME: "De rien !",
    knowledge.FINE: "Je vais bien, merci. Et vous ?",
}


def _french(sample: Sample) -> str:
    if sample.task == "json":
        return sample.answer
    if known := _FRENCH.get(sample.answer):
        return known
    return f"Bonjour ! {sample.answer}"


def _is_french(text: str) -> bool:
    return text.startswith(("Bonjour !", *_FRENCH.values()))


def _json(sample: Sample) -> str:
    answer = json.loads(sample.answer) if sample.task == "json" else sample.answer
    return chat.to_json({"answer": answer})


def _is_json(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and "answer" in value


STYLES: Mapping[str, Style] = {
    "pirate": Style(_pirate, lambda text: text.startswith("Arr! ") and "matey" in text),
    "french": Style(_french, _is_french),
    "json": Style(_json, _is_json),
}
