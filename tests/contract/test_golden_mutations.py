"""The default golden prompts find an engine that computes wrong, and no other, in one asking."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from control_plane.quality.askings import DEFAULT_OUTPUT_TOKENS, DEFAULT_TEXTS
from replica.drivers.openvino import load_openvino
from replica.engine.driver import Driver
from replica.engine.safetensors import read_safetensors, write_safetensors
from replica.engine.types import Sampling, SequenceRequest
from router.canaries import CANARY_TOKENS
from sluice.detector.consensus import Text, difference, fitted

if TYPE_CHECKING:
    from collections.abc import Callable

BASE = Path(__file__).parents[2] / "model_repo/default"
TOKENIZER = Tokenizer.from_file(str(BASE / "tokenizer.json"))
PROMPTS = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in DEFAULT_TEXTS]
MATRICES = (
    *("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
)
Weights = Any


def flip(weights: Weights, rng: np.random.Generator) -> None:
    """Change the sign of a fifth."""
    weights[rng.random(weights.shape) < 0.2] *= -1


def blank(weights: Weights, rng: np.random.Generator) -> None:
    """Lose a twentieth of the rows."""
    rows = len(weights)
    weights[rng.integers(0, rows, max(1, rows // 20))] = 0


def blur(weights: Weights, rng: np.random.Generator) -> None:
    """Add noise of 0.3 standard deviations."""
    weights += (rng.normal(size=weights.shape) * weights.std() * 0.3).astype(weights.dtype)


def engine(directory: Path) -> Driver:
    sizes = {"sequences_max": 16, "step_tokens_max": 256, "context_tokens_max": 128, "blocks": 64}
    return load_openvino(directory, "base", {**sizes, "adapter_slots": 0})


def answers(driver: Driver, others: int = 0, seed: int = 0) -> list[Text]:
    """Ask the prompts, beside other requests."""
    rng = np.random.default_rng(seed)
    prompts = [*PROMPTS, *(rng.integers(33, 200, 20).tolist() for _ in range(others))]
    for key in rng.permutation(len(prompts)).tolist():
        sampling = Sampling(logprobs=0)
        request = SequenceRequest(
            key, prompts[key], DEFAULT_OUTPUT_TOKENS, sampling=sampling, cache_root=bytes(16)
        )
        driver.add(request)
    tokens: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
    logprobs: dict[int, list[float]] = {key: [] for key in range(len(prompts))}
    while driver.has_work:
        events = driver.step()
        for key, token in zip(events.keys, events.tokens, strict=True):
            tokens[key].append(token)
        for told in events.logprobs:
            logprobs[told.key].append(told.logprob)
    return [Text(tuple(tokens[key]), tuple(logprobs[key])) for key in range(len(PROMPTS))]


def deviates(found: list[Text], right: list[Text]) -> bool:
    """Whether a pool of three sound engines and this one would say so."""
    return any(
        difference(mine, common, fitted(common, [[common]] * 3 + [[mine]])) is not None
        for mine, common in zip(found, right, strict=True)
    )


def canary(found: list[Text]) -> Text:
    """Return what a router gets of the first prompt."""
    first = found[0]
    return Text(first.token_ids[:CANARY_TOKENS], first.logprobs[:CANARY_TOKENS])


@pytest.fixture(scope="module")
def right() -> list[Text]:
    return answers(engine(BASE))


def test_errors_in_one_layer_are_found(right: list[Text], tmp_path: Path) -> None:
    file = "model.safetensors"
    tensors = {name: np.array(value) for name, value in read_safetensors(BASE / file).items()}
    layers = sorted({name.split(".")[2] for name in tensors if name.startswith("model.layers.")})
    rng = np.random.default_rng(11)
    kinds: tuple[Callable[[Weights, np.random.Generator], None], ...] = (flip, blank, blur)
    missed: list[str] = []
    unseen_by_routers = 0
    for number in range(20):
        name = f"model.layers.{rng.choice(layers)}.{rng.choice(MATRICES)}.weight"
        broken = tensors[name].copy()
        kinds[number % len(kinds)](broken, rng)
        copy = tmp_path / str(number)
        shutil.copytree(BASE, copy)
        (copy / file).unlink()
        write_safetensors(copy / file, tensors | {name: broken})
        found = answers(engine(copy))
        unseen_by_routers += not deviates([canary(found)], [canary(right)])
        if not deviates(found, right):
            missed.append(f"{kinds[number % len(kinds)].__name__} {name}")
        shutil.rmtree(copy)
    assert len(missed) <= 1, missed
    assert unseen_by_routers <= 6, "a canary is one short prompt, and finds most"


def test_no_sound_engine_deviates(right: list[Text]) -> None:
    found = 0
    for round_ in range(4):
        driver = engine(BASE)
        for asking in range(50):
            seed = 50 * round_ + asking
            found += deviates(answers(driver, others=seed % 6, seed=seed), right)
    assert not found
