"""Numbers that are none end a sequence with an error, also where the KV cache would hide them."""

from pathlib import Path

import numpy as np
import pytest

from replica.drivers.openvino import load_openvino
from replica.engine.safetensors import read_safetensors, write_safetensors
from replica.engine.types import Finish, FinishedEvent, Sampling, SequenceRequest
from tests.support.random_models import write_random_model

PROMPT = [5, 9, 20, 7, 33]


def finished(base: Path, **options: object) -> list[FinishedEvent]:
    """Answer greedily and by chance; return how both ended."""
    sizes = {"sequences_max": 2, "step_tokens_max": 64, "context_tokens_max": 64, "blocks": 8}
    driver = load_openvino(base, "base", {**sizes, "adapter_slots": 0, "threads": 1, **options})
    for key, sampling in enumerate((Sampling(), Sampling(temperature=1.0, seed=3))):
        driver.add(SequenceRequest(key, PROMPT, 3, sampling=sampling, cache_root=bytes(16)))
    ended: list[FinishedEvent] = []
    while driver.has_work:
        ended += driver.step().finished
    return ended


@pytest.mark.parametrize("name", ["v_proj", "k_proj", "o_proj"])
def test_a_projection_that_is_not_finite_fails_the_sequence(tmp_path: Path, name: str) -> None:
    write_random_model(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {key: np.array(value) for key, value in read_safetensors(file).items()}
    tensors[f"model.layers.0.self_attn.{name}.weight"][3] = np.nan
    file.unlink()
    write_safetensors(file, tensors)
    ended = finished(tmp_path, kv_precision="u8")
    assert {(event.reason, event.code) for event in ended} == {(Finish.FAILED, "engine_failed")}
    assert all("not finite" in event.message for event in ended)


def test_a_sound_base_answers(tmp_path: Path) -> None:
    write_random_model(tmp_path)
    assert {event.reason for event in finished(tmp_path, kv_precision="u8")} == {Finish.LENGTH}
