"""The model that a public name means for a request. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.pool_choice import ServingPool
from gateway.rollouts.decision import ReleaseDecision
from sluice.split import ReleaseSplit
from sluice.wire.control.v1 import control_pb2 as wire


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pools that serve a model, for one caller.

    Each attribute has one entry per pool, in the same order. The model's own pool is the first.

    Attributes:
        pools: Pools with their weights and prices.
        models: The model's copy for each pool, with the pool's id and base.
        cache_roots: Root of the chain of block hashes in each pool.
        contexts: Maximum number of prompt and output tokens together in each pool, or 0
            without a known limit.
    """

    pools: tuple[ServingPool, ...]
    models: tuple[wire.Model, ...]
    cache_roots: tuple[bytes, ...]
    contexts: tuple[int, ...]

    def alike(self, pool_id: str) -> tuple[ServingPool, ...]:
        """Return the pools to which a request to the given pool can move as it is.

        A request has the tokens and the length that one base permits. The result includes the
        given pool, and is empty if no other pool has the same base.
        """
        roots, contexts = self.cache_roots, self.contexts
        kinds = [
            (model.base_digest, roots[number], contexts[number])
            for number, model in enumerate(self.models)
        ]
        own = kinds[[it.pool_id for it in self.pools].index(pool_id)]
        found = tuple(pool for pool, kind in zip(self.pools, kinds, strict=True) if kind == own)
        return found if len(found) > 1 else ()

    def at(self, resolved: "ResolvedModel", number: int) -> "ResolvedModel":
        """Return the model's copy for the pool with the index `number`."""
        if not number:
            return resolved
        return replace(
            resolved,
            model=self.models[number],
            cache_root=self.cache_roots[number],
            context_tokens_max=self.contexts[number],
        )


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model that a public name means, for one caller.

    Attributes:
        name: Requested name, which is a model, `model@release` or an alias.
        model: Model with its own id, in the form of the release that answers.
        context_tokens_max: Maximum number of prompt and output tokens together, or 0 without a
            known limit.
        tenant_id: Tenant of the caller.
        cache_root: Root of the chain of block hashes, which separates caches of tenants and models.
        generates_text: Whether the model generates text, rather than embeddings.
        decision: Reason why this release answers, or None if the name itself means this release.
        fork: Chooses between the releases for each request, or None without a rollout.
        shadow: Release that receives a copy of the request, or None if no copy is made.
        instead: Release that answers if no engine can load this release, or None without one.
        warm_prompts: System prompts whose blocks replicas keep cached, or None without any.
        options: Pools to choose from, or None if one pool serves the model.
    """

    name: str
    model: wire.Model
    context_tokens_max: int
    tenant_id: str
    cache_root: bytes
    generates_text: bool
    decision: ReleaseDecision | None = None
    fork: "ReleaseFork | None" = None
    shadow: "ResolvedModel | None" = None
    instead: "ResolvedModel | None" = None
    warm_prompts: wire.WarmPrompts | None = None
    options: PoolOptions | None = None

    @property
    def pool_ids(self) -> list[str]:
        """Ids of all pools that serve the model."""
        options = self.options
        return [self.model.pool_id] if options is None else [it.pool_id for it in options.pools]


@dataclass(frozen=True, slots=True)
class ReleaseFork:
    """The releases of a model in rollout, for one caller.

    Attributes:
        split: Decides which requests the canary answers. Tenants with a pin have no fork.
        mirror: Decides which of control's requests are also copied to the canary, or None if none
            are.
        control: Control release, for a request that only control receives.
        instead: Control release, for a canary's request while the canary's base is not loaded here.
        copied: Control release, for a request of which the canary receives a copy.
        canary: Release that is rolled out.
    """

    split: ReleaseSplit
    mirror: ReleaseSplit | None
    control: ResolvedModel
    instead: ResolvedModel
    copied: ResolvedModel
    canary: ResolvedModel

    def choose(
        self, tenant_id: str, session: str, request_id: str, has_base: Callable[[str], bool]
    ) -> ResolvedModel:
        """Return the release for a request. A canary whose base is not loaded is never returned."""
        base = self.canary.model.base_digest
        is_ready = base == self.control.model.base_digest or has_base(base)
        if self.split.choose(tenant_id, session, request_id).is_canary:
            return self.canary if is_ready else self.instead
        if self.mirror is None or not is_ready:
            return self.control
        is_copied = self.mirror.choose(tenant_id, session, request_id).is_canary
        return self.copied if is_copied else self.control
