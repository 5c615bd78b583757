"""Defines the interface of all engines.

A driver owns a sequence from `add` until its `FinishedEvent`. One thread calls `step()`, and the
driver never calls its caller. `tests/contract/test_drivers.py` tests every driver's contract.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from replica.engine.types import (
    AdapterState,
    Capabilities,
    EngineLoad,
    KvBlocks,
    Limits,
    SequenceRequest,
    StepEvents,
)


class Driver(Protocol):
    """An engine, used by one thread at a time."""

    @property
    def name(self) -> str:
        """Kind of engine, for example openvino or sim."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits of the engine, constant after loading."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine, constant after loading."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether the next `step()` would compute tokens or report events."""
        ...

    def add(self, request: SequenceRequest) -> None:
        """Accept a sequence and its forks, each of which ends with one `FinishedEvent`.

        The caller must have stored the sequence's adapter with `put_adapter`.

        Raises:
            RefusedError: The request is not valid for this engine. Nothing was accepted.
        """
        ...

    def cancel(self, key: int) -> None:
        """End a sequence at the next step. An unknown key has no effect."""
        ...

    def step(self) -> StepEvents:
        """Compute one step of all running sequences, and return its events. This call blocks."""
        ...

    def load(self) -> EngineLoad:
        """Return the load of the engine after its last step. This call is cheap."""
        ...

    def cached_blocks(self) -> list[bytes]:
        """Return the hashes of all cached blocks, which the sum of all `StepEvents.kv` also has."""
        ...

    def read_adapter(self, digest: str, directory: Path) -> Any:
        """Read and check an adapter, which may be slow.

        Any thread may call this method.

        Returns:
            The adapter in the form that `put_adapter` expects.

        Raises:
            RefusedError: This base cannot serve the adapter. The message has the reason.
        """
        ...

    def put_adapter(self, digest: str, adapter: Any) -> None:
        """Store an adapter in host memory quickly. From then on, sequences may use the adapter.

        The longest unused adapters are evicted to make room.

        Raises:
            RefusedError: With ENGINE_BUSY if adapters in use fill the memory for adapters.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Drop an adapter once its last sequence has ended. An unknown adapter has no effect.

        `has_adapter` returns false immediately after this call.
        """
        ...

    def has_adapter(self, digest: str) -> bool:
        """Whether new sequences may use this adapter at present."""
        ...

    def adapters(self) -> list[AdapterState]:
        """Return the adapters in slots and in host memory."""
        ...

    def export_blocks(self, hashes: Sequence[bytes]) -> KvBlocks:
        """Return the contents of the cached blocks among `hashes`, up to the first missing one.

        Raises:
            RefusedError: The engine cannot export its blocks.
        """
        ...

    def import_blocks(self, blocks: KvBlocks) -> int:
        """Add blocks to the cache. Returns how many, from the first on, are then in the cache.

        The caller must have verified that the contents belong to the hashes.

        Raises:
            RefusedError: The layout differs, or the engine cannot import blocks.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A driver that can free its KV memory and allocate it again while the weights stay loaded."""

    def sleep(self, blocks: int) -> bool:
        """Drop all KV contents, and free all KV memory except for `blocks` blocks.

        Returns False, without any effect, while the driver has work.
        """
        ...

    def restored(self) -> Any:
        """Allocate and return KV memory for `wake`. This is slow, and any thread may call it.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def wake(self, memory: Any) -> None:
        """Use the given memory for all KV blocks again. `has_work` must be false."""
        ...


@runtime_checkable
class ChecksGrammars(Protocol):
    """A driver that can compile a request's grammar before `add`, so that `add` is quick."""

    def check_grammar(self, request: SequenceRequest) -> None:
        """Compile the grammar of a request that is not added yet. Any thread may call this.

        Raises:
            RefusedError: The grammar cannot be used. The message has the reason.
        """
        ...
