"""Measures the delay of answers whose sentences wait for the shipped classifier (release fence).

One operation is one segment (sentence) of an answer, from its last token until its text is
released. The texts of 100 concurrent answers are the repository's documents, as tokens of the
default model. Each answer receives one token every 20 ms. The answers pass through the judges of
one gateway worker, in one process. "delay" is the wait of a complete sentence for the classifier.
"cpu" is the CPU time per token of the rules' automaton and the classifier. Not measured: the rest
of the gateway.
Run: `python -m benchmarks.micro.guard_fence`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter
from tokenizers import Tokenizer

from benchmarks.results import write_result
from gateway.dialects.delta import AnswerDelta
from gateway.guard.judged_answer import JudgedAnswer
from gateway.guard.judges import Judges, OnVerdict
from gateway.guard.making import make_judges
from gateway.guard.plan import GuardPlan
from gateway.guard.verdicts import JudgedRule
from gateway.text.logprobs import TokenLogprob
from sluice.wire.control.v1 import control_pb2 as wire

STREAMS, STEP_S, STEPS = 100, 0.02, 400
_TOKENIZER = Path("model_repo/default/tokenizer.json")


def _plan(fence: str) -> GuardPlan:
    # No text reaches this score. So the classifier judges all text, and none is blocked.
    rule = wire.GuardRule(
        id="r", action="block", classifier="shipped", threshold=1.0, targets=["answer"]
    )
    return GuardPlan(
        [wire.GuardSet(id="s", version=1, active_version=1, active_rules=[rule], fence=fence)]
    )


class _Stream:
    """Records the arrival of an answer's characters, and their wait after the end of a segment."""

    def __init__(self, plan: GuardPlan, judges: Judges, delays_s: list[float]) -> None:
        self._asked_at_s = deque[float]()
        self._judges, self._delays_s = judges, delays_s
        self.guard = JudgedAnswer(plan, ask=self._judge)
        self.guard.on_release = self._released

    def _judge(self, rules: Sequence[JudgedRule], text: str, on_verdict: OnVerdict) -> None:
        self._asked_at_s.append(time.perf_counter())
        self._judges.judge(rules, text, on_verdict)

    def _released(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> None:
        del entries
        if delta.content:
            self._delays_s.append(time.perf_counter() - self._asked_at_s.popleft())


async def _measured(fence: str, texts: list[list[str]]) -> dict[str, float]:
    registry = CollectorRegistry()
    counter = Counter("texts", "", ("classifier", "result"), registry=registry)
    judges, plan, delays_s = make_judges(None, counter), _plan(fence), list[float]()
    streams = [_Stream(plan, judges, delays_s) for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(judges.run())
        began_s = time.process_time()
        for step in range(STEPS):
            due = partial(asyncio.sleep, STEP_S)
            for stream, tokens in zip(streams, texts, strict=True):
                stream.guard.passed(AnswerDelta(tokens[step]), (), step + 1)
            await due()
        cpu_s = time.process_time() - began_s
        running.cancel()
    ordered = sorted(delays_s)
    return {
        "segments": len(ordered),
        "delay_p50_ms": round(ordered[len(ordered) // 2] * 1e3, 2),
        "delay_p99_ms": round(ordered[len(ordered) * 99 // 100] * 1e3, 2),
        "cpu_us_per_token": round(cpu_s / STREAMS / STEPS * 1e6, 1),
    }


def main() -> None:
    """Measure and write the result."""
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    text = "\n".join([it.read_text() for it in sorted(Path("docs").glob("*.md"))])
    ids = tokenizer.encode(text[:400_000]).ids
    tokens = [tokenizer.decode([it], skip_special_tokens=False) for it in ids]
    texts = [tokens[at * STEPS : (at + 1) * STEPS] for at in range(STREAMS)]
    figures = {fence: asyncio.run(_measured(fence, texts)) for fence in ("sentence", "tokens")}
    operation = "a segment's wait for its verdict; 100 answers, a token each 20 ms"
    write_result("guard_fence", operation, figures)
    print(figures)


if __name__ == "__main__":
    main()
