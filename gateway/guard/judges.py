"""Sends texts to the classifiers of the rules, and returns one verdict for each text.

The verdict depends on the scores of the text's classifiers. If a classifier misses its deadline,
the verdict depends on the rule's setting for that case.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from gateway.guard.classifiers.line import ClassifierLine
from gateway.guard.verdicts import (
    GuardVerdict,
    JudgedRule,
    Scores,
    classifiers_of,
    highest,
    verdict,
    windows,
)
from sluice.errors import BadRequestError, ErrorCode, RejectedError

T = TypeVar("T")
OnVerdict = Callable[[GuardVerdict], None]
_RETRY_S = 1.0
# Longest wait for a verdict in seconds, which exceeds the timeout of every classifier.
_VERDICT_S_MAX = 60.0


class _Trial:
    """A text that classifiers are judging."""

    def __init__(self, rules: Sequence[JudgedRule], on_verdict: OnVerdict) -> None:
        self._rules = rules
        self._on_verdict = on_verdict
        self._open = 0
        self._scores = dict[str, list[Scores]]()
        self._unjudged = set[str]()

    def begin(self, pieces: Sequence[str], lines: Iterable[ClassifierLine]) -> None:
        for line in lines:
            for piece in pieces:
                self._open += 1
                line.judge(piece, partial(self._take, line.entry.name))

    def end_if_over(self) -> None:
        if self._open:
            return
        names = classifiers_of(self._rules) - self._unjudged
        found = {name: highest(self._scores.get(name, ())) for name in names}
        self._on_verdict(verdict(self._rules, found))

    def miss(self, names: Iterable[str]) -> None:
        self._unjudged.update(names)

    def _take(self, name: str, told: Scores | None) -> None:
        self._open -= 1
        if told is None:
            self._unjudged.add(name)
        else:
            self._scores.setdefault(name, []).append(told)
        self.end_if_over()


class Judges:
    """The classifiers of one worker. `run` has to run in a TaskGroup."""

    def __init__(self, lines: Sequence[ClassifierLine]) -> None:
        """`lines` are the queues of all classifiers."""
        self._lines: Mapping[str, ClassifierLine] = {it.entry.name: it for it in lines}

    @property
    def names(self) -> Sequence[str]:
        """The names of all classifiers."""
        return tuple(self._lines)

    async def run(self) -> None:
        """Send queued texts to the classifiers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for line in self._lines.values():
                tasks.create_task(line.run())

    def judge(self, rules: Sequence[JudgedRule], text: str, on_verdict: OnVerdict) -> None:
        """Queue a text for judgement. `on_verdict` is called once, from the event loop."""
        names = classifiers_of(rules)
        trial, pieces = _Trial(rules, on_verdict), list[str]()
        try:
            pieces = windows(text)
        except ValueError:  # longer than the maximum that is judged
            trial.miss(names)
        else:
            trial.miss(names - self._lines.keys())
            trial.begin(pieces, [self._lines[it] for it in names & self._lines.keys()])
        if not pieces or not names & self._lines.keys():
            asyncio.get_running_loop().call_soon(trial.end_if_over)

    async def verdict(self, rules: Sequence[JudgedRule], text: str) -> GuardVerdict:
        """Return the verdict on a text."""
        answer: asyncio.Future[GuardVerdict] = asyncio.get_running_loop().create_future()
        self.judge(rules, text, partial(_set, answer))
        async with asyncio.timeout(_VERDICT_S_MAX):
            return await answer

    async def scores(self, name: str, texts: Sequence[str]) -> list[Scores]:
        """Return the scores of a classifier for each text.

        Raises:
            BadRequestError: A text is too long.
            RejectedError: UNAVAILABLE if the classifier misses its deadline.
        """
        pieces = [_pieces(it, number) for number, it in enumerate(texts)]
        line, loop = self._lines[name], asyncio.get_running_loop()
        answers: list[list[asyncio.Future[Scores | None]]] = []
        for one in pieces:
            row = [loop.create_future() for _ in one]
            answers.append(row)
            for piece, answer in zip(one, row, strict=True):
                line.judge(piece, partial(_set, answer))
        async with asyncio.timeout(_VERDICT_S_MAX):
            told = [[await it for it in row] for row in answers]
        if any(it is None for row in told for it in row):
            text = f"The classifier '{name}' does not answer at the moment; try again shortly."
            raise RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=_RETRY_S)
        return [highest([it for it in row if it is not None]) for row in told]


def _pieces(text: str, number: int) -> list[str]:
    try:
        return windows(text) or [text[:1]]
    except ValueError as error:
        param = f"input[{number}]"
        raise BadRequestError(ErrorCode.INVALID_REQUEST, str(error), param=param) from None


def _set(answer: "asyncio.Future[T]", value: T) -> None:
    if not answer.done():  # the caller may have been cancelled
        answer.set_result(value)
