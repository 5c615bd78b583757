"""Defines the interface of all engines.

A driver owns sequences from `add` until their `FinishedEvent`. One thread calls `step()`, and the
driver never calls back. `tests/contract/test_drivers.py` tests every driver for this contract.
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
        """Whether `step()` would compute or report anything."""
        ...

    def add(self, request: SequenceRequest) -> None:
        """Accept a sequence, which ends with one `FinishedEvent`, as does each of its forks.

        The sequence's adapter must have been stored by `put_adapter` before.

        Raises:
            RefusedError: The request is not valid for this engine, and no part of it was accepted.
        """
        ...

    def cancel(self, key: int) -> None:
        """End a sequence at the next step, unless the key is unknown."""
        ...

    def step(self) -> StepEvents:
        """Compute one step for all running sequences, and return its events. Blocks until then."""
        ...

    def load(self) -> EngineLoad:
        """Return the load of the engine after its last step. This call is cheap."""
        ...

    def cached_blocks(self) -> list[bytes]:
        """Return the hashes of all cached blocks, as reported by all `StepEvents.kv` so far."""
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
        """Store an adapter in host memory quickly, so that sequences may use it from now on.

        Unused adapters are evicted to make room, longest unused first.

        Raises:
            RefusedError: With ENGINE_BUSY if adapters in use fill the memory for adapters.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Drop an adapter as soon as its last sequence has ended, unless it is unknown.

        `has_adapter` returns false from this call on.
        """
        ...

    def has_adapter(self, digest: str) -> bool:
        """Whether new sequences may use this adapter at present."""
        ...

    def adapters(self) -> list[AdapterState]:
        """Return the adapters in slots and in host memory."""
        ...

    def export_blocks(self, hashes: Sequence[bytes]) -> KvBlocks:
        """Return the contents of those leading blocks of `hashes` that are cached.

        Raises:
            RefusedError: The engine cannot export its blocks.
        """
        ...

    def import_blocks(self, blocks: KvBlocks) -> int:
        """Add blocks to the cache, and return how many leading ones are cached now.

        The caller must have verified that contents and hashes match.

        Raises:
            RefusedError: The layout differs, or the engine cannot import blocks.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A driver that can free its KV memory and allocate it again while the weights stay loaded."""

    def sleep(self, blocks: int) -> bool:
        """Drop all KV contents and free all memory but `blocks` blocks.

        The result is False while there is work.
        """
        ...

    def restored(self) -> Any:
        """Allocate and return KV memory for `wake`, slowly and in any thread.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def wake(self, memory: Any) -> None:
        """Use the given memory for all KV blocks again, only while `has_work` is false."""
        ...


@runtime_checkable
class ChecksGrammars(Protocol):
    """A driver that can compile a request's grammar early, so that `add` is quick."""

    def check_grammar(self, request: SequenceRequest) -> None:
        """Compile the grammar of a request before the request is added, in any thread.

        Raises:
            RefusedError: The grammar cannot be used. The message has the reason.
        """
        ...
