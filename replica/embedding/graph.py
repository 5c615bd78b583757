"""Builds the OpenVINO graph of a sentence-embedding BERT from its checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import PartialShape, Type
from openvino import opset15 as op

from replica.embedding.bert import UNUSED_WEIGHTS, BertConfig
from replica.engine.checkpoint import Weight, check_shapes, join_scales, read_checkpoint

Node = Any  # openvino's nodes have no usable types
_HIDDEN_BY_MASK = -65504.0  # exp() of it is exactly 0, so padding changes nothing


def build_graph(directory: Path, config: BertConfig) -> ov.Model:
    """Return the graph of the base in `directory`.

    Inputs: input_ids and attention_mask, both int64 [rows, tokens]; the mask is 1 where there is a
    token and 0 where there is padding. Output: embeddings, float32 [rows, hidden]; means over the
    tokens, scaled to length 1.

    Raises:
        ArtifactError: The checkpoint cannot be read, or does not fit to the config.
    """
    tensors = read_checkpoint(directory)
    tensors.pop("embeddings.position_ids", None)  # just 0, 1, 2, ...
    weights = join_scales(tensors)
    check_shapes(weights, config.weight_shapes(), UNUSED_WEIGHTS)
    return _BertGraph(config, weights).build()


def _i64(value: Any) -> Node:
    return op.constant(np.asarray(value, np.int64))


def _f32(value: Any) -> Node:
    return op.constant(np.asarray(value, np.float32))


class _BertGraph:
    """State of one build."""

    def __init__(self, config: BertConfig, weights: Mapping[str, Weight]) -> None:
        self._config = config
        self._weights = weights
        self._swap = _i64([0, 2, 1, 3])  # [rows, tokens, heads, dim] <-> [rows, heads, tokens, dim]

    def build(self) -> ov.Model:
        ids = op.parameter(PartialShape([-1, -1]), Type.i64, name="input_ids")
        attention = op.parameter(PartialShape([-1, -1]), Type.i64, name="attention_mask")
        for node, name in ((ids, "input_ids"), (attention, "attention_mask")):
            node.output(0).get_tensor().set_names({name})
        present = op.unsqueeze(op.greater(attention, _i64(0)), _i64([1, 2]))
        self._mask = op.select(present, _f32(0.0), _f32(_HIDDEN_BY_MASK))
        x = self._embedded(ids)
        for layer in range(self._config.layers):
            x = self._layer(x, f"encoder.layer.{layer}.")
        embeddings = op.normalize_l2(_mean(x, attention), _i64([1]), 1e-12, "max")
        embeddings.output(0).get_tensor().set_names({"embeddings"})
        return ov.Model(  # pyright: ignore[reportGeneralTypeIssues] - its stub is of a base class
            [op.result(embeddings, name="embeddings")], [ids, attention], "bert"
        )

    def _weight(self, name: str) -> Node:
        """Return a weight as float32; half precision stays so in memory."""
        weight = self._weights[name]
        if weight.values.dtype == np.float16:
            return op.convert(op.constant(weight.values), Type.f32)
        return op.constant(weight.as_float32())

    def _embedded(self, ids: Node) -> Node:
        tokens = op.gather(op.shape_of(ids), _i64(1), _i64(0))
        positions = op.range(_i64(0), tokens, _i64(1), Type.i64)
        words = op.gather(self._weight("embeddings.word_embeddings.weight"), ids, _i64(0))
        places = self._weight("embeddings.position_embeddings.weight")
        # All tokens are of the first of two types: we embed texts, not pairs of them.
        kind = op.gather(self._weight("embeddings.token_type_embeddings.weight"), _i64(0), _i64(0))
        placed = op.add(op.gather(places, positions, _i64(0)), kind)
        return self._norm(op.add(words, placed), "embeddings.LayerNorm")

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


def _mean(x: Node, attention: Node) -> Node:
    """Return the mean over the tokens that are not padding."""
    weights = op.convert(op.unsqueeze(attention, _i64(2)), Type.f32)
    total = op.reduce_sum(op.multiply(x, weights), _i64([1]))
    return op.divide(total, op.reduce_sum(weights, _i64([1])))
