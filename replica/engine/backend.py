"""Defines a backend, which computes the steps that the scheduler plans.

Backends stay plain Python, because compiled code supports neither checks of a protocol at run time
nor exceptions of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from replica.engine.plan import Adapter, StepOutput, StepPlan
from replica.engine.types import Capabilities, SequenceRequest


@runtime_checkable
class ResizableBackend(Protocol):
    """A backend whose KV memory can be freed and allocated again."""

    def allocated(self, blocks: int) -> Any:
        """Allocate and return KV memory for this many blocks. Slow, and callable in any thread."""
        ...

    def use(self, memory: Any) -> None:
        """Replace the KV memory by the given memory. The contents of the blocks are lost."""
        ...


class StepFailedError(RuntimeError):
    """A backend could not compute a step. Another engine may retry the step's sequences."""


class Backend(Protocol):
    """Computes steps for an engine. Queues and pools belong to the scheduler."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the backend, which never change."""
        ...

    @property
    def block_layout(self) -> str:
        """Description of a KV block's bytes, or empty if the backend cannot export blocks."""
        ...

    def check_request(self, request: SequenceRequest) -> None:
        """Check the parts of a request that only the backend can check, such as its grammar.

        The step thread calls this method before it accepts a sequence. Otherwise, a bad request
        would fail a whole step with all its sequences. Another thread may call it earlier, because
        a grammar may compile slowly. The compiled grammar should be cached until its sequence is
        added.

        Raises:
            RefusedError: The backend cannot compute the request, so the sequence is not accepted.
        """
        ...

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute a plan.

        Raises:
            StepFailedError: The computation failed. No sequence has a new token.
        """
        ...

    def read_adapter(self, digest: str, directory: Path) -> Adapter:
        """Read and check an adapter, in any thread. Raises RefusedError if it cannot be served."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of the given KV blocks."""
        ...

    def write_blocks(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Replace the contents of the given KV blocks."""
        ...
