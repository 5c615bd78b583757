"""Tracks the routers that have a watch open with this control plane, and answer."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Presence:
    """The open watches of each router. A router's address is the address of its newest watch.

    Attributes:
        on_change: Called when a router connects, changes its address or leaves.
        departed: Routers whose departure is not stored yet, with the last address.
        gone: Departed routers that announced their end, were observed to have ended, or became
            silent.
    """

    on_change: Callable[[], None]
    departed: dict[str, str] = field(default_factory=dict[str, str])
    gone: set[str] = field(default_factory=set[str])
    _watches: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    # Routers with an open watch that announced their end (first set) or do not answer (second set).
    _leaving: set[str] = field(default_factory=set[str])
    _silent: set[str] = field(default_factory=set[str])

    def here(self) -> dict[str, str]:
        """Return the addresses of the routers that are present and answer, by id."""
        return {
            router_id: addresses[-1]
            for router_id, addresses in self._watches.items()
            if router_id not in self._leaving and router_id not in self._silent
        }

    def watched(self) -> dict[str, str]:
        """Return the addresses of all routers with an open watch, by id."""
        return {router_id: addresses[-1] for router_id, addresses in self._watches.items()}

    def silent(self, router_id: str) -> None:
        """Record that a router with an open watch does not answer, so that it counts as gone."""
        if router_id in self.here():
            log.warning("router_silent", router=router_id)
            self._silent.add(router_id)
            self.departed[router_id] = self._watches[router_id][-1]
            self.gone.add(router_id)
            self.on_change()

    def answered(self, router_id: str) -> None:
        """Record that a router answers. A silent router counts as present again."""
        if router_id in self._silent:
            log.info("router_reconnected", router=router_id)
            self._silent.discard(router_id)
            self.departed.pop(router_id, None)
            self.gone.discard(router_id)
            self.on_change()

    def leave(self, router_id: str) -> None:
        """Record that a router announced its end. Its watch may stay open a moment longer."""
        addresses = self._watches.get(router_id)
        if addresses:
            self._leaving.add(router_id)
        self.departed[router_id] = addresses[-1] if addresses else ""
        self.gone.add(router_id)
        self.on_change()

    def written(self, departed: Iterable[str], gone: Iterable[str]) -> None:
        """Forget departures that have been stored."""
        for router_id in departed:
            self.departed.pop(router_id, None)
        self.gone.difference_update(gone)

    @contextmanager
    def present(self, router_id: str, address: str) -> Generator[None]:
        """Count the router as present while the context is open.

        A router that lost its connection may reconnect before the end of its old watch is noticed.
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
