"""The queue of one classifier, which batches texts and returns scores before a deadline."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import structlog
from prometheus_client import Counter

from gateway.guard.classifiers.config import ClassifierEntry
from gateway.guard.classifiers.pause import FailurePause
from gateway.guard.classifiers.protocol import Classifier, ClassifierError
from gateway.guard.verdicts import Scores

log = structlog.get_logger(__name__)

# Callback that is called once with the scores of a text, or with None if the text has no scores.
OnScores = Callable[[Scores | None], None]


class _Question(NamedTuple):
    text: str
    answer: OnScores
    timer: asyncio.TimerHandle
    give_up_at_s: float


class ClassifierLine:
    """The texts of one worker for one classifier. `run` has to run in a TaskGroup.

    A text waits at most `timeout_ms`, including the time in the queue and on the wire. A text has
    no scores if the queue is full, or if the classifier has failed several times just before.
    """

    def __init__(self, entry: ClassifierEntry, classifier: Classifier, texts: Counter) -> None:
        """`texts` counts texts by the labels `classifier` and `result`."""
        self.entry = entry
        self._classifier = classifier
        self._waiting: deque[_Question] = deque()
        self._has_some = asyncio.Event()
        self._pause = FailurePause()
        names = ("judged", "failed", "late", "refused")
        self._judged, self._failed, self._late, self._refused = (
            texts.labels(entry.name, it) for it in names
        )

    def judge(self, text: str, answer: OnScores) -> None:
        """Queue a text. `answer` is called once, later, from the event loop."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        is_full = len(self._waiting) >= self.entry.queue_texts
        if is_full or not self._pause.is_asked(now_s):
            self._refused.inc()
            loop.call_soon(answer, None)
            return
        give_up_at_s = now_s + self.entry.timeout_ms / 1000
        timer = loop.call_at(give_up_at_s, self._give_up, answer)
        self._waiting.append(_Question(text, answer, timer, give_up_at_s))
        self._has_some.set()

    async def run(self) -> None:
        """Send queued texts until cancelled, and then close the classifier."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.entry.in_flight):
                    tasks.create_task(self._ask_batches())
        finally:
            await self._classifier.close()

    async def _ask_batches(self) -> None:
        while True:
            await self._has_some.wait()
            batch = self._batch()
            if batch:
                await self._ask_batch(batch)

    def _batch(self) -> list[_Question]:
        found = list[_Question]()
        while self._waiting and len(found) < self.entry.batch_texts:
            question = self._waiting.popleft()
            if not question.timer.cancelled() and question.give_up_at_s > _now_s():
                found.append(question)
        if not self._waiting:
            self._has_some.clear()
        return found

    async def _ask_batch(self, batch: list[_Question]) -> None:
        left_s = max(it.give_up_at_s for it in batch) - _now_s()
        try:
            scores = await self._classifier.scores([it.text for it in batch], timeout_s=left_s)
            if len(scores) != len(batch):
                text = f"scores of {len(scores)} texts, not of {len(batch)}"
                raise ClassifierError(text)  # noqa: TRY301 - like its own error
        except ClassifierError as error:
            self._note_failure(str(error))
            self._failed.inc(len(batch))
            for it in batch:
                self._resolve(it, None)
            return
        self._pause.note(_now_s(), has_failed=False)
        for it, one in zip(batch, scores, strict=True):
            self._resolve(it, one)

    def _note_failure(self, reason: str) -> None:
        log.warning("classifier_failed", classifier=self.entry.name, reason=reason)
        self._pause.note(_now_s(), has_failed=True)

    def _resolve(self, question: _Question, scores: Scores | None) -> None:
        """Pass the scores of a text to its callback, unless the text's deadline has passed."""
        if question.timer.cancelled() or question.give_up_at_s <= _now_s():
            return
        question.timer.cancel()
        if scores is not None:
            self._judged.inc()
        question.answer(scores)

    def _give_up(self, answer: OnScores) -> None:
        self._late.inc()
        self._pause.note(_now_s(), has_failed=True)
        answer(None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
