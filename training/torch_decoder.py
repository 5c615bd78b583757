"""Greedy decoding in torch, for the evaluation: short and without a cache, because it runs once."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from training import llama, lora
from training.evaluate import Decode
from training.tokenizer import PAD_ID, TURN_END_ID

_BATCH_ROWS = 64


def decoder(path: Path, adapter: Path | None) -> Decode:
    """Return a decoder for the model of the directory `path`, with an adapter or without."""
    torch.set_num_threads(1)
    model = llama.load(path)
    if adapter:
        lora.load(model, adapter)

    def decode(prompts: Sequence[Sequence[int]], tokens_max: int) -> list[list[int]]:
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        written: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(prompts), _BATCH_ROWS):
            chosen = by_length[start : start + _BATCH_ROWS]
            for index, tokens in zip(
                chosen, _greedy(model, [prompts[i] for i in chosen], tokens_max), strict=True
            ):
                written[index] = tokens
        return written

    return decode


@torch.inference_mode()
def _greedy(
    model: llama.Llama, prompts: Sequence[Sequence[int]], tokens_max: int
) -> list[list[int]]:
    rows = [list(prompt) for prompt in prompts]
    running = list(range(len(rows)))
    for _ in range(tokens_max):
        ids = _padded([rows[index] for index in running])
        last = torch.tensor([len(rows[index]) - 1 for index in running])
        is_last = torch.arange(ids.shape[1]) == last[:, None]
        best = model.logits(model.hidden_states(ids, is_last)).argmax(-1).tolist()
        for index, token in zip(running, best, strict=True):
            rows[index].append(token)
        running = [index for index in running if rows[index][-1] != TURN_END_ID]
        if not running:
            break
    return [
        [token for token in row[len(prompt) :] if token != TURN_END_ID]
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    ids = torch.full((len(rows), max(map(len, rows))), PAD_ID)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids
