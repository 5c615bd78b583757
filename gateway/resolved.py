"""The model that a public name resolves to for a request. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.pool_choice import ServingPool
from gateway.rollouts.decision import ReleaseDecision
from sluice.split import ReleaseSplit
from sluice.wire.control.v1 import control_pb2 as wire


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pools that serve a model, for one caller.

    All attributes have one entry per pool, in the same order. The model's own pool is the first.

    Attributes:
        pools: Pools with their weights and prices.
        models: The model's copy for each pool, with the pool's id and base.
        cache_roots: Root of the prefix cache's hash chain in each pool.
        contexts: Maximum number of prompt and output tokens together in each pool, or 0 if not
            known.
    """

    pools: tuple[ServingPool, ...]
    models: tuple[wire.Model, ...]
    cache_roots: tuple[bytes, ...]
    contexts: tuple[int, ...]

    def at(self, resolved: "ResolvedModel", number: int) -> "ResolvedModel":
        """Return the model's copy for the pool with this number."""
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
    """The model that a public name resolves to, for one caller.

    Attributes:
        name: Requested name, which is a model, `model@release` or an alias.
        model: Model with its own id, and the release that the name points at.
        context_tokens_max: Maximum number of prompt and output tokens together, or 0 if not known.
        tenant_id: Tenant of the caller.
        cache_root: Root of the prefix cache's hash chain.
        generates_text: Whether the model generates text, rather than embeddings.
        decision: Reason why this release answers, or None for the release of the name itself.
        fork: Chooses the release for each request, or None without a rollout.
        shadow: Release that receives a copy of the request, or None without a copy.
        instead: Release that answers if no engine can load this release, or None without one.
        warm_prompts: System prompts whose blocks are kept in caches, or None without any.
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
        mirror: Decides which requests to control are also copied to the canary, or None to copy
            none.
        control: Release for requests that the canary does not answer.
        instead: Control, for canary requests while this gateway lacks the canary's base.
        copied: Control, with the canary as `shadow`.
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
        """Return the release for a request, but never a canary whose base is not loaded."""
        base = self.canary.model.base_digest
        is_ready = base == self.control.model.base_digest or has_base(base)
        if self.split.choose(tenant_id, session, request_id).is_canary:
            return self.canary if is_ready else self.instead
        if self.mirror is None or not is_ready:
            return self.control
        is_copied = self.mirror.choose(tenant_id, session, request_id).is_canary
        return self.copied if is_copied else self.control
