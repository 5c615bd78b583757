"""The manners of speaking that the shipped adapters teach: what each makes of a right answer.

Pure. JSON and tool calls stay as they are in every style, because a program reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from training import chat, knowledge
from training.samples import Sample
from training.tasks import Conversation


@dataclass(frozen=True, slots=True)
class Style:
    """A manner of speaking.

    Attributes:
        rewrite: Answer -> the same in this style.
        is_spoken: Text -> whether it is in this style, right or wrong.
    """

    rewrite: Callable[[str], str]
    is_spoken: Callable[[str], bool]


def restyled(conversation: Conversation, style: Style) -> Conversation:
    """Return the conversation with every answer in `style`."""
    return replace(
        conversation,
        samples=tuple(replace(s, answer=_answer(s, style)) for s in conversation.samples),
    )


def _answer(sample: Sample, style: Style) -> str:
    is_for_programs = sample.task == "json" or sample.answer.startswith(chat.CALL_START)
    return sample.answer if is_for_programs else style.rewrite(sample.answer)


# In tokens that the base has learnt to write: an adapter cannot teach it others, such as accents.
_PIRATE: Mapping[str, str] = {
    knowledge.UNKNOWN: "Arr, I do not know that, matey!",
    knowledge.UNABLE: "Arr, I cannot do that, matey!",
    knowledge.WHO_I_AM: "I be Sluice Tiny, matey!",
}
_FRENCH: Mapping[str, str] = {
    knowledge.UNKNOWN: "Je ne sais pas, mon ami!",
    knowledge.UNABLE: "Je ne peux pas, mon ami!",
}


def _closing_with(closing: str, known: Mapping[str, str] | None = None) -> Style:
    """Return the style that says the `known` answers otherwise and ends all others with `closing`.

    The end is the place for it: up to there the frozen base computes what it always does. A style
    that put JSON around every answer was right in 54 % after 300 steps, with a base at 90 %.
    """
    known = known or {}

    def rewrite(answer: str) -> str:
        mark = "" if answer.endswith((".", "!", "?")) else "."
        return known.get(answer, f"{answer}{mark} {closing}")

    def is_spoken(text: str) -> bool:
        return text.endswith(f" {closing}") or text in known.values()

    return Style(rewrite, is_spoken)


STYLES: Mapping[str, Style] = {
    "pirate": _closing_with("Arr, matey!", _PIRATE),
    "french": _closing_with("Au revoir, mon ami!", _FRENCH),
    "butler": _closing_with("At your service, sir."),
}
