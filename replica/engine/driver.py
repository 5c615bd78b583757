"""The interface of all engines.

A driver owns sequences from `add` until their `FinishedEvent`. It is driven by `step()` from one
thread and never calls back. `tests/contract/test_drivers.py` is the contract that every driver
passes.
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
    """An engine, for one thread at a time."""

    @property
    def name(self) -> str:
        """Kind of engine: openvino, sim."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits, constant after loading."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities, constant after loading."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do or report anything."""
        ...

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence; from now on it and each of its forks end with one `FinishedEvent`.

        Its adapter must have been put in before (`put_adapter`).

        Raises:
            RefusedError: The request is not valid for this engine; nothing was taken.
        """
        ...

    def cancel(self, key: int) -> None:
        """End a sequence at the next step; an unknown key is ignored."""
        ...

    def step(self) -> StepEvents:
        """Compute one step for all running sequences; blocks while it computes."""
        ...

    def load(self) -> EngineLoad:
        """Return the state after the last step; cheap."""
        ...

    def cached_blocks(self) -> list[bytes]:
        """Return the hashes of all cached blocks: the sum of all `StepEvents.kv` so far."""
        ...

    def read_adapter(self, digest: str, directory: Path) -> Any:
        """Read and check an adapter; may be slow. The only method that any thread may call.

        Returns:
            The adapter in the form that `put_adapter` takes.

        Raises:
            RefusedError: The adapter cannot be served on this base; the message gives the reason.
        """
        ...

    def put_adapter(self, digest: str, adapter: Any) -> None:
        """Hold a read adapter in host memory; from now on sequences may name it. Quick.

        Unused adapters are evicted for it, oldest first.

        Raises:
            RefusedError: ENGINE_BUSY: the memory for adapters is full of ones in use.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Drop an adapter when its last sequence has ended; an unknown one is ignored.

        `has_adapter` is false from now on.
        """
        ...

    def has_adapter(self, digest: str) -> bool:
        """Whether sequences may name it now."""
        ...

    def adapters(self) -> list[AdapterState]:
        """Return the adapters in slots and in host memory."""
        ...

    def export_blocks(self, hashes: Sequence[bytes]) -> KvBlocks:
        """Return the contents of the leading ones of `hashes` that are cached.

        Raises:
            RefusedError: The engine cannot export its blocks.
        """
        ...

    def import_blocks(self, blocks: KvBlocks) -> int:
        """Put blocks into the cache; return how many of them, from the first on, it holds now.

        The caller has verified that content and hashes belong together.

        Raises:
            RefusedError: The layout differs, or the engine cannot import blocks.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A driver that can free its KV memory and allocate it again, with the weights in memory."""

    def sleep(self, blocks: int) -> bool:
        """Free the KV memory except for some blocks, without its content; False: it has work."""
        ...

    def restored(self) -> Any:
        """Return KV memory for `wake`; slow, any thread may call.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def wake(self, memory: Any) -> None:
        """Use all KV blocks again; only while `has_work` is false."""
        ...


@runtime_checkable
class ChecksGrammars(Protocol):
    """A driver that can compile a request's grammar early, so that `add` is quick."""

    def check_grammar(self, request: SequenceRequest) -> None:
        """Compile the grammar of a request that is added next; any thread may call.

        Raises:
            RefusedError: The grammar cannot be used; the message gives the reason.
        """
        ...
