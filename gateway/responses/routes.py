"""The paths of the Responses API."""

from gateway.bases.assets import AssetCache
from gateway.directory import Directory
from gateway.endpoints.completer import Completer
from gateway.limits.limiter import Limiter
from gateway.responses.endpoint import Responses
from gateway.responses.store import ResponseStore
from gateway.responses.stored import StoredResponses
from gateway.server.routes import Routes


def add_responses(
    routes: Routes,
    directory: Directory,
    completer: Completer,
    assets: AssetCache,
    limiter: Limiter,
    store: ResponseStore,
) -> None:
    """Add all paths; see `Responses` for the parts."""
    responses = Responses(
        directory=directory, completer=completer, assets=assets, limiter=limiter, store=store
    )
    stored = StoredResponses(directory=directory, store=store)
    routes.add("POST", "/v1/responses", responses.create)
    routes.add("POST", "/v1/responses/input_tokens", responses.count_input)
    routes.add("GET", "/v1/responses/*", stored.get)
    routes.add("DELETE", "/v1/responses/*", stored.delete)
