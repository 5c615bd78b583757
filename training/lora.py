"""Low-rank adapters in torch: beside every linear layer of a frozen base, saved as PEFT does."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from training.llama import Llama

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
# PEFT wraps the model twice, and its files keep the names of the wrappers.
_PREFIX = "base_model.model."


class _AdaptedLinear(nn.Module):
    """A frozen linear layer and two small matrices: `y = W x + alpha / rank * B (A x)`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)  # so that training begins at the base

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A(x) * (ALPHA / RANK)
        return self.base(x) + functional.linear(low, self.lora_B.weight)


def attach(model: Llama) -> list[nn.Parameter]:
    """Freeze `model`, put an adapter beside its linear layers, and return what is to be trained."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if name in TARGETS:
                    setattr(block, name, _AdaptedLinear(child))
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]


def save(model: Llama, out: Path, base_name: str) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` in float16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        _PREFIX + name: tensor.detach().half().contiguous()
        for name, tensor in model.state_dict().items()
        if ".lora_" in name
    }
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def load(model: Llama, path: Path) -> None:
    """Attach the adapter of the directory `path`, saved by `save`, to `model`."""
    attach(model)
    tensors = load_file(path / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameters[name.removeprefix(_PREFIX)].copy_(tensor)
