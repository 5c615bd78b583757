"""The pools of a model that several pools serve, and the choice of a pool per request. Pure.

A model may have a list of pools. A release uses the list only if the release's own pool is in it. A
release whose own pool is not in the list is served by its own pool alone.
"""

import zlib
from collections.abc import Callable, Mapping

from gateway.pool_choice import PoolReason, ServingPool, choose_pool
from gateway.resolved import PoolOptions, ResolvedModel
from sluice.engines import profile_of
from sluice.hashing import session_hash
from sluice.profiles import FRAMES
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

_WAKEABLE = (wire.REPLICA_STATE_READY, wire.REPLICA_STATE_SLEEPING)


def served_by(
    told: wire.ModelPools | None, model: wire.Model, pools: Mapping[str, wire.Pool]
) -> list[tuple[ServingPool, wire.Model]]:
    """Return the pools that serve a model, each with a copy of the model for that pool.

    A copy has the id and the base of its pool. The model's own pool is the first. A pool with
    another base serves only models without an adapter, and only if the list allows other bases. An
    entry is ignored if its pool does not exist or runs an embedding engine. The result is empty if
    only one pool serves the model.

    Args:
        told: The model's list of pools, or None without a list.
        model: The model, in the form of its current release or of another release.
        pools: All pools by id.
    """
    entries = {} if told is None else {it.pool_id: it for it in told.pools}
    own = entries.pop(model.pool_id, None)
    if own is None:
        return []
    found = [(_serving(own), model)]
    for pool_id, entry in sorted(entries.items()):
        pool = pools.get(pool_id)
        if pool is not None and _may_serve(pool, model, entry):
            served = wire.Model()
            served.CopyFrom(model)
            served.pool_id, served.base_digest = pool_id, pool.base_digest
            found.append((_serving(entry), served))
    return found if len(found) > 1 else []


def _may_serve(pool: wire.Pool, model: wire.Model, entry: wire.ModelPool) -> bool:
    if profile_of(pool.engine) is not FRAMES:
        return False
    if pool.base_digest == model.base_digest:
        return True
    return entry.is_other_base and not model.adapter_digest


def _serving(entry: wire.ModelPool) -> ServingPool:
    return ServingPool(entry.pool_id, entry.weight or 1.0, entry.price or 1.0)


def options_of(
    told: wire.ModelPools | None,
    model: wire.Model,
    pools: Mapping[str, wire.Pool],
    cache_root_of: Callable[[wire.Model], bytes],
    context_of: Callable[[wire.Model], int],
) -> PoolOptions | None:
    """Return the pools to choose from, or None if only one pool serves the model.

    Args:
        told: The model's list of pools, or None without a list.
        model: The model, in the form of its current release or of another release.
        pools: All pools by id.
        cache_root_of: Returns the root of a model's chain of block hashes for the caller.
        context_of: Returns the caller's maximum number of tokens in a request to a model.
    """
    found = [] if told is None else served_by(told, model, pools)
    if not found:
        return None
    models = tuple(served for _, served in found)
    return PoolOptions(
        tuple(pool for pool, _ in found),
        models,
        tuple(map(cache_root_of, models)),
        tuple(map(context_of, models)),
    )


class PoolChooser:
    """Chooses a pool for each request to a model that several pools serve."""

    def __init__(
        self,
        wait_ms: Callable[[str], float | None],
        has_base: Callable[[str], bool],
        count: Callable[[str, PoolReason], None],
        can_wake: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Store the functions on which choices depend.

        Args:
            wait_ms: Returns the predicted wait in a pool, or None if the pool cannot serve now.
            has_base: Returns whether the tokenizer of the base with a given digest is loaded.
            count: Counts a choice by pool and reason.
            can_wake: Returns whether a pool has replicas that sleep or have just been woken.
        """
        self._wait_ms = wait_ms
        self._has_base = has_base
        self._count = count
        self._can_wake = can_wake

    def place(self, resolved: ResolvedModel, session: str, request_id: str) -> ResolvedModel:
        """Choose a pool, and return the model's copy for that pool.

        Args:
            resolved: Model that answers.
            session: Key of requests that stay in one pool, or empty without a session.
            request_id: Id that chooses the pool of a request without a session.
        """
        options = resolved.options
        if options is None:  # the usual case
            return resolved
        pools, models = options.pools, options.models

        def has_base(number: int) -> bool:
            digest = models[number].base_digest
            return digest == resolved.model.base_digest or self._has_base(digest)

        def can_wake(number: int) -> bool:
            return has_base(number) and self._can_wake(pools[number].pool_id)

        waits_ms = [
            self._wait_ms(pool.pool_id) if has_base(number) else None
            for number, pool in enumerate(pools)
        ]
        session_key = session_hash(resolved.tenant_id, session)
        salt = zlib.crc32(request_id.encode())
        number, reason = choose_pool(pools, waits_ms, session_key, salt, can_wake)
        self._count(pools[number].pool_id, reason)
        return options.at(resolved, number)


class WakeablePools:
    """The pools with a replica that is ready or sleeps, by the control plane's state.

    If routers report no ready replica in such a pool, its replicas sleep or have just been woken.
    """

    def __init__(self, state: ControlState) -> None:
        """Read nothing before the first question."""
        self._state = state
        self._revision = -1
        self._pools: frozenset[str] = frozenset()

    def has(self, pool_id: str) -> bool:
        """Return whether a request can wake a replica of the pool."""
        revision = self._state.revisions["replicas"]
        if revision != self._revision:
            self._revision = revision
            replicas = self._state.replicas.values()
            self._pools = frozenset(it.pool_id for it in replicas if it.state in _WAKEABLE)
        return pool_id in self._pools
