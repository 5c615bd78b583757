"""Reads the configuration of a BERT that embeds or classifies, and refuses unsupported fields.

A field that a graph builder ignores causes wrong vectors, not an error. So each field must be used,
have no effect, or have the only supported value. This applies to config.json and to the files in
which sentence-transformers describes the layers after the encoder. A base that classifies
(`BertForSequenceClassification`) has only config.json. As a cross-encoder, it reads one text or a
pair of texts, and returns one score per label.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replica.engine.artifact import ArtifactError, read_json
from sluice.base_labels import label_count

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "type_vocab_size",
    "vocab_size",
)
# Fields about training or the tokenizer, which do not affect the graph.
_HARMLESS = frozenset(
    {"_name_or_path", "architectures", "attention_probs_dropout_prob", "classifier_dropout"}
    | {"dtype", "gradient_checkpointing", "hidden_dropout_prob", "initializer_range"}
    | {"name_or_path", "pad_token_id", "torch_dtype", "transformers_version", "use_cache"}
)
_ONLY: dict[str, tuple[Any, ...]] = {
    # divides the computation into parts without a change of the result
    "chunk_size_feed_forward": (0,),
    "hidden_act": ("gelu",),
    "model_type": ("bert",),
    "position_embedding_type": ("absolute",),
}
# Fields that only the gateway uses: names of labels, and the function from scores to probabilities.
_OF_LABELS = frozenset(
    {"_num_labels", "id2label", "label2id", "num_labels", "problem_type", "sentence_transformers"}
)
# Weights of a head that BERT's training used, but embeddings do not.
_HEAD = ("pooler.dense.weight", "pooler.dense.bias")
_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING = "pooling_mode_mean_tokens"


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The sizes of the encoder, and of the classifier if there is one.

    Attributes:
        positions: Length of the table of positions, and thus of the longest possible text in
            tokens.
        tokens_max: Longest text for which the model was tuned, in tokens with special tokens.
        labels: Number of scores per text or pair of texts, or 0 if the base computes embeddings.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    positions: int
    token_types: int
    norm_epsilon: float
    tokens_max: int
    labels: int = 0

    @property
    def unused_weights(self) -> frozenset[str]:
        """The names of tensors that a checkpoint may contain although the graph ignores them."""
        return frozenset() if self.labels else frozenset(_HEAD)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that the graph reads."""
        hidden, intermediate = self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self.vocabulary, hidden),
            "embeddings.position_embeddings.weight": (self.positions, hidden),
            "embeddings.token_type_embeddings.weight": (self.token_types, hidden),
        }
        linears = {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (intermediate, hidden),
            "output.dense": (hidden, intermediate),
        }
        norms = ["embeddings.LayerNorm"]
        for layer in range(self.layers):
            prefix = f"encoder.layer.{layer}."
            norms += [prefix + "attention.output.LayerNorm", prefix + "output.LayerNorm"]
            for name, shape in linears.items():
                shapes[f"{prefix}{name}.weight"] = shape
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in norms:
            shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)
        if self.labels:
            shapes |= dict(zip(_HEAD, ((hidden, hidden), (hidden,)), strict=True))
            shapes |= {"classifier.weight": (self.labels, hidden)}
            shapes |= {"classifier.bias": (self.labels,)}
        return shapes


def read_bert_config(directory: Path) -> BertConfig:
    """Return the config of a base. If it embeds, sentence-transformers' files are also read.

    Raises:
        ArtifactError: A file is missing or broken, or needs a feature that this engine lacks.
    """
    config = read_json(directory / "config.json")
    labels = label_count(config)
    problems = _config_problems(config, _HARMLESS | _OF_LABELS if labels else _HARMLESS)
    longest: Any = config.get("max_position_embeddings")
    if not labels:
        sentence = read_json(directory / "sentence_bert_config.json")
        problems += _sentence_problems(sentence) + _module_problems(directory)
        longest = sentence.get("max_seq_length")
    if problems:
        raise ArtifactError(
            f"{directory}: this engine cannot serve {', '.join(problems)}; use another base"
        )
    return BertConfig(
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        positions=int(config["max_position_embeddings"]),
        token_types=int(config["type_vocab_size"]),
        norm_epsilon=float(config["layer_norm_eps"]),
        tokens_max=min(int(longest), int(config["max_position_embeddings"])),
        labels=labels,
    )


def _config_problems(config: Mapping[str, Any], harmless: frozenset[str]) -> list[str]:
    problems = [f"a config without {name}" for name in _REQUIRED if config.get(name) is None]
    for name, value in {"model_type": None, "hidden_act": None, **config}.items():
        if name in _ONLY:
            # A missing field means absolute positions. The type of the model must be present.
            is_absent = value is None and name not in ("model_type", "hidden_act")
            if not is_absent and value not in _ONLY[name]:
                problems.append(f"{name} {value!r}")
        elif name not in _REQUIRED and name not in harmless and value not in (None, False):
            problems.append(f"{name} {value!r}")
    if not problems and config["hidden_size"] % config["num_attention_heads"]:
        problems.append(
            f"hidden_size {config['hidden_size']} with num_attention_heads"
            f" {config['num_attention_heads']}"
        )
    return problems


def _sentence_problems(sentence: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    if not isinstance(sentence.get("max_seq_length"), int):
        problems.append("sentence_bert_config.json without max_seq_length")
    for name, value in sentence.items():  # all other fields, for example do_lower_case, must be off
        if name != "max_seq_length" and value not in (None, False):
            problems.append(f"{name} {value!r} in sentence_bert_config.json")
    return problems


def _module_problems(directory: Path) -> list[str]:
    """Return the layers after the encoder that are neither the mean of tokens nor the scaling."""
    path = directory / "modules.json"
    try:
        modules = json.loads(path.read_bytes())
        kinds = tuple(str(module["type"]).rpartition(".")[2] for module in modules)
        folders = [str(module["path"]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} does not list modules ({error!r}); import it anew") from None
    if kinds != _MODULES:
        return [f"modules {', '.join(kinds)} in modules.json (known are {', '.join(_MODULES)})"]
    name = f"{folders[1]}/config.json"
    pooling = read_json(directory / name)
    asked = {name for name, value in pooling.items() if name.startswith("pooling_mode") and value}
    return [] if asked == {_POOLING} else [f"{', '.join(sorted(asked)) or 'no pooling'} in {name}"]
