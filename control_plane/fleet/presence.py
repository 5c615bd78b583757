"""Which routers hold a watch open with this control plane."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Presence:
    """Open watches by router; the newest one says the address.

    Attributes:
        on_change: Called when a router comes, moves or leaves.
        departed: Routers that left and were not written down yet.
    """

    on_change: Callable[[], None]
    departed: set[str] = field(default_factory=set[str])
    _watches: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def here(self) -> dict[str, str]:
        """Return the addresses of the routers that are here, by id."""
        return {router_id: addresses[-1] for router_id, addresses in self._watches.items()}

    @contextmanager
    def present(self, router_id: str, address: str) -> Generator[None]:
        """Take the router for alive while the context is open.

        A router that lost its connection may be back before its old watch is seen to have ended.
        """
        self._watches.setdefault(router_id, []).append(address)
        self.departed.discard(router_id)
        self.on_change()
        try:
            yield
        finally:
            addresses = self._watches[router_id]
            addresses.remove(address)
            if not addresses:
                del self._watches[router_id]
                self.departed.add(router_id)
            self.on_change()
