"""Train the adapters that are shipped with the default model, one for each style.

python -m training.adapters --base MODEL_DIR --out DIR
"""

import argparse
import json
import logging
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from training import llama, lora
from training.styles import STYLES, Style, restyled
from training.tasks import training_conversation
from training.train import batches, fit, row

log = logging.getLogger("training")

STEPS = 400
RATE = 2e-3
# The mix of the late training, but before its long chats, which are slow and teach no style.
_PROGRESS = 0.5


def train(base: Path, out: Path, style: Style, steps: int, seed: int) -> dict[str, float]:
    """Train one adapter of the model of the directory `base`, and return what it took."""
    torch.manual_seed(seed)
    model = llama.load(base).train()
    parameters = lora.attach(model)
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "lr": RATE, "initial_lr": RATE}], betas=(0.9, 0.98)
    )
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    rng = Random(f"adapter {seed}")
    source = batches(
        lambda _: row(tokenizer, restyled(training_conversation(rng, _PROGRESS), style)),
        Random(f"shuffle {seed}"),
        steps,
    )
    taken = fit(model, [optimizer], source, steps)
    lora.save(model, out, "sluice-tiny")
    return {**taken, "parameters": sum(p.numel() for p in parameters)}


def main() -> None:
    """Train all adapters, or those that are named."""
    parser = argparse.ArgumentParser(description="Train the adapters of the default model.")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="one directory for each adapter")
    parser.add_argument("--names", nargs="*", choices=sorted(STYLES), default=list(STYLES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    for name in arguments.names:
        out = arguments.out / name
        taken = train(arguments.base, out, STYLES[name], arguments.steps, arguments.seed)
        (out / "training.json").write_text(json.dumps(taken, indent=2) + "\n")
        log.info("%s: %s", name, json.dumps(taken))


if __name__ == "__main__":
    main()
