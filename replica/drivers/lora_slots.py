"""Copies the adapters of a batch into slots, which are parts of the LoRA graph's input tables."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from replica.engine.architectures import PROJECTIONS, ModelConfig
from replica.engine.graph import LORA_DOWN, LORA_MASK, LORA_UP
from replica.engine.lora import LoraAdapter
from replica.engine.plan import NO_SLOT

_Floats = npt.NDArray[np.float32]


class LoraSlots:
    """Tables with `rank` rows per slot. An adapter of lower rank leaves its last rows at 0.

    The cost of a step grows with the rows that it reads. A step uses slots from 0 on, and reads
    only the slots up to the highest one in use. The number of slots read is rounded up to a power
    of two, because the plugin compiles a kernel per shape.
    """

    def __init__(self, config: ModelConfig, slots: int, rank: int) -> None:
        """Allocate slots without adapters."""
        self._rank = rank
        self._tables: dict[str, _Floats] = {}
        for name, (outputs, inputs) in config.projection_shapes().items():
            for layer in range(config.layers):
                down, up = f"{LORA_DOWN}{layer}.{name}", f"{LORA_UP}{layer}.{name}"
                self._tables[down] = np.zeros((slots * rank, inputs), np.float32)
                self._tables[up] = np.zeros((slots * rank, outputs), np.float32)
        self._layers = config.layers
        counts = {min(1 << power, slots) for power in range(slots.bit_length() + 1)}
        self._views: dict[int, Mapping[str, ov.Tensor]] = {
            count: {
                name: ov.Tensor(table[: count * rank], shared_memory=True)
                for name, table in self._tables.items()
            }
            for count in sorted(counts)
        }
        self._attached = 0

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Copy an adapter into a slot, whose previous adapter is overwritten."""
        begin, end = slot * self._rank, (slot + 1) * self._rank
        for layer in range(self._layers):
            for name in PROJECTIONS:
                delta = adapter.deltas.get((layer, name))
                for prefix, rows in (
                    (LORA_DOWN, delta and delta.down),
                    (LORA_UP, delta and delta.up),
                ):
                    table = self._tables[f"{prefix}{layer}.{name}"]
                    used = begin + (0 if rows is None else len(rows))
                    if rows is not None:
                        table[begin:used] = rows
                    table[used:end] = 0.0

    def attach(self, request: Any, tokens: int, users: Iterable[tuple[int, int, int]]) -> None:
        """Set the LoRA inputs of a request for one step.

        Args:
            request: Inference request of the LoRA graph, the same object in every call.
            tokens: Number of tokens in the step.
            users: (slot, first token, end) of each run of tokens. NO_SLOT means the base without an
                adapter.
        """
        runs = [run for run in users if run[0] != NO_SLOT]
        highest = max((slot for slot, _, _ in runs), default=0)
        count = next(count for count in self._views if count > highest)
        if count != self._attached:
            for name, tensor in self._views[count].items():
                request.set_tensor(name, tensor)
            self._attached = count
        mask = np.zeros((tokens, 1, count * self._rank), np.float32)
        for slot, begin, end in runs:
            mask[begin:end, 0, slot * self._rank : (slot + 1) * self._rank] = 1.0
        request.set_tensor(LORA_MASK, ov.Tensor(mask))
