"""Looks up public names (models, releases and aliases) for a tenant. Pure.

A tenant cannot find the models of other tenants, nor aliases of these models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sluice.watch import STEP_OBJECTS, ControlState
from sluice.wire.control.v1 import control_pb2 as wire


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A name that a tenant may use in requests.

    Attributes:
        model: Model that the name means now, with the model's own id.
    """

    name: str
    model: wire.Model


class Names:
    """Looks up names in a `ControlState`. Call `update` after each change of the state."""

    def __init__(self, state: ControlState) -> None:
        """Index the current state."""
        self._state = state
        # Id of the owning tenant by name of a model or alias, where an empty id means all tenants.
        self._owners: dict[str, str] = {}
        self._by_owner: dict[str, set[str]] = {}
        self._prepared: tuple[dict[str, str], dict[str, set[str]]] | None = None
        self._reindex()

    def prepare(self, coming: ControlState) -> Iterator[None]:
        """Index a new snapshot in small steps, before the snapshot replaces the state."""
        self._prepared = None
        owners: dict[str, str] = {}
        by_owner: dict[str, set[str]] = {}
        for number, name in enumerate((*coming.models, *coming.aliases)):
            named = coming.aliases.get(name) or coming.models[name]
            owners[name] = named.owner_tenant_id
            by_owner.setdefault(named.owner_tenant_id, set()).add(name)
            if number % STEP_OBJECTS == 0:
                yield
        self._prepared = owners, by_owner

    def update(self, response: wire.WatchResponse) -> None:
        """Update the index after a change, which the state already contains."""
        if response.is_snapshot:
            self._reindex()
            return
        removals, upserts = response.removals, response.upserts
        for name in (*removals.models, *removals.aliases):
            self._look_at(name)
        for named in (*upserts.models, *upserts.aliases):
            self._look_at(named.id)

    def find(self, name: str, tenant_id: str) -> wire.Model | None:
        """Return the model of a name, which may be a model, `model@release`, or an alias of either.

        A release is returned as its model in the form that the model has with this release.

        Returns:
            None if the tenant may not use the name, or if no pool serves the release.
        """
        alias = self._state.aliases.get(name)
        if alias is not None:
            if not _is_visible(alias, tenant_id):
                return None
            name = alias.target
        release = None
        model = self._state.models.get(name)
        if model is None:
            release = self._state.releases.get(name)
            model = self._state.models.get(release.model_id) if release is not None else None
        if model is None or not _is_visible(model, tenant_id):
            return None
        return model if release is None else _released(model, release)

    def at(self, model: wire.Model, release: str) -> wire.Model | None:
        """Return a model in the form that it has with a release, or None if no pool serves it.

        Args:
            model: Model from `find`.
            release: Name of the release, without the name of the model.
        """
        if model.release == release:
            return model
        found = self._state.releases.get(f"{model.id}@{release}")
        return None if found is None else _released(model, found)

    def visible(self, tenant_id: str) -> Sequence[PublicModel]:
        """Return a tenant's models and aliases, sorted by name. Releases are not listed."""
        public, own = (self._by_owner.get(owner, ()) for owner in ("", tenant_id))
        found = ((name, self.find(name, tenant_id)) for name in sorted((*public, *own)))
        return [PublicModel(name, model) for name, model in found if model is not None]

    def _reindex(self) -> None:
        if self._prepared is None:
            for _ in self.prepare(self._state):
                pass
        assert self._prepared is not None
        (self._owners, self._by_owner), self._prepared = self._prepared, None

    def _look_at(self, name: str) -> None:
        """Index a name's owner. If a model and an alias share the name, the alias is indexed."""
        self._forget(name)
        named = self._state.aliases.get(name) or self._state.models.get(name)
        if named is not None:
            self._owners[name] = named.owner_tenant_id
            self._by_owner.setdefault(named.owner_tenant_id, set()).add(name)

    def _forget(self, name: str) -> None:
        owner = self._owners.pop(name, None)
        if owner is not None:
            self._by_owner[owner].remove(name)
            if not self._by_owner[owner]:
                del self._by_owner[owner]


def matches(pattern: str, name: str) -> bool:
    """Return whether a name equals the pattern, or matches a pattern that ends in `*`."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _is_visible(named: wire.Model | wire.Alias, tenant_id: str) -> bool:
    return named.owner_tenant_id in ("", tenant_id)


def _released(model: wire.Model, release: wire.Release) -> wire.Model | None:
    if not release.pool_id:
        return None
    return wire.Model(
        id=model.id,
        base_digest=release.base_digest,
        adapter_digest=release.adapter_digest,
        release=release.id.removeprefix(f"{model.id}@"),
        owner_tenant_id=model.owner_tenant_id,
        created_at_unix_s=model.created_at_unix_s,
        pool_id=release.pool_id,
    )
