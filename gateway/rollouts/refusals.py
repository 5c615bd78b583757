"""Detects from the beginning of an answer that the model declined to answer. Pure.

A rollout compares the rates of refusals of two releases. Equal answers must therefore have equal
results, while an undetected phrasing matters less.
"""

import re
from collections.abc import Sequence

from gateway.text.pipe import TextPipe

OPENING_CHARACTERS = 160
_TOKENS_AT_ONCE = 32
# Maximum number of decoded tokens of an answer, which use less than 1 ms of the event loop.
OPENING_TOKENS_MAX = 1024

_APOSTROPHES = str.maketrans(dict.fromkeys("’‘ʼ＇`´", "'"))  # noqa: RUF001 - models use them
# Quotes, list marks and emphasis that may precede the words.
_LEADING = re.compile(r"[\s\"'“”«»*_#>\-–—.…]+")  # noqa: RUF001 - models use them
_CANNOT = (
    r"(?:i|we)(?: (?:can't|cannot|can not|won't|will not|couldn't|could not|shouldn't|should not"
    r"|don't feel comfortable|do not feel comfortable)"
    r"|(?:'m| am|'re| are) (?:\w+ )?(?:unable|not (?:able|allowed|permitted|comfortable|willing"
    r"|going)))\b(?! (?:only|just|help but)\b)"
)
# Verbs that must follow. Otherwise "I can't wait to tell you" would count as a refusal.
_DOING = (
    r"(?:help|assist|provid|fulfil|compl[iy]|creat|writ|generat|produc|engag|discuss|support|answer"
    r"|respond|continu|shar|giv|offer|do (?:that|this|so|it)|participat|facilitat|encourag|promot"
    r"|advis|tell you how|show you how|explain how|access|process|in good conscience)"
)
_DECLINE = r"i (?:(?:must|have to|need to|will|would|should) )?(?:\w+ )?(?:decline|refuse)\b"
_SORRY = (
    r"(?:(?:i'm|i am|we're|we are) (?:\w+ )?sorry|sorry|my apologies|i apologi[sz]e|apologies"
    r"|unfortunately|no|(?:i understand|thank you)[^.!?]{0,60}?)[,.:;!]? ?(?:(?:but|however),? )?"
)
_AS_MODEL = r"as (?:an?|your) [^,.]{0,40}, "
_REFUSALS = tuple(
    re.compile(pattern)
    for pattern in (
        # I'm sorry, but as an AI I cannot really help with that. I must decline.
        rf"(?:{_SORRY})?(?:{_AS_MODEL})?(?:{_CANNOT}[^.!?]{{0,40}}?\b{_DOING}|{_DECLINE})",
        # I'm sorry, but I can't.
        rf"{_SORRY}(?:{_AS_MODEL})?{_CANNOT}(?=[.!]|$)",
        r"(?:it's|it is|it would be|that's|that is) (?:not appropriate|inappropriate|unethical"
        r"|against my|not something i can)",
        r"(?:this|that|your) request (?:goes against|violates|is against|cannot be)",
        r"(?:es tut mir leid|tut mir leid|entschuldigung|leider)\b.{0,40}\b(?:kann|darf|werde)\b"
        r".{0,60}\bnicht\b",
        r"(?:(?:je suis|désolée?)\b.{0,40})?\bje ne (?:peux|suis|puis)\b.{0,20}\bpas\b",
        r"(?:lo siento|lamento|disculpa)\b.{0,40}\bno (?:puedo|podré|me es posible)\b",
        r"(?:mi dispiace|desculpe|sinto muito|lamento)\b.{0,40}\b(?:non|não) (?:posso|consigo)\b",
        r"(?:很?抱歉|对不起|不好意思).{0,20}(?:无法|不能|不可以)",
        r"(?:作为|我).{0,20}(?:无法|不能)(?:提供|回答|帮助|协助|满足|讨论)",
        r"(?:申し訳|すみません|ごめんなさい).{0,40}(?:できません|いたしかねます|お応え|お答え)",
    )
)


def is_refusal(text: str) -> bool:
    """Return whether an answer that begins with `text` declines.

    Only the first `OPENING_CHARACTERS` characters matter.
    """
    plain = text.lstrip()[:OPENING_CHARACTERS].translate(_APOSTROPHES).lower()
    found = _LEADING.match(plain)
    plain = " ".join(plain[found.end() if found else 0 :].split())
    return any(pattern.match(plain) for pattern in _REFUSALS)


def opening(pipe: TextPipe, tokens: Sequence[int]) -> str:
    """Return the first characters of an answer's content, without reasoning and tool calls.

    Content after the first `OPENING_TOKENS_MAX` tokens is ignored, as happens after long reasoning.

    Args:
        pipe: New pipe, which is read only as far as needed.
        tokens: All token ids of the answer.
    """
    text, looked_at = "", min(len(tokens), OPENING_TOKENS_MAX)
    for start in range(0, looked_at, _TOKENS_AT_ONCE):
        text += pipe.push(tokens[start : start + _TOKENS_AT_ONCE]).content
        if pipe.is_stopped or len(text) >= OPENING_CHARACTERS:
            return text
    return text if looked_at < len(tokens) else text + pipe.flush().content
