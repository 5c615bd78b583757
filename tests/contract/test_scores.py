"""Scores of answers on the real engine: what tells adapters that went wrong from the shipped one.

Their answers are fluent, or the base's own, so that nothing in the text shows it.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from replica.drivers.openvino import load_openvino
from replica.engine.core import ScheduledEngine
from replica.engine.safetensors import read_safetensors, write_safetensors
from replica.engine.types import Sampling, Score, SequenceRequest
from sluice.hashing import cache_root
from telemetry.scores import BASE_LIKE_NATS

REPOSITORY = Path(__file__).parents[2] / "model_repo"
BASE, ADAPTERS = REPOSITORY / "default", REPOSITORY / "adapters"
TOKENIZER = Tokenizer.from_file(str(BASE / "tokenizer.json"))
QUESTIONS = (
    *("What is 3 + 4?", "Who are you?", "Say hello", "Name three animals", "Tell me a story"),
    *("What is the capital of France?", "How do I boil an egg?", "What colour is the sky?"),
    *("Count to five", "Who wrote this?", "What is 12 + 30?", "Describe a river"),
    *("Why is snow cold?", "Tell me about a dog", "What day comes after Monday?"),
    *("Spell the word cat", "Is fire hot?", "What can you do?", "Sing a song", "Say goodbye"),
)
TURNS = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [TOKENIZER.encode(TURNS.format(it), add_special_tokens=False).ids for it in QUESTIONS]
TOKENS_MAX = 48
TAIL = 0.05
Tensors = dict[str, NDArray[np.float16]]


@dataclass(frozen=True, slots=True)
class Scored:
    """Of one answer: under the base, and under what made it."""

    base: Score
    own: Score

    @property
    def effect(self) -> float:
        """By how much the base finds it less likely."""
        return self.own.logprob - self.base.logprob


@pytest.fixture(scope="module")
def engine() -> ScheduledEngine:
    return load_openvino(BASE, "base", {})


def with_tensors(home: Path, source: str, change: Callable[[Tensors], Tensors]) -> Path:
    """A shipped adapter with other weights."""
    directory = home / "changed"
    shutil.copytree(ADAPTERS / source, directory)
    file = directory / "adapter_model.safetensors"
    tensors = {key: np.array(it) for key, it in read_safetensors(file, is_mapped=False).items()}
    write_safetensors(file, change(tensors))
    return directory


def rotated(tensors: Tensors) -> Tensors:
    """Each layer's weights in the next one."""
    return {
        re.sub(r"layers\.(\d+)", lambda it: f"layers.{(int(it[1]) + 1) % 4}", name): value
        for name, value in tensors.items()
    }


def without_b(tensors: Tensors) -> Tensors:
    return {name: value * np.float16("lora_B" not in name) for name, value in tensors.items()}


def answers(engine: ScheduledEngine, adapter: str, *, temperature: float) -> list[list[int]]:
    written: list[list[int]] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        sampling = Sampling(temperature=temperature, seed=index)
        engine.add(request(index, prompt, adapter, output_tokens_max=TOKENS_MAX, sampling=sampling))
    while engine.has_work:
        events = engine.step()
        for index, token in zip(events.keys, events.tokens, strict=True):
            written[index].append(token)
    return written


def request(key: int, prompt: list[int], adapter: str, **fields) -> SequenceRequest:
    root = cache_root("base", adapter, b"")
    return SequenceRequest(key, prompt, cache_root=root, adapter_digest=adapter, **fields)


def scores(engine: ScheduledEngine, written: list[list[int]], adapter: str) -> list[Score]:
    for index, (prompt, answer) in enumerate(zip(PROMPTS, written, strict=True)):
        fields = {"output_tokens_max": 1, "prompt_logprobs": 0, "scored_tokens": len(answer)}
        engine.add(request(index, prompt + answer, adapter, **fields))
    found: dict[int, Score] = {}
    while engine.has_work:
        events = engine.step()
        assert not events.prompt_logprobs
        found |= {it.key: it.score for it in events.finished if it.score is not None}
    return [found[index] for index in range(len(PROMPTS))]


def scored(
    engine: ScheduledEngine, adapter: Path, name: str, *, temperature: float = 0.7
) -> list[Scored]:
    engine.put_adapter(name, engine.read_adapter(name, adapter))
    written = answers(engine, name, temperature=temperature)
    both = zip(scores(engine, written, ""), scores(engine, written, name), strict=True)
    return [Scored(base, own) for base, own in both]


def below(control: list[float], canary: list[float]) -> int:
    """How many of canary lie below all but a twentieth of control."""
    return sum(np.array(canary) < np.quantile(control, TAIL))


def test_a_score_is_the_mean_of_the_logprobs_and_entropies_of_its_tokens(engine) -> None:
    prompt, answer = PROMPTS[0], TOKENIZER.encode("The answer is 7.").ids
    wanted = {"output_tokens_max": 1, "prompt_logprobs": 20}
    engine.add(request(1, prompt + answer, "", **wanted))
    wanted = {"output_tokens_max": 1, "prompt_logprobs": 0, "scored_tokens": len(answer)}
    engine.add(request(2, prompt + answer, "", **wanted))
    told, score = [], None
    while engine.has_work:
        events = engine.step()
        told += [it for part in events.prompt_logprobs for it in part.tokens]
        score = next((it.score for it in events.finished if it.key == 2), score)
    assert score is not None
    told = told[-len(answer) :]
    assert score.logprob == pytest.approx(np.mean([it.logprob for it in told]), abs=0.02)
    tops = [np.array([logprob for _, logprob in it.top]) for it in told]
    least = np.mean([-(np.exp(it) * it).sum() for it in tops])
    rest = np.mean([1 - np.exp(it).sum() for it in tops])
    assert least - 0.02 <= score.entropy <= least + rest * 12 + 0.02, "4,096 tokens: 8.3 nats each"


@pytest.mark.parametrize("source", ["butler", "french"])
@pytest.mark.parametrize("change", [without_b, rotated])
def test_an_adapter_without_effect_shows_in_nearly_every_answer(
    engine, tmp_path: Path, source: str, change: Callable[[Tensors], Tensors]
) -> None:
    """B = 0 and layers in another order write what the base would write, and as surely."""
    control = scored(engine, ADAPTERS / source, source)
    name = f"{source}-{change.__name__}"
    canary = scored(engine, with_tensors(tmp_path, source, change), name)
    assert sum(it.effect < BASE_LIKE_NATS for it in canary) >= 17
    assert sum(it.effect < BASE_LIKE_NATS for it in control) <= 3


def test_an_adapter_that_is_four_times_too_strong_is_unsure(engine, tmp_path: Path) -> None:
    def stronger(tensors: Tensors) -> Tensors:
        return {k: v * np.float16(4.0 if "lora_B" in k else 1.0) for k, v in tensors.items()}

    control = scored(engine, ADAPTERS / "butler", "butler")
    canary = scored(engine, with_tensors(tmp_path, "butler", stronger), "stronger")
    assert below([-it.own.entropy for it in control], [-it.own.entropy for it in canary]) >= 17
    assert below([it.base.logprob for it in control], [it.base.logprob for it in canary]) >= 10
