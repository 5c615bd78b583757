"""The model that answers a request, as a public name stands for it. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.pool_choice import ServingPool
from gateway.rollouts.decision import ReleaseDecision
from sluice.split import ReleaseSplit
from sluice.wire.control.v1 import control_pb2 as wire


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pools that serve a model, for one caller; in all rows the model's own pool is the first.

    Attributes:
        pools: Pools with their weights and prices.
        models: Model as each of them serves it.
        cache_roots: Roots of the prefix cache's hash chain.
        contexts: Most tokens of prompt and output together; 0: not known.
    """

    pools: tuple[ServingPool, ...]
    models: tuple[wire.Model, ...]
    cache_roots: tuple[bytes, ...]
    contexts: tuple[int, ...]

    def at(self, resolved: "ResolvedModel", number: int) -> "ResolvedModel":
        """Return a model as one of its pools serves it."""
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
    """The model that a public name stands for, for one caller.

    Attributes:
        name: Requested name: a model, `model@release` or an alias.
        model: Model with its own id, and the release that the name points at.
        context_tokens_max: Most tokens of prompt and output together; 0: not known.
        tenant_id: Tenant of the caller.
        cache_root: Root of the prefix cache's hash chain.
        generates_text: Whether the model generates text, rather than embeddings.
        decision: Reason for the release; None: the name points at it.
        fork: Chooses the release for each request; None: no fork.
        shadow: Release that gets a copy of the request; None: none.
        instead: Release that answers when no engine can load this one; None: none.
        warm_prompts: System prompts whose blocks stay in caches; None: there are none.
        options: Pools to choose from; None: one pool serves the model.
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
        split: Split, which decides which requests are in canary; pins come before it.
        mirror: Decides which requests outside canary are copied; None: no request.
        control: Release for requests that are not in canary.
        instead: Control, for canary requests while canary's base is not here.
        copied: Control, with canary as `shadow`.
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
        """Return the release for a request; never a canary whose base is not loaded."""
        base = self.canary.model.base_digest
        is_ready = base == self.control.model.base_digest or has_base(base)
        if self.split.choose(tenant_id, session, request_id).is_canary:
            return self.canary if is_ready else self.instead
        if self.mirror is None or not is_ready:
            return self.control
        is_copied = self.mirror.choose(tenant_id, session, request_id).is_canary
        return self.copied if is_copied else self.control
