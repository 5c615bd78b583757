"""Train the default model from nothing: first its tokenizer, then its weights, on one CPU core.

The schedule is bound to steps, so the result does not depend on how fast the machine is. Only the
last bits may differ between processors, because their matrix kernels round differently.

    python -m training.train --out DIR --steps 8000 --seed 0
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training import chat, llama
from training import tokenizer as tokenizer_module
from training.tasks import Conversation, training_conversations

log = logging.getLogger("training")

BATCH_ROWS = 32
# Rows of similar length share a batch, cut from this many batches, to save padding.
_POOL_BATCHES = 16
# Muon for the matrices inside, AdamW for the embedding and the norms. On copying alone, after 45
# CPU seconds, the loss was 4.4 against 5.0 with AdamW for all.
MUON_RATE, ADAM_RATE = 0.02, 3e-3
_WARMUP_STEPS = 100
_LOG_EVERY_STEPS = 50
_CHECKPOINT_EVERY_STEPS = 250

Row = tuple[list[int], list[bool]]


def rows(tokenizer: Tokenizer, conversations: Iterator[Conversation]) -> Iterator[Row]:
    """Yield token ids and, for each, whether the assistant has to learn to write it."""
    for conversation in conversations:
        ids: list[int] = []
        is_target: list[bool] = []
        for segment in chat.segments(conversation.system, conversation.samples):
            tokens = tokenizer.encode(segment.text, add_special_tokens=False).ids
            ids += tokens
            is_target += [segment.is_target] * len(tokens)
        yield ids, is_target


def batches(source: Iterator[Row], rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids, target mask), both of shape (BATCH_ROWS, tokens), padded on the right."""
    while pool := list(islice(source, BATCH_ROWS * _POOL_BATCHES)):
        pool.sort(key=lambda row: len(row[0]))
        groups = [pool[i : i + BATCH_ROWS] for i in range(0, len(pool), BATCH_ROWS)]
        rng.shuffle(groups)
        for group in groups:
            length = max(len(ids) for ids, _ in group)
            ids = torch.full((len(group), length), tokenizer_module.PAD_ID)
            mask = torch.zeros((len(group), length), dtype=torch.bool)
            for index, (row_ids, row_mask) in enumerate(group):
                ids[index, : len(row_ids)] = torch.tensor(row_ids)
                mask[index, : len(row_mask)] = torch.tensor(row_mask)
            yield ids, mask


def optimizers(model: llama.Llama) -> list[torch.optim.Optimizer]:
    """Return the optimizers, each with its peak rate in `initial_lr`."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    adam_groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": 0.02},
        {"params": norms, "weight_decay": 0.0},
    ]
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(adam_groups, lr=ADAM_RATE, betas=(0.9, 0.98)),
    ]
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return chosen


def rate_factor(step: int, steps: range) -> float:
    """Return the share of the peak rate at `step`: a short rise, then half a cosine to 2 %.

    A run that resumes rises again, because its optimizers begin without their averages.
    """
    rise = min(1.0, (step - steps.start + 1) / _WARMUP_STEPS)
    return rise * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps.stop)))


def loss_of(model: llama.Llama, ids: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """Return the loss to minimise and the mean loss of a token.

    Only the tokens in `mask` count, each predicted from the one before it. A row counts by the
    root of its length: by tokens alone, long and easy answers (stories, counting) would drown the
    short ones that have to be computed.
    """
    is_target = mask[:, 1:]
    states = model.hidden_states(ids[:, :-1])[is_target]
    losses = functional.cross_entropy(model.logits(states), ids[:, 1:][is_target], reduction="none")
    per_row = is_target.sum(1, keepdim=True).clamp(min=1).float()
    weights = per_row.rsqrt().expand(is_target.shape)[is_target]
    return (losses * weights).sum() / weights.sum(), losses.mean().item()


def train(
    tokenizer: Tokenizer, out: Path, steps: range, seed: int, resume: Path | None
) -> dict[str, float]:
    """Train `steps`, leave the model in `out`, and return what it took.

    The schedule and the data are those of a run from 0 to the end of `steps`; a run that resumes
    takes its weights from `resume` and its place in the data from the first step.
    """
    torch.manual_seed(seed)
    model = llama.load(resume).train() if resume else llama.Llama(llama.Shape())
    chosen = optimizers(model)
    conversations = islice(
        training_conversations(seed, steps.stop * BATCH_ROWS), steps.start * BATCH_ROWS, None
    )
    source = batches(rows(tokenizer, conversations), Random(f"shuffle {seed}"))
    start_s, tokens, average = time.process_time(), 0, math.log(tokenizer_module.VOCAB_SIZE)
    for step, (ids, mask) in zip(steps, source, strict=True):
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate_factor(step, steps)
        loss, token_loss = loss_of(model, ids, mask)
        for optimizer in chosen:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
        tokens += ids.numel()
        average += 0.02 * (token_loss - average)
        if (step + 1) % _LOG_EVERY_STEPS == 0:
            spent_s = time.process_time() - start_s
            log.info(
                "step %d loss %.4f, %.0f CPU s, %.0f tok/s",
                step + 1, average, spent_s, tokens / spent_s,
            )  # fmt: skip
        if (step + 1) % _CHECKPOINT_EVERY_STEPS == 0:
            llama.save(model, out)
    llama.save(model, out)
    return {
        "steps": steps.stop,
        "tokens": tokens,
        "final_loss": round(average, 4),
        "cpu_minutes": round((time.process_time() - start_s) / 60, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main() -> None:
    """Train the tokenizer and the model, and write the files a server needs."""
    parser = argparse.ArgumentParser(description="Train the default chat model from nothing.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a model to take the weights from")
    parser.add_argument("--first-step", type=int, default=0, help="where `--resume` stopped")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if arguments.resume:  # weights are worth nothing with another tokenizer
        tokenizer = Tokenizer.from_file(str(arguments.resume / "tokenizer.json"))
    else:
        tokenizer = tokenizer_module.train(arguments.seed)
    tokenizer_module.save(tokenizer, arguments.out)
    generation = {
        "do_sample": False,
        "eos_token_id": tokenizer_module.TURN_END_ID,
        "pad_token_id": tokenizer_module.PAD_ID,
    }
    (arguments.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    steps = range(arguments.first_step, arguments.steps)
    taken = train(tokenizer, arguments.out, steps, arguments.seed, arguments.resume)
    log.info("%s", json.dumps(taken))


if __name__ == "__main__":
    main()
