"""The API at the paths that clients of Azure OpenAI use."""

from collections.abc import Mapping

from aiohttp import web

from gateway.endpoints.reading import MODEL_OF_PATH
from gateway.server.routes import Handler, Routes, path_rest
from sluice.errors import ErrorCode, PlatformError

_DEPLOYMENTS = "/openai/deployments/"


class AzurePaths:
    """Answers `/openai/deployments/MODEL/...`, where a deployment is a model of this API."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        """`handlers` maps the part of a path after `/v1/` to the path's handler."""
        self._handlers = handlers

    def add_to(self, routes: Routes) -> None:
        """Add all paths."""
        routes.add("POST", f"{_DEPLOYMENTS}*", self._handle)
        for tail, handler in self._handlers.items():
            routes.add("POST", f"/openai/v1/{tail}", handler)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        rest = path_rest(request, _DEPLOYMENTS)
        for tail, handler in self._handlers.items():
            model = rest.removesuffix(f"/{tail}")
            if model and model != rest:
                request[MODEL_OF_PATH] = model
                return await handler(request)
        served = ", ".join(self._handlers)
        text = f"Behind {_DEPLOYMENTS}MODEL/ there are: {served}."
        raise PlatformError(ErrorCode.NOT_FOUND, text)
