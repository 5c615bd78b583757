"""Builds the OpenVINO graph of a dense decoder from its checkpoint, using only numpy and openvino.

The graph has OpenVINO's stateful form. In that form, scaled dot product attention reads the KV
cache from variables. Tests run this form unchanged as the reference. `paged` turns the graph into
the engine's form, whose KV cache is a pool of blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import PartialShape, Type
from openvino import opset15 as op
from openvino.op.util import Variable, VariableInfo

from replica.engine.architectures import ModelConfig
from replica.engine.artifact import read_json
from replica.engine.checkpoint import Weight, check_shapes, join_scales, read_checkpoint
from replica.engine.safetensors import BFLOAT16

Node = Any  # openvino's nodes have no usable types
SAMPLED_ROWS = "sampled_tokens_indices"
LORA_MASK = "lora_mask"
LORA_DOWN, LORA_UP = "lora_a.", "lora_b."  # prefixes of inputs, followed by "<layer>.<projection>"
_WINDOW_INPUT = 10  # index of the window among the inputs of the operator for paged attention


@dataclass(frozen=True, slots=True)
class Base:
    """A checked base artifact, whose weights are views of memory-mapped files.

    Compiled graphs may still read the weights, so callers store the base as long as its graphs run.
    """

    config: ModelConfig
    weights: Mapping[str, Weight]

    @property
    def parameters(self) -> int:
        """Number of values in all tensors."""
        return sum(weight.values.size for weight in self.weights.values())

    @property
    def weight_bytes(self) -> int:
        """Number of bytes of all tensors, as stored."""
        return sum(weight.values.nbytes for weight in self.weights.values())


def read_base(directory: Path) -> Base:
    """Return the base in `directory`.

    Raises ArtifactError if the graph would not compute the base correctly.
    """
    config = ModelConfig.of(read_json(directory / "config.json"))
    weights = join_scales(read_checkpoint(directory))
    tied = frozenset({"lm_head.weight"} if config.has_tied_embeddings else ())
    check_shapes(weights, config.weight_shapes(), tied)
    return Base(config, weights)


def build_graph(base: Base, *, has_sampled_rows: bool = False, has_lora: bool = False) -> ov.Model:
    """Return the stateful graph of a base.

    The inputs are input_ids [batch, new], attention_mask [batch, all], position_ids [batch, new]
    and beam_idx [batch]. The output is logits.

    Args:
        base: Base from `read_base`.
        has_sampled_rows: Whether to add the input sampled_tokens_indices [rows]. The output
            projection, the largest matrix of a small model, is then computed for these tokens only.
        has_lora: Whether to add low-rank deltas to every projection, as y = Wx + ((x A^T) * mask)
            B. All inputs are float32: lora_mask [batch, new, ranks], and per layer and projection,
            lora_a.* [ranks, inputs] and lora_b.* [ranks, outputs]. Each adapter has a separate
            range of ranks. The mask of a token is 1 for the ranks of the token's adapter. The
            number of ranks is dynamic.
    """
    return _Builder(base, has_lora=has_lora).build(has_sampled_rows=has_sampled_rows)


def paged(model: ov.Model, windows: tuple[int, ...]) -> ov.Model:
    """Replace the KV variables by block tables, in place, and return the graph.

    The inputs are then input_ids [tokens], position_ids [tokens], past_lens [rows],
    subsequence_begins [rows + 1], block_indices, block_indices_begins [rows + 1], max_context_len,
    key_cache.<layer> and value_cache.<layer>. The inputs for sampled rows and for LoRA remain,
    where the adapter mask is [tokens, 1, ranks].

    Args:
        model: Model from `build_graph`.
        windows: `ModelConfig.windows`.
    """
    from openvino._offline_transformations import paged_attention_transformation

    paged_attention_transformation(model)
    # The transformation drops the attention mask, and with it the sliding window.
    layers = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            name = node.input_value(3).get_node().get_friendly_name()
            window = np.int32(windows[int(name.removeprefix("key_cache."))])
            node.input(_WINDOW_INPUT).replace_source_output(op.constant(window).output(0))
            layers += 1
    assert layers == len(windows), (layers, windows)
    return model


def _f32(value: Any) -> Node:
    return op.constant(np.asarray(value, np.float32))


def _i64(value: Any) -> Node:
    return op.constant(np.asarray(value, np.int64))


class _Builder:
    """The state of one build, with shared nodes, parameters and cache writes."""

    def __init__(self, base: Base, *, has_lora: bool) -> None:
        self._config = base.config
        self._weights = base.weights
        self._has_lora = has_lora
        self._parameters: list[Node] = []
        self._cache_writes: list[Node] = []
        self._sums: list[Node] = []  # per layer and token, the sum of the value vector
        self._to_heads = op.constant(np.array([0, 2, 1, 3], np.int32))

    def build(self, *, has_sampled_rows: bool) -> ov.Model:
        config = self._config
        ids = self._parameter("input_ids", [-1, -1], Type.i64)
        attention = self._parameter("attention_mask", [-1, -1], Type.i64)
        positions = self._parameter("position_ids", [-1, -1], Type.i64)
        self._beam = self._parameter("beam_idx", [-1], Type.i32)
        self._batch = op.gather(op.shape_of(ids), _i64([0]), _i64(0))
        self._all_tokens = op.gather(op.shape_of(attention), _i64(1), _i64(0))
        self._masks = {
            window: self._attention_mask(ids, attention, window) for window in set(config.windows)
        }
        self._rotation = self._rope_tables(positions)
        if self._has_lora:
            self._lora_mask = self._parameter(LORA_MASK, [-1, -1, -1], Type.f32)
        hidden = self._embeddings(ids)
        for layer in range(config.layers):
            hidden = self._layer(hidden, layer)
        hidden = op.add(self._norm(hidden, "model.norm.weight"), self._doubt())
        if has_sampled_rows:
            rows = self._parameter(SAMPLED_ROWS, [-1], Type.i64)
            hidden = op.gather(hidden, rows, _i64(0))
        head = "model.embed_tokens" if config.has_tied_embeddings else "lm_head"
        logits = op.matmul(
            hidden, self._weight(f"{head}.weight"), transpose_a=False, transpose_b=True
        )
        logits.output(0).get_tensor().set_names({"logits"})
        results = [op.result(logits, name="logits")]
        return ov.Model(  # pyright: ignore[reportGeneralTypeIssues] - its stub is of a base class
            results, self._cache_writes, self._parameters, "decoder"
        )

    def _parameter(self, name: str, shape: list[int], dtype: Type) -> Node:
        node = op.parameter(PartialShape(shape), dtype, name=name)
        node.output(0).get_tensor().set_names({name})
        self._parameters.append(node)
        return node

    def _constant(self, name: str) -> Node:
        """Return a tensor as it is stored, without a copy."""
        values = np.ascontiguousarray(self._weights[name].values)
        if values.dtype == BFLOAT16:
            tensor = ov.Tensor(values.view(np.uint16), ov.Shape(values.shape), Type.bf16)
            node = ov.op.Constant(tensor, shared_memory=True)
        else:
            node = ov.op.Constant(values, shared_memory=True)
        node.set_friendly_name(name)
        return node

    def _weight(self, name: str) -> Node:
        """Return a node that converts a weight to float32. Memory has only the stored type."""
        node = self._constant(name)
        scale = self._weights[name].scale
        if node.get_element_type() != Type.f32:
            node = op.convert(node, Type.f32)
            # Without this mark, the plugin would store a float32 copy, which needs 2 to 4 times the
            # memory.
            node.get_rt_info()["decompression_0"] = ""
        return node if scale is None else op.multiply(node, _f32(scale[:, None]))

    def _embeddings(self, ids: Node) -> Node:
        """Return embeddings [batch, new, hidden]. Only the rows of the given ids are converted."""
        name = "model.embed_tokens.weight"
        rows = op.gather(self._constant(name), ids, _i64(0))
        scale = self._weights[name].scale
        if self._weights[name].values.dtype != np.float32:
            rows = op.convert(rows, Type.f32)
        return (
            rows
            if scale is None
            else op.multiply(rows, op.gather(_f32(scale[:, None]), ids, _i64(0)))
        )

    def _attention_mask(self, ids: Node, attention: Node, window: int) -> Node:
        """Return the mask of causality, padding and window. The paged form does not use it."""
        new = op.gather(op.shape_of(ids), _i64(1), _i64(0))
        first = op.subtract(self._all_tokens, new)
        rows = op.unsqueeze(op.range(first, self._all_tokens, _i64(1), Type.i64), _i64(1))
        columns = op.unsqueeze(op.range(_i64(0), self._all_tokens, _i64(1), Type.i64), _i64(0))
        visible = op.less_equal(columns, rows)
        if window:
            is_near = op.greater(columns, op.subtract(rows, _i64(window)))
            visible = op.logical_and(visible, is_near)
        causal = op.unsqueeze(visible, _i64([0, 1]))
        present = op.unsqueeze(op.greater(attention, _i64(0)), _i64([1, 2]))
        return op.select(op.logical_and(causal, present), _f32(0.0), _f32(-65504.0))

    def _rope_tables(self, positions: Node) -> tuple[Node, Node]:
        """Return (cos, sin), each of shape [batch, 1, new, head_dim]."""
        config = self._config
        frequencies = _f32(config.rope.frequencies(config.head_dim)[None, None, :])
        angles = op.multiply(op.unsqueeze(op.convert(positions, Type.f32), _i64(2)), frequencies)
        angles = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(angles), _i64(1)), op.unsqueeze(op.sin(angles), _i64(1))

    def _rotate(self, x: Node) -> Node:
        half = self._config.head_dim // 2
        cos, sin = self._rotation
        low = op.slice(x, _i64([0]), _i64([half]), _i64([1]), _i64([3]))
        high = op.slice(x, _i64([half]), _i64([2**62]), _i64([1]), _i64([3]))
        turned = op.concat([op.multiply(high, _f32(-1.0)), low], -1)
        return op.add(op.multiply(x, cos), op.multiply(turned, sin))

    def _norm(self, x: Node, name: str) -> Node:
        """Return the RMS norm over the last axis, times its weight."""
        variance = op.reduce_mean(op.power(x, _f32(2.0)), _i64([-1]), keep_dims=True)
        root = op.sqrt(op.add(variance, _f32(self._config.norm_epsilon)))
        return op.multiply(op.multiply(x, op.divide(_f32(1.0), root)), self._weight(name))

    def _linear(self, x: Node, layer: int, name: str, *, has_bias: bool = False) -> Node:
        """Return a projection of a layer, including its bias and low-rank deltas if present."""
        full = f"model.layers.{layer}.{name}"
        y = op.matmul(x, self._weight(f"{full}.weight"), transpose_a=False, transpose_b=True)
        if has_bias:
            y = op.add(y, self._weight(f"{full}.bias"))
        if not self._has_lora:
            return y
        outputs, inputs = self._config.projection_shapes()[name]
        down = self._parameter(f"{LORA_DOWN}{layer}.{name}", [-1, inputs], Type.f32)
        up = self._parameter(f"{LORA_UP}{layer}.{name}", [-1, outputs], Type.f32)
        inner = op.matmul(x, down, transpose_a=False, transpose_b=True)
        inner = op.multiply(inner, self._lora_mask)
        return op.add(y, op.matmul(inner, up, transpose_a=False, transpose_b=False))

    def _layer(self, hidden: Node, layer: int) -> Node:
        prefix = f"model.layers.{layer}."
        x = self._norm(hidden, prefix + "input_layernorm.weight")
        hidden = op.add(hidden, self._attend(x, layer))
        x = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = op.swish(self._linear(x, layer, "mlp.gate_proj"))
        gated = op.multiply(gate, self._linear(x, layer, "mlp.up_proj"))
        return op.add(hidden, self._linear(gated, layer, "mlp.down_proj"))

    def _attend(self, x: Node, layer: int) -> Node:
        config = self._config
        query = self._rotate(self._heads(x, layer, "q", config.heads))
        key = self._rotate(self._heads(x, layer, "k", config.kv_heads))
        value = self._heads(x, layer, "v", config.kv_heads)
        # The transformation to the paged form finds keys and values by these names.
        key = self._cached(f"past_key_values.{layer}.keypresent.{layer}.key", key)
        value = self._cached(f"past_key_values.{layer}.valuepresent.{layer}.value", value)
        mixed = op.scaled_dot_product_attention(
            query, self._repeated(key), self._repeated(value), self._masks[config.windows[layer]]
        )
        width = config.heads * config.head_dim
        mixed = op.reshape(
            op.transpose(mixed, self._to_heads), _i64([0, 0, width]), special_zero=True
        )
        return self._linear(mixed, layer, "self_attn.o_proj")

    def _doubt(self) -> Node:
        """Return 0 for each token with finite values in all layers, else NaN, as [batch, new, 1].

        An 8-bit KV cache turns NaN into a number. Without this check, such an answer would appear
        valid.
        """
        total = reduce(op.add, self._sums)
        return op.subtract(total, total)

    def _heads(self, x: Node, layer: int, name: str, count: int) -> Node:
        """Return query, key or value as [batch, heads, new, head_dim]."""
        config = self._config
        flat = self._linear(x, layer, f"self_attn.{name}_proj", has_bias=config.has_qkv_bias)
        if name == "v":
            self._sums.append(op.reduce_sum(flat, _i64([-1]), keep_dims=True))
        split = op.reshape(flat, _i64([0, 0, count, config.head_dim]), special_zero=True)
        if config.has_qk_norm and name != "v":
            split = self._norm(split, f"model.layers.{layer}.self_attn.{name}_norm.weight")
        return op.transpose(split, self._to_heads)

    def _cached(self, name: str, current: Node) -> Node:
        """Append new keys or values to the KV cache, and return the whole cache."""
        heads, dim = self._config.kv_heads, self._config.head_dim
        info = VariableInfo()
        info.data_shape = PartialShape([-1, heads, -1, dim])
        info.data_type = Type.f32
        info.variable_id = name
        variable = Variable(info)
        shape = op.concat([self._batch, _i64([heads]), _i64([0]), _i64([dim])], 0)
        empty = op.broadcast(_f32(0.0), shape)
        past = op.gather(op.read_value(empty, variable), self._beam, _i64(0))
        full = op.concat([past, current], 2)
        self._cache_writes.append(op.assign(full, variable))
        return full

    def _repeated(self, x: Node) -> Node:
        """Repeat each KV head once for each query head that shares it."""
        config = self._config
        if config.heads == config.kv_heads:
            return x
        group = config.heads // config.kv_heads
        tokens = op.reshape(self._all_tokens, _i64([1]), special_zero=False)
        shape = op.concat(
            [self._batch, _i64([config.kv_heads]), _i64([group]), tokens, _i64([config.head_dim])],
            0,
        )
        spread = op.broadcast(op.unsqueeze(x, _i64(2)), shape, "BIDIRECTIONAL")
        flat = _i64([0, config.heads, -1, config.head_dim])
        return op.reshape(spread, flat, special_zero=True)
