"""Builds the OpenVINO graph that embeds or classifies texts, from a BERT base's checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import PartialShape, Type
from openvino import opset15 as op

from replica.embedding.bert import BertConfig
from replica.engine.checkpoint import Weight, check_shapes, join_scales, read_checkpoint

Node = Any  # openvino's nodes have no usable types
_HEADED = "bert."  # prefix of the encoder's tensors in a base that classifies
_HIDDEN_BY_MASK = -65504.0  # added to the scores of padding, whose exp() is then exactly 0


def build_graph(directory: Path, config: BertConfig) -> ov.Model:
    """Return the graph of the base in `directory`.

    The inputs are input_ids and attention_mask, both int64 [rows, tokens]. The mask is 1 for tokens
    and 0 for padding. The output is float32. If the base embeds, the output is [rows, hidden],
    where each row is the mean over the tokens, scaled to length 1. If the base classifies, the
    output is [rows, labels], scores without bounds. Its graph has a third input, token_type_ids,
    int64 [rows, tokens], which is 1 for the second text of a pair.

    Raises:
        ArtifactError: The checkpoint cannot be read, or does not match the config.
    """
    tensors = read_checkpoint(directory)
    if config.labels:
        tensors = {name.removeprefix(_HEADED): values for name, values in tensors.items()}
    # the numbers 0, 1, 2, ..., which the graph builder knows
    tensors.pop("embeddings.position_ids", None)
    weights = join_scales(tensors)
    check_shapes(weights, config.weight_shapes(), config.unused_weights)
    return _BertGraph(config, weights).build()


def _i64(value: Any) -> Node:
    return op.constant(np.asarray(value, np.int64))


def _f32(value: Any) -> Node:
    return op.constant(np.asarray(value, np.float32))


class _BertGraph:
    """The state of one build: config, weights and shared nodes."""

    def __init__(self, config: BertConfig, weights: Mapping[str, Weight]) -> None:
        self._config = config
        self._weights = weights
        self._swap = _i64([0, 2, 1, 3])  # [rows, tokens, heads, dim] <-> [rows, heads, tokens, dim]

    def build(self) -> ov.Model:
        ids, attention = _input("input_ids"), _input("attention_mask")
        kinds = [_input("token_type_ids")] if self._config.labels else []
        present = op.unsqueeze(op.greater(attention, _i64(0)), _i64([1, 2]))
        self._mask = op.select(present, _f32(0.0), _f32(_HIDDEN_BY_MASK))
        # A base that embeds reads single texts, so all tokens have the first type.
        x = self._embedded(ids, kinds[0] if kinds else _i64(0))
        for layer in range(self._config.layers):
            x = self._layer(x, f"encoder.layer.{layer}.")
        if kinds:
            vectors = self._scores(x)
        else:
            vectors = op.normalize_l2(_mean(x, attention), _i64([1]), 1e-12, "max")
        vectors.output(0).get_tensor().set_names({"vectors"})
        return ov.Model(  # pyright: ignore[reportGeneralTypeIssues] - its stub is of a base class
            [op.result(vectors, name="vectors")], [ids, attention, *kinds], "bert"
        )

    def _weight(self, name: str) -> Node:
        """Return a weight as float32. A weight stored in half precision stays so in memory."""
        weight = self._weights[name]
        if weight.values.dtype == np.float16:
            return op.convert(op.constant(weight.values), Type.f32)
        return op.constant(weight.as_float32())

    def _embedded(self, ids: Node, kinds: Node) -> Node:
        tokens = op.gather(op.shape_of(ids), _i64(1), _i64(0))
        positions = op.range(_i64(0), tokens, _i64(1), Type.i64)
        words = op.gather(self._weight("embeddings.word_embeddings.weight"), ids, _i64(0))
        places = self._weight("embeddings.position_embeddings.weight")
        types = self._weight("embeddings.token_type_embeddings.weight")
        kind = op.gather(types, kinds, _i64(0))
        placed = op.add(op.gather(places, positions, _i64(0)), kind)
        return self._norm(op.add(words, placed), "embeddings.LayerNorm")

    def _scores(self, x: Node) -> Node:
        """Return the scores of the labels, computed from the first token's hidden state."""
        first = op.gather(x, _i64(0), _i64(1))
        return self._linear(op.tanh(self._linear(first, "pooler.dense")), "classifier")

    def _layer(self, x: Node, prefix: str) -> Node:
        y = self._linear(self._attend(x, prefix), prefix + "attention.output.dense")
        x = self._norm(op.add(x, y), prefix + "attention.output.LayerNorm")
        y = op.gelu(self._linear(x, prefix + "intermediate.dense"), "erf")
        y = self._linear(y, prefix + "output.dense")
        return self._norm(op.add(x, y), prefix + "output.LayerNorm")

    def _attend(self, x: Node, prefix: str) -> Node:
        config = self._config
        by_head = _i64([0, 0, config.heads, config.hidden // config.heads])

        def heads(name: str) -> Node:
            flat = self._linear(x, f"{prefix}attention.self.{name}")
            return op.transpose(op.reshape(flat, by_head, special_zero=True), self._swap)

        mixed = op.scaled_dot_product_attention(
            heads("query"), heads("key"), heads("value"), self._mask
        )
        width = _i64([0, 0, config.hidden])
        return op.reshape(op.transpose(mixed, self._swap), width, special_zero=True)

    def _linear(self, x: Node, name: str) -> Node:
        weight = self._weight(f"{name}.weight")
        product = op.matmul(x, weight, transpose_a=False, transpose_b=True)
        return op.add(product, self._weight(f"{name}.bias"))

    def _norm(self, x: Node, name: str) -> Node:
        epsilon = self._config.norm_epsilon
        even = op.mvn(x, _i64([-1]), normalize_variance=True, eps=epsilon, eps_mode="INSIDE_SQRT")
        scaled = op.multiply(even, self._weight(f"{name}.weight"))
        return op.add(scaled, self._weight(f"{name}.bias"))


def _input(name: str) -> Node:
    """Return an int64 input [rows, tokens]."""
    node = op.parameter(PartialShape([-1, -1]), Type.i64, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def _mean(x: Node, attention: Node) -> Node:
    """Return the mean over the tokens that are not padding."""
    weights = op.convert(op.unsqueeze(attention, _i64(2)), Type.f32)
    total = op.reduce_sum(op.multiply(x, weights), _i64([1]))
    return op.divide(total, op.reduce_sum(weights, _i64([1])))
