"""Allocates the OpenVINO engine's KV pool in host memory, with keys and values per layer."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from replica.engine.types import RefusedError
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS

_PREFIXES = ("key_cache.", "value_cache.")


class KvPool:
    """A pool of `blocks` blocks of 32 tokens, which all compiled graphs of a base share.

    Attributes:
        layout: Description of a block's bytes. A block contains the keys and then the values of
            each layer.
    """

    def __init__(self, ports: Iterable[Any], blocks: int) -> None:
        """Allocate the pool. The `ports` are a graph's inputs, equal for all graphs of a base."""
        inputs = {port.any_name: port for port in ports if port.any_name.startswith(_PREFIXES)}
        self._tensors: dict[str, ov.Tensor] = {}
        # per tensor, an array [blocks, bytes of a block]
        self._bytes: list[npt.NDArray[np.uint8]] = []
        parts: list[str] = []
        for layer in range(len(inputs) // 2):
            for name in (f"{prefix}{layer}" for prefix in _PREFIXES):
                shape = [d.get_length() for d in list(inputs[name].partial_shape)[1:]]
                element = inputs[name].element_type
                tensor = ov.Tensor(element, ov.Shape([blocks, *shape]))
                # This write allocates the memory now instead of during the first requests.
                tensor.data[...] = 0
                self._tensors[name] = tensor
                self._bytes.append(tensor.data.reshape(blocks, -1).view(np.uint8))
                parts.append(f"{element.get_type_name()}{shape}")
        kinds = f"keys {parts[0]} values {parts[1]}"
        assert set(parts) == {parts[0], parts[1]}, parts
        self.block_bytes = sum(array.shape[1] for array in self._bytes)
        # The bytes of a u8 block are defined by the plugin, and may change with its version.
        version = ".".join(ov.__version__.split("-")[0].split(".")[:2])
        self.layout = (
            f"openvino {version}: {BLOCK_TOKENS} tokens, {len(inputs) // 2} layers of {kinds}"
        )

    def attach(self, request: Any) -> None:
        """Connect a request of a compiled graph to this pool."""
        for name, tensor in self._tensors.items():
            request.set_tensor(name, tensor)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks by pairs (source, target). No block may be both a source and a target."""
        if pairs:
            sources, targets = (list(blocks) for blocks in zip(*pairs, strict=True))
            for array in self._bytes:
                array[targets] = array[sources]

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of blocks, each of `block_bytes` bytes."""
        joined = np.concatenate([array[list(blocks)] for array in self._bytes], axis=1)
        return [row.tobytes() for row in joined]

    def write(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Replace the contents of blocks.

        Raises:
            RefusedError: A block's content has the wrong length. In this case no block is changed.
        """
        for content in data:
            if len(content) != self.block_bytes:
                raise RefusedError(
                    ErrorCode.INVALID_REQUEST,
                    f"a KV block of {len(content)} bytes; this engine's have {self.block_bytes}",
                )
        if not blocks:
            return
        joined = np.frombuffer(b"".join(data), np.uint8).reshape(len(blocks), self.block_bytes)
        begin = 0
        for array in self._bytes:
            array[list(blocks)] = joined[:, begin : begin + array.shape[1]]
            begin += array.shape[1]
