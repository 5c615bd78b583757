"""Parses the part of a PEFT adapter_config.json that the engines serve. Pure.

An adapter that is applied only in part causes wrong answers instead of an error. So the engines
must use every field, or the field must have no effect. All other fields are refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from control_plane.artifacts.headers import CheckError
from sluice.adapter_ranks import RANK

CONFIG_FILE = "adapter_config.json"
PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_SHORT = sorted(name.rpartition(".")[2] for name in PROJECTIONS)
_USED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
    | {"target_modules", "exclude_modules", "layers_to_transform"}
)
_HARMLESS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version"}
    | {"revision", "task_type", "layers_pattern", "runtime_config", "megatron_core", "eva_config"}
    | {"qalora_group_size"}
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_LITERAL = re.compile(r"[A-Za-z0-9_.]+")
_ALPHA_MAX = 1e9  # largest scale for which products with 16-bit weights fit into 32-bit floats
_LAYERS_MAX = 4096

Module = tuple[int, str]  # number of the layer, and one of `PROJECTIONS`


@dataclass(frozen=True, slots=True)
class BaseShape:
    """The shape of a base that an adapter must match.

    Attributes:
        layers: Number of layers of the base.
        projections: (outputs, inputs) of each projection in `PROJECTIONS`.
    """

    layers: int
    projections: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The modules that an adapter changes, with their ranks.

    Attributes:
        rank: Rank of the modules that no pattern matches.
        alpha: LoRA alpha, which is divided by the rank to scale the adapter's update.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    targets: tuple[str, ...]
    excluded: tuple[str, ...]
    layers: frozenset[int] | None

    def rank_of(self, module: Module) -> int:
        """Return the rank of a module's matrices."""
        named = (rank for key, rank in self.rank_pattern.items() if is_name_of(key, module))
        return next(named, self.rank)

    def modules(self, base: BaseShape) -> set[Module]:
        """Return the modules of a base that the adapter changes."""
        every = [(layer, name) for layer in range(base.layers) for name in PROJECTIONS]
        for target in self.targets:
            if not any(is_name_of(target, module) for module in every):
                raise _refused(
                    f"target_modules names {target!r:.80}, the base has {', '.join(_SHORT)} in"
                    f" {base.layers} layers",
                    "train it on this base, or name the right base",
                )
        return {
            module
            for module in every
            if any(is_name_of(target, module) for target in self.targets)
            and not any(is_name_of(target, module) for target in self.excluded)
            and (self.layers is None or module[0] in self.layers)
        }


def base_shape(config: Mapping[str, Any]) -> BaseShape:
    """Return the shape in a base's config.json. Raises CheckError if fields are missing."""
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        layers, inner = int(config["num_hidden_layers"]), int(config["intermediate_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // max(1, heads))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckError(
            f"config.json of the base has no usable {error!s:.80}: this base takes no adapters"
        ) from None
    if min(heads, hidden, layers, inner, kv_heads, head) < 1 or layers > _LAYERS_MAX:
        raise CheckError("config.json of the base has impossible sizes: import the base anew")
    query, key = heads * head, kv_heads * head
    rows = (query, key, key, hidden, inner, inner, hidden)
    columns = (*[hidden] * 3, query, *[hidden] * 2, inner)
    shapes = dict(zip(PROJECTIONS, zip(rows, columns, strict=True), strict=True))
    return BaseShape(layers, shapes)


def parse_adapter_config(config: Mapping[str, Any], rank_max: int) -> AdapterConfig:
    """Return the parsed config of an adapter.

    Raises:
        CheckError: A field has a value that no engine serves, or a rank is above `rank_max`.
    """
    _check_fields(config)
    ranks, alphas = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")
    for name, rank in [("r", config.get("r")), *[("rank_pattern", v) for v in ranks.values()]]:
        if type(rank) is not int or not 1 <= rank <= rank_max:
            problem = f"{name} is {rank!r:.40}, ranks from 1 to {rank_max} are served"
            fix = f"train it with a rank among them, or raise {RANK} of a pool of its base"
            raise _refused(problem, fix)
    for alpha in (config.get("lora_alpha"), *alphas.values()):
        if not _is_scale(alpha):
            most = f"{_ALPHA_MAX:.0e}"
            problem = f"lora_alpha is {alpha!r:.40}, a number from -{most} to {most} is needed"
            raise _refused(problem, "save the adapter anew")
    targets = _names(config, "target_modules")
    if not targets:
        raise _refused("target_modules is missing or empty", "name the modules it changes")
    return AdapterConfig(
        rank=cast("int", config["r"]),
        alpha=float(config["lora_alpha"]),
        rank_pattern=ranks,
        targets=targets,
        excluded=_names(config, "exclude_modules"),
        layers=_layers(config),
    )


def largest_rank(config: Mapping[str, Any]) -> int:
    """Return the largest rank in the configuration of an accepted adapter."""
    return max(config["r"], *_pattern(config, "rank_pattern").values(), 1)


def is_name_of(target: str, module: Module) -> bool:
    """Return whether a name from a config matches the module's path or the end of that path."""
    path = f"model.layers.{module[0]}.{module[1]}"
    return path == target or path.endswith(f".{target}")


def _check_fields(config: Mapping[str, Any]) -> None:
    problems = [
        f"{name} {config.get(name)!r:.80} (served: {', '.join(map(repr, values))})"
        for name, values in _ONLY.items()
        if not any(config.get(name) == v and type(config.get(name)) is type(v) for v in values)
    ]
    problems += [
        f"{name:.80} {value!r:.80}"
        for name, value in config.items()
        if name not in _USED | _HARMLESS | _ONLY.keys() and value not in (None, False, {}, [])
    ]
    if problems:
        raise _refused(f"no engine serves {', '.join(problems[:8])}", "train it without")


def _is_scale(value: object) -> bool:
    """Return whether a value can scale weights in 32 bits. NaN cannot."""
    return type(value) in (int, float) and abs(cast("float", value)) <= _ALPHA_MAX


def _pattern(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise _refused(f"{name} is {given!r:.80}, an object is needed", "save the adapter anew")
    pattern = cast("dict[str, Any]", given)
    for key in pattern:
        if not _LITERAL.fullmatch(key):
            problem = f"{name} has the expression {key!r:.80}, engines take plain names"
            raise _refused(problem, "write the names of the modules")
    return pattern


def _names(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    given = config.get(field)
    if given == "all-linear":
        return tuple(_SHORT)
    names = cast("list[Any]", given or [])
    if not isinstance(given or [], list) or not all(isinstance(name, str) for name in names):
        problem = f"{field} is {given!r:.80}, a list of names is needed"
        raise _refused(problem, "write the names of the modules")
    return tuple(names)


def _layers(config: Mapping[str, Any]) -> frozenset[int] | None:
    given = config.get("layers_to_transform")
    if given is None:
        return None
    layers = cast("list[Any]", given if isinstance(given, list) else [given])
    if not all(type(layer) is int for layer in layers):
        problem = f"layers_to_transform is {given!r:.80}, numbers of layers are needed"
        raise _refused(problem, "save the adapter anew")
    return frozenset(layers)


def _refused(problem: str, fix: str) -> CheckError:
    return CheckError(f"{CONFIG_FILE}: {problem}: {fix}")
