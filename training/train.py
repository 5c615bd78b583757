"""Train the default model from nothing: first its tokenizer, then its weights, on one CPU core.

The schedule is bound to steps, so the result does not depend on how fast the machine is. Only the
last bits may differ between processors, because their matrix kernels round differently.

    python -m training.train --out DIR
"""

import argparse
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training import chat, llama
from training import tokenizer as tokenizer_module
from training.muon import Muon
from training.tasks import Conversation, training_conversation

log = logging.getLogger("training")

# Tokens of a batch, padding included. With twice as many a token took a tenth less time, but the
# same tokens make half the steps.
BATCH_TOKENS = 4096
STEPS = 8400
# Rows of similar length share a batch, cut from this many batches, to save padding.
_POOL_BATCHES = 16
# Muon for the matrices inside, AdamW for the embedding and the norms. On copying alone, after 45
# CPU seconds, the loss was 4.4 against 5.0 with AdamW for all.
MUON_RATE, ADAM_RATE = 0.02, 3e-3
_WARMUP_STEPS = 100
_LOG_EVERY_STEPS = 50
_CHECKPOINT_EVERY_STEPS = 250

# Token ids and, for each, how much it counts in the loss: zero unless the assistant writes it.
Row = tuple[list[int], list[float]]


def row(tokenizer: Tokenizer, conversation: Conversation) -> Row:
    """Return token ids with their weights in the loss.

    An answer counts by the root of its length: by tokens alone, long and easy answers (stories,
    counting) would drown the short ones that have to be computed.
    """
    ids: list[int] = []
    weights: list[float] = []
    for segment in chat.segments(conversation.system, conversation.samples):
        tokens = tokenizer.encode(segment.text, add_special_tokens=False).ids
        ids += tokens
        weights += [len(tokens) ** -0.5 if segment.is_target else 0.0] * len(tokens)
    return ids, weights


def batches(
    draw: Callable[[float], Row], rng: Random, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each of `steps` the ids and weights, both of shape (rows, tokens).

    `draw` gives a row for the moment of training, from 0 to 1. Rows are padded on the right; those
    that do not fit the context are left out.
    """
    step = 0
    while step < steps:
        pool: list[Row] = []
        tokens = 0
        while tokens < BATCH_TOKENS * _POOL_BATCHES:
            drawn = draw(step / steps)
            if len(drawn[0]) <= tokenizer_module.CONTEXT_TOKENS_MAX:
                pool.append(drawn)
                tokens += len(drawn[0])
        groups = list(_groups(pool))
        rng.shuffle(groups)
        for group in groups[: steps - step]:
            yield _padded(group)
        step += len(groups)


def _groups(pool: list[Row]) -> Iterator[list[Row]]:
    """Yield rows of similar length that fit one batch."""
    group: list[Row] = []
    for drawn in sorted(pool, key=lambda drawn: len(drawn[0])):
        if group and (len(group) + 1) * len(drawn[0]) > BATCH_TOKENS:
            yield group
            group = []
        group.append(drawn)
    yield group


def _padded(group: list[Row]) -> tuple[Tensor, Tensor]:
    length = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), length), tokenizer_module.PAD_ID)
    weights = torch.zeros((len(group), length))
    for index, (row_ids, row_weights) in enumerate(group):
        ids[index, : len(row_ids)] = torch.tensor(row_ids)
        weights[index, : len(row_weights)] = torch.tensor(row_weights)
    return ids, weights


def optimizers(model: llama.Llama) -> list[torch.optim.Optimizer]:
    """Return the optimizers, each with its peak rate in `initial_lr`."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    adam_groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": 0.02},
        {"params": norms, "weight_decay": 0.0},
    ]
    chosen: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=MUON_RATE, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(adam_groups, lr=ADAM_RATE, betas=(0.9, 0.98)),
    ]
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return chosen


def rate_factor(step: int, steps: int) -> float:
    """Return the share of the peak rate at `step`: a short rise, then half a cosine to 2 %."""
    rise = min(1.0, (step + 1) / _WARMUP_STEPS)
    return rise * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def loss_of(model: llama.Llama, ids: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Return the loss to minimise and the mean loss of an answer's token.

    Only tokens with a weight count, each predicted from the one before it.
    """
    is_target = weights[:, 1:] > 0
    states = model.hidden_states(ids[:, :-1], is_target)
    losses = functional.cross_entropy(model.logits(states), ids[:, 1:][is_target], reduction="none")
    chosen = weights[:, 1:][is_target]
    return (losses * chosen).sum() / chosen.sum(), losses.mean().item()


def fit(
    model: llama.Llama,
    chosen: Sequence[torch.optim.Optimizer],
    source: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    checkpoint: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Train on the batches of `source` and return what it took."""
    start_s, tokens, average = time.process_time(), 0, math.log(tokenizer_module.VOCAB_SIZE)
    for step, (ids, weights) in enumerate(source):
        for optimizer in chosen:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate_factor(step, steps)
        loss, token_loss = loss_of(model, ids, weights)
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
        if checkpoint and (step + 1) % _CHECKPOINT_EVERY_STEPS == 0:
            checkpoint()
    return {
        "steps": steps,
        "tokens": tokens,
        "final_loss": round(average, 4),
        "cpu_minutes": round((time.process_time() - start_s) / 60, 1),
    }


def train(tokenizer: Tokenizer, out: Path, steps: int, seed: int) -> dict[str, float]:
    """Train a new model, leave it in `out`, and return what it took."""
    torch.manual_seed(seed)
    model = llama.Llama(llama.Shape())
    rng = Random(f"train {seed}")
    source = batches(
        lambda progress: row(tokenizer, training_conversation(rng, progress)),
        Random(f"shuffle {seed}"),
        steps,
    )
    taken = fit(model, optimizers(model), source, steps, lambda: llama.save(model, out))
    llama.save(model, out)
    return {**taken, "parameters": sum(p.numel() for p in model.parameters())}


def main() -> None:
    """Train the tokenizer and the model, and write the files a server needs."""
    parser = argparse.ArgumentParser(description="Train the default chat model from nothing.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    tokenizer = tokenizer_module.train(arguments.seed)
    tokenizer_module.save(tokenizer, arguments.out)
    generation = {
        "do_sample": False,
        "eos_token_id": tokenizer_module.TURN_END_ID,
        "pad_token_id": tokenizer_module.PAD_ID,
    }
    (arguments.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    taken = train(tokenizer, arguments.out, arguments.steps, arguments.seed)
    (arguments.out / "training.json").write_text(json.dumps(taken, indent=2) + "\n")
    log.info("%s", json.dumps(taken))


if __name__ == "__main__":
    main()
