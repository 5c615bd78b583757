"""Indexes objects of the control plane by the tenant that owns them. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar


class _OwnedObject(Protocol):
    @property
    def owner_tenant_id(self) -> str: ...


T = TypeVar("T", bound=_OwnedObject)


class OwnedObjects(Generic[T]):
    """Objects of one kind, by the tenant that owns them. The first look-up builds the index."""

    def __init__(self, objects: Callable[[], Mapping[str, T]]) -> None:
        """Index nothing yet. `objects` returns the state's current objects by id."""
        self._objects = objects
        self._by_owner: dict[str, list[T]] | None = None

    def of(self, tenant_id: str) -> Sequence[T]:
        """Return the objects of a tenant, in the order of their ids."""
        if self._by_owner is None:
            self._by_owner = {}
            for _, it in sorted(self._objects().items()):
                self._by_owner.setdefault(it.owner_tenant_id, []).append(it)
        return self._by_owner.get(tenant_id, ())

    def forget(self) -> None:
        """Drop the index, because the objects have changed."""
        self._by_owner = None
