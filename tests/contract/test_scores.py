"""Answers of adapters on the real engine, scored, judged by the gates of a rollout's default plan.

One adapter is the shipped one; the others went wrong as adapters do. Some of their answers are
fluent, or the base's own, so that nothing in the text shows it.
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

from control_plane.rollouts.evidence import Arm, Histogram, Metric, ScoreEvidence, Window
from control_plane.rollouts.machine import step
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.state import Event, Evidence, Phase, Ready, Rollout, Start
from gateway.rollouts.flaws import flaws_of
from replica.drivers.openvino import load_openvino
from replica.engine.core import ScheduledEngine
from replica.engine.safetensors import read_safetensors, write_safetensors
from replica.engine.types import Sampling, Score, SequenceRequest
from sluice.buckets import BUCKETS, bucket_of
from sluice.hashing import cache_root
from telemetry.scores import BASE_LIKE_NATS

REPOSITORY = Path(__file__).parents[2] / "model_repo"
BASE, ADAPTERS = REPOSITORY / "default", REPOSITORY / "adapters"
TOKENIZER = Tokenizer.from_file(str(BASE / "tokenizer.json"))
TURN_END_ID = TOKENIZER.token_to_id("<|im_end|>")
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
WINDOW_MS = 10_000
Tensors = dict[str, NDArray[np.float16]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, its score under the base, and under what made it."""

    tokens: list[int]
    base: Score
    own: Score

    @property
    def arm(self) -> Arm:
        """What a window counts of it."""
        text = TOKENIZER.decode(self.tokens, skip_special_tokens=True)
        flaws = flaws_of(text, self.tokens, has_more=False)
        return Arm(
            1,
            empty_answers=int(flaws.is_empty),
            repetitive_answers=int(flaws.is_repetitive),
            cut_answers=int(TURN_END_ID not in self.tokens),
            output_tokens=one(len(self.tokens)),
            scores=ScoreEvidence(
                answers=1,
                base_like=int(self.own.logprob - self.base.logprob < BASE_LIKE_NATS),
                surprisal_mnats=one(-1000 * self.base.logprob),
                entropy_mnats=one(1000 * self.own.entropy),
            ),
        )


def one(value: float) -> Histogram:
    return Histogram(tuple(int(bucket == bucket_of(value)) for bucket in range(BUCKETS)))


def together(arms: list[Arm]) -> Arm:
    """All of them in one window."""
    none = Histogram()
    return Arm(
        len(arms),
        empty_answers=sum(it.empty_answers for it in arms),
        repetitive_answers=sum(it.repetitive_answers for it in arms),
        cut_answers=sum(it.cut_answers for it in arms),
        output_tokens=sum((it.output_tokens for it in arms), none),
        scores=ScoreEvidence(
            len(arms),
            sum(it.scores.base_like for it in arms),
            sum((it.scores.surprisal_mnats for it in arms), none),
            sum((it.scores.entropy_mnats for it in arms), none),
        ),
    )


def judged(control: list[Answer], canary: list[Answer]) -> tuple[Rollout, int]:
    """Roll out by the default plan, one answer of canary beside all of control in a window.

    Returns:
        The rollout, and how many of canary's answers there had been.
    """
    rollout, number = Rollout(Plan()), 0  # of the window
    of_control = together([it.arm for it in control])

    def tell(rollout: Rollout, event: Event) -> Rollout:
        return step(rollout, event, number * WINDOW_MS).rollout

    def windowed(rollout: Rollout, of_canary: Arm) -> Rollout:
        window = Window(number * WINDOW_MS, (number + 1) * WINDOW_MS, of_canary, of_control)
        return tell(rollout, Evidence((window,)))

    for _ in range(15):
        rollout = windowed(rollout, Arm())
        number += 1
    rollout = tell(tell(rollout, Start()), Ready(0))
    for count, answer in enumerate(canary, start=1):
        rollout = windowed(rollout, answer.arm)
        number += 1
        if rollout.phase is not Phase.RUNNING:
            return rollout, count
    return rollout, len(canary)


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


def stronger(tensors: Tensors, factor: float) -> Tensors:
    return {k: v * np.float16(factor if "lora_B" in k else 1.0) for k, v in tensors.items()}


def noise(tensors: Tensors) -> Tensors:
    """Of the same size as its weights."""
    draw = np.random.default_rng(0)
    return {
        k: (draw.standard_normal(v.shape) * v.std()).astype(v.dtype) for k, v in tensors.items()
    }


def half_again_as_strong(tensors: Tensors) -> Tensors:
    return stronger(tensors, 1.5)


def fifty_times_as_strong(tensors: Tensors) -> Tensors:
    return stronger(tensors, 50.0)


def ending_early(tensors: Tensors) -> Tensors:
    """Its last layer writes towards the end of the turn: after one to five tokens."""
    embeddings = read_safetensors(BASE / "model.safetensors", is_mapped=False)
    row = np.array(embeddings["model.embed_tokens.weight"][TURN_END_ID])
    place = "layers.3.mlp.down_proj"
    changed = {name: np.zeros_like(value) for name, value in tensors.items()}
    for name, value in changed.items():
        if place in name and "lora_A" in name:
            value[0] = np.random.default_rng(1).standard_normal(value.shape[1])
        elif place in name:
            value[:, 0] = 4 * row / np.linalg.norm(row)
    return changed


def answers(engine: ScheduledEngine, adapter: str, first_seed: int) -> list[list[int]]:
    written: list[list[int]] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        sampling = Sampling(temperature=0.7, seed=first_seed + index)
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


def answered(engine: ScheduledEngine, adapter: Path, name: str, *, first_seed: int = 0):
    engine.put_adapter(name, engine.read_adapter(name, adapter))
    written = answers(engine, name, first_seed)
    both = scores(engine, written, ""), scores(engine, written, name)
    return [Answer(*it) for it in zip(written, *both, strict=True)]


@pytest.fixture(scope="module")
def control(engine: ScheduledEngine) -> list[Answer]:
    return answered(engine, ADAPTERS / "butler", "butler")


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


def test_a_score_is_the_same_where_its_prompt_was_cached(engine: ScheduledEngine) -> None:
    prompt, answer = PROMPTS[0] * 8, TOKENIZER.encode("The answer is 7.").ids
    found: list[Score | None] = []
    cached: list[int] = []
    for key in (1, 2):
        fields = {"output_tokens_max": 1, "prompt_logprobs": 0, "scored_tokens": len(answer)}
        engine.add(request(key, prompt + answer, "", **fields))
        while engine.has_work:
            events = engine.step()
            cached += [it.cached_tokens for it in events.admitted]
            found += [it.score for it in events.finished]
    assert cached[1] >= len(prompt) - 32 > cached[0], "a score costs its answer alone"
    first, second = found
    assert first is not None
    assert second is not None
    assert second.logprob == pytest.approx(first.logprob, abs=0.02)
    assert second.entropy == pytest.approx(first.entropy, abs=0.05)


@pytest.mark.parametrize(
    ("change", "metrics"),
    [
        (without_b, {Metric.BASE_LIKE_ANSWERS}),
        (rotated, {Metric.BASE_LIKE_ANSWERS}),
        (noise, {Metric.BASE_LIKE_ANSWERS}),
        (half_again_as_strong, {Metric.UNSURE_ANSWERS, Metric.UNLIKELY_ANSWERS}),
        (fifty_times_as_strong, set(Metric)),
        (ending_early, {Metric.SHORT_ANSWERS, Metric.EMPTY_ANSWERS}),
    ],
)
def test_a_spoiled_adapter_is_rolled_back_within_twenty_answers(
    engine: ScheduledEngine,
    control: list[Answer],
    tmp_path: Path,
    change: Callable[[Tensors], Tensors],
    metrics: set[Metric],
) -> None:
    spoiled = with_tensors(tmp_path, "butler", change)
    rollout, count = judged(control, answered(engine, spoiled, change.__name__))
    assert (rollout.phase, rollout.stage) == (Phase.HALTED, 0), rollout.tests
    assert count <= 20
    assert rollout.verdict is not None
    assert rollout.verdict.metric in metrics


def test_the_shipped_adapter_is_not_accused_beside_itself(
    engine: ScheduledEngine, control: list[Answer]
) -> None:
    again = answered(engine, ADAPTERS / "butler", "butler", first_seed=1_000)
    rollout, _ = judged(control, again * 5)
    assert rollout.phase is Phase.RUNNING
