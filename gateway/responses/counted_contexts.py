"""Reads the turns that a request continues, only for callers that are within their limits."""

from typing import Protocol

from gateway.auto.decision import AUTO
from gateway.directory import Directory, Principal
from gateway.limits.limiter import Limiter
from gateway.responses.context import (
    ContextReader,
    ContinuingRequest,
    ResponseContext,
    is_continuing,
)
from gateway.responses.local_turns import LocalTurns


class ContinuingAnswer(ContinuingRequest, Protocol):
    """A request that names a model and may continue earlier turns."""

    @property
    def model(self) -> str:
        """Public name of the model."""
        ...


class CountedContexts:
    """Counts a request in its limits before stored turns are read, because reading them is work."""

    def __init__(self, contexts: ContextReader, directory: Directory, limiter: Limiter) -> None:
        """`limiter` counts each request before `contexts` reads its turns."""
        self._contexts, self._directory, self._limiter = contexts, directory, limiter

    async def read(
        self, principal: Principal, wanted: ContinuingAnswer, local: LocalTurns | None = None
    ) -> ResponseContext:
        """Return the turns that a request continues.

        A request that fails here stays counted in the caller's limits.

        Args:
            principal: The caller. Once the turns are read, the counted request is returned to the
                limits, because the answer itself is counted later.
            wanted: The request.
            local: Responses of the request's WebSocket that the request may continue.

        Raises:
            LimitExceededError: A limit has no room for one more request.
            PlatformError: MODEL_NOT_FOUND if the model is unknown, and the errors of
                `ContextReader.read`.
        """
        tenant_id = principal.tenant.id
        if not is_continuing(wanted):
            return await self._contexts.read(tenant_id, wanted, local)
        counted = await self._limiter.count(principal, self._counted(principal, wanted))
        is_read = False
        try:
            context = await self._contexts.read(tenant_id, wanted, local)
            is_read = True
        finally:
            self._limiter.settle(counted, prompt_tokens=0, output_tokens=0, was_served=not is_read)
        return context

    def _counted(self, principal: Principal, wanted: ContinuingAnswer) -> str:
        """Return the id of the model whose limits count the request.

        The model of `auto` is chosen only after the turns are read, so `auto` itself is returned.
        """
        if wanted.model == AUTO and principal.auto_policy is not None:
            return AUTO
        return self._directory.resolve_any(principal, wanted.model).model.id
