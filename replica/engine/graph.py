"""Builds the OpenVINO graph of a dense Llama from its checkpoint, with numpy and openvino alone.

The graph is the stateful form (KV cache as variables, scaled dot product attention). A plain
request runs it as it is, which the tests use as reference; `paged` turns it into the form that the
engine runs, where the KV cache is a pool of blocks that we own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import PartialShape, Type
from openvino import opset15 as op
from openvino.op.util import Variable, VariableInfo

from replica.engine.artifact import read_json
from replica.engine.llama import LlamaConfig, check_tensors
from replica.engine.safetensors import Array, read_safetensors

Node = Any  # openvino's nodes have no usable types
SAMPLED_ROWS = "sampled_tokens_indices"


def build_graph(directory: Path, *, has_sampled_rows: bool) -> ov.Model:
    """Return the stateful graph of the base in `directory`.

    Inputs: input_ids [batch, new], attention_mask [batch, all], position_ids [batch, new],
    beam_idx [batch]; with `has_sampled_rows` also sampled_tokens_indices [rows]: only these go
    through the output projection, which is the largest matrix of a small model. Output: logits.

    Raises:
        ArtifactError: Not a checkpoint that this graph computes rightly.
    """
    config = LlamaConfig.of(read_json(directory / "config.json"))
    weights = read_safetensors(directory / "model.safetensors")
    check_tensors(config, {name: tuple(array.shape) for name, array in weights.items()})
    return _LlamaGraph(config, weights).build(has_sampled_rows=has_sampled_rows)


def paged(model: ov.Model) -> ov.Model:
    """Replace the KV variables by block tables, in place, and return the graph.

    Inputs then: input_ids [tokens], position_ids [tokens], past_lens [rows],
    subsequence_begins [rows + 1], block_indices, block_indices_begins [rows + 1], max_context_len,
    key_cache.<layer>, value_cache.<layer>, and the sampled rows.
    """
    from openvino._offline_transformations import paged_attention_transformation

    paged_attention_transformation(model)
    return model


def _f32(value: Any) -> Node:
    return op.constant(np.asarray(value, np.float32))


def _i64(value: Any) -> Node:
    return op.constant(np.asarray(value, np.int64))


class _LlamaGraph:
    """State of one build: shared nodes, parameters and cache writes."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Array]) -> None:
        self._config = config
        self._weights = weights
        self._parameters: list[Node] = []
        self._cache_writes: list[Node] = []
        self._to_heads = op.constant(np.array([0, 2, 1, 3], np.int32))

    def build(self, *, has_sampled_rows: bool) -> ov.Model:
        config = self._config
        ids = self._parameter("input_ids", [-1, -1], Type.i64)
        attention = self._parameter("attention_mask", [-1, -1], Type.i64)
        positions = self._parameter("position_ids", [-1, -1], Type.i64)
        self._beam = self._parameter("beam_idx", [-1], Type.i32)
        self._batch = op.gather(op.shape_of(ids), _i64([0]), _i64(0))
        self._all_tokens = op.gather(op.shape_of(attention), _i64(1), _i64(0))
        self._mask = self._attention_mask(ids, attention)
        self._rotation = self._rope_tables(positions)
        embeddings = self._weight("model.embed_tokens.weight")
        hidden = op.gather(embeddings, ids, _i64(0))
        for layer in range(config.layers):
            hidden = self._layer(hidden, layer)
        hidden = self._norm(hidden, "model.norm.weight")
        if has_sampled_rows:
            rows = self._parameter(SAMPLED_ROWS, [-1], Type.i64)
            hidden = op.gather(hidden, rows, _i64(0))
        head = embeddings if config.has_tied_embeddings else self._weight("lm_head.weight")
        logits = op.matmul(hidden, head, transpose_a=False, transpose_b=True)
        logits.output(0).get_tensor().set_names({"logits"})
        results = [op.result(logits, name="logits")]
        return ov.Model(  # pyright: ignore[reportGeneralTypeIssues] - its stub is of a base class
            results, self._cache_writes, self._parameters, "llama"
        )

    def _parameter(self, name: str, shape: list[int], dtype: Type) -> Node:
        node = op.parameter(PartialShape(shape), dtype, name=name)
        node.output(0).get_tensor().set_names({name})
        self._parameters.append(node)
        return node

    def _weight(self, name: str, shape: tuple[int, ...] | None = None) -> Node:
        """Return a weight as float32; half precision stays so in memory."""
        array = self._weights[name]
        if array.dtype != np.float16:
            array = array.astype(np.float32)
        node = op.constant(np.ascontiguousarray(array.reshape(shape or array.shape)), name=name)
        node.set_friendly_name(name)
        return node if array.dtype == np.float32 else op.convert(node, Type.f32)

    def _attention_mask(self, ids: Node, attention: Node) -> Node:
        """Return causal and padding mask; the paged form drops it."""
        new = op.gather(op.shape_of(ids), _i64(1), _i64(0))
        first = op.subtract(self._all_tokens, new)
        rows = op.unsqueeze(op.range(first, self._all_tokens, _i64(1), Type.i64), _i64(1))
        columns = op.unsqueeze(op.range(_i64(0), self._all_tokens, _i64(1), Type.i64), _i64(0))
        causal = op.unsqueeze(op.less_equal(columns, rows), _i64([0, 1]))
        present = op.unsqueeze(op.greater(attention, _i64(0)), _i64([1, 2]))
        return op.select(op.logical_and(causal, present), _f32(0.0), _f32(-65504.0))

    def _rope_tables(self, positions: Node) -> tuple[Node, Node]:
        """Return (cos, sin), each [batch, 1, new, head_dim]."""
        config = self._config
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        frequencies = _f32((1.0 / config.rope_theta**exponents)[None, None, :])
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
        variance = op.reduce_mean(op.power(x, _f32(2.0)), _i64([-1]), keep_dims=True)
        root = op.sqrt(op.add(variance, _f32(self._config.norm_epsilon)))
        scaled = op.multiply(x, op.divide(_f32(1.0), root))
        return op.multiply(scaled, self._weight(name, (1, 1, self._config.hidden)))

    def _linear(self, x: Node, name: str) -> Node:
        return op.matmul(x, self._weight(f"{name}.weight"), transpose_a=False, transpose_b=True)

    def _layer(self, hidden: Node, layer: int) -> Node:
        prefix = f"model.layers.{layer}."
        x = self._norm(hidden, prefix + "input_layernorm.weight")
        hidden = op.add(hidden, self._attend(x, layer))
        x = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = op.swish(self._linear(x, prefix + "mlp.gate_proj"))
        gated = op.multiply(gate, self._linear(x, prefix + "mlp.up_proj"))
        return op.add(hidden, self._linear(gated, prefix + "mlp.down_proj"))

    def _attend(self, x: Node, layer: int) -> Node:
        config = self._config
        prefix = f"model.layers.{layer}.self_attn."
        query = self._rotate(self._heads(x, prefix + "q_proj", config.heads))
        key = self._rotate(self._heads(x, prefix + "k_proj", config.kv_heads))
        value = self._heads(x, prefix + "v_proj", config.kv_heads)
        # The transformation to the paged form finds key and value by these names.
        key = self._cached(f"past_key_values.{layer}.keypresent.{layer}.key", key)
        value = self._cached(f"past_key_values.{layer}.valuepresent.{layer}.value", value)
        mixed = op.scaled_dot_product_attention(
            query, self._repeated(key), self._repeated(value), self._mask
        )
        width = config.heads * config.head_dim
        mixed = op.reshape(
            op.transpose(mixed, self._to_heads), _i64([0, 0, width]), special_zero=True
        )
        return self._linear(mixed, prefix + "o_proj")

    def _heads(self, x: Node, name: str, count: int) -> Node:
        """Return [batch, heads, new, head_dim]."""
        shape = _i64([0, 0, count, self._config.head_dim])
        return op.transpose(
            op.reshape(self._linear(x, name), shape, special_zero=True), self._to_heads
        )

    def _cached(self, name: str, current: Node) -> Node:
        """Append to the KV cache; return all of it."""
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
        """Repeat each KV head for the query heads that share it."""
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
