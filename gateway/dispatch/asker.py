"""Who wants the answers to one request."""

from typing import Protocol

from gateway.dispatch.generation import Ending, Generation


class Asker(Protocol):
    """Is told how it goes; whatever it raises ends the request."""

    def submitted(self, cell_id: str, router_id: str) -> None:
        """An answer was submitted, the first time or again."""
        ...

    def begun(self) -> None:
        """An answer's first tokens have come, or it was nudged before."""
        ...

    def ended(self, generation: Generation, ending: Ending) -> None:
        """An answer has ended as it should: STOP or LENGTH."""
        ...
