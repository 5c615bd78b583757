"""Tracks the routers that hold a watch open with this control plane, and answer."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Presence:
    """Open watches by router; the newest one has the address.

    Attributes:
        on_change: Called when a router comes, moves or leaves.
        departed: Routers that left and are not stored yet: id -> last address.
        gone: Departed routers that said goodbye, are known to have ended, or fell silent.
    """

    on_change: Callable[[], None]
    departed: dict[str, str] = field(default_factory=dict[str, str])
    gone: set[str] = field(default_factory=set[str])
    _watches: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    # With a watch that is still open: said goodbye; do not answer.
    _leaving: set[str] = field(default_factory=set[str])
    _silent: set[str] = field(default_factory=set[str])

    def here(self) -> dict[str, str]:
        """Return the addresses of the present routers, by id."""
        return {
            router_id: addresses[-1]
            for router_id, addresses in self._watches.items()
            if router_id not in self._leaving and router_id not in self._silent
        }

    def watched(self) -> dict[str, str]:
        """Return the addresses of all routers with a watch, by id."""
        return {router_id: addresses[-1] for router_id, addresses in self._watches.items()}

    def silent(self, router_id: str) -> None:
        """Note that a router does not answer though its watch is open: it counts as gone."""
        if router_id in self.here():
            log.warning("router_silent", router=router_id)
            self._silent.add(router_id)
            self.departed[router_id] = self._watches[router_id][-1]
            self.gone.add(router_id)
            self.on_change()

    def answered(self, router_id: str) -> None:
        """Note that a router answers: one that was silent is back."""
        if router_id in self._silent:
            log.info("router_reconnected", router=router_id)
            self._silent.discard(router_id)
            self.departed.pop(router_id, None)
            self.gone.discard(router_id)
            self.on_change()

    def leave(self, router_id: str) -> None:
        """Take a router's goodbye: it is gone, though its watch may stay open a moment longer."""
        addresses = self._watches.get(router_id)
        if addresses:
            self._leaving.add(router_id)
        self.departed[router_id] = addresses[-1] if addresses else ""
        self.gone.add(router_id)
        self.on_change()

    def written(self, departed: Iterable[str], gone: Iterable[str]) -> None:
        """Drop stored departures, unless they are over."""
        for router_id in departed:
            self.departed.pop(router_id, None)
        self.gone.difference_update(gone)

    @contextmanager
    def present(self, router_id: str, address: str) -> Generator[None]:
        """Count the router as alive while the context is open.

        A router that lost its connection may be back before the end of its old watch is noticed.
        """
        self._watches.setdefault(router_id, []).append(address)
        self._leaving.discard(router_id)
        self._silent.discard(router_id)
        self.departed.pop(router_id, None)
        self.gone.discard(router_id)
        self.on_change()
        try:
            yield
        finally:
            addresses = self._watches[router_id]
            addresses.remove(address)
            if not addresses:
                del self._watches[router_id]
                if router_id not in self._leaving | self._silent:
                    self.departed[router_id] = address
                self._leaving.discard(router_id)
                self._silent.discard(router_id)
            self.on_change()
