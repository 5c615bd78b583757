"""Canaries ask the prompt of the base, where its answers can be compared."""

from types import SimpleNamespace

import pytest

from router import canaries
from router.canaries import FIXED_PROMPT, CanaryAsker
from router.fleet import Target
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

PROMPT = (40, 41, 42)
KNOWN, UNKNOWN = Target("a:1", "llm", "base"), Target("b:1", "llm", "other")


class Engines:
    """Engines behind `probe`; each has a list of log probabilities or none."""

    def __init__(self, logprobs: list[float]) -> None:
        self.logprobs = logprobs
        self.prompts: list[tuple[int, ...]] = []
        self.roots: set[bytes] = set()

    async def probe(self, address, model, prompt, tokens, timeout_s, *, cache_root, wants_logprobs):
        assert wants_logprobs
        self.prompts.append(prompt)
        self.roots.add(cache_root)
        return SimpleNamespace(tokens=[7] * tokens, logprobs=self.logprobs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    state = ControlState()
    state.bases["base"] = wire.Base(digest="base", canary_token_ids=PROMPT)
    state.bases["other"] = wire.Base(digest="other")

    def make(logprobs: list[float]) -> tuple[CanaryAsker, Engines]:
        engines = Engines(logprobs)
        monkeypatch.setattr(canaries, "probe", engines.probe)
        return CanaryAsker(state), engines

    return make


async def test_each_base_is_asked_its_own_prompt_anew(asked) -> None:
    asker, engines = asked([-0.5] * 16)
    answers = [await asker.ask(it, 1.0) for it in (KNOWN, UNKNOWN, KNOWN)]
    assert engines.prompts == [PROMPT, FIXED_PROMPT, PROMPT]
    assert len(engines.roots) == 3, "no cache answers"
    assert answers[0].question == answers[2].question != answers[1].question
    assert answers[0].text.logprobs == (-0.5,) * 16


async def test_an_engine_without_log_probabilities_is_asked_fixed_ids(asked) -> None:
    asker, engines = asked([])
    first, second = [await asker.ask(KNOWN, 1.0) for _ in range(2)]
    assert engines.prompts == [PROMPT, FIXED_PROMPT]
    assert first.question != second.question, "answers to different prompts are not compared"
