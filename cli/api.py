"""A client of the admin REST and of the telemetry queries, which uses nothing but HTTP."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:  # imported only when a call needs it
    import ssl

    import httpx

TIMEOUT_S = 10.0
_EDITS_MAX = 5  # attempts of an edit against concurrent writers
_PAGE_MAX = 1000
_PRECONDITION_FAILED = 412
_NOT_FOUND = 404
_UNAUTHORIZED = 401
# Path prefix -> command that lists the objects below this path. The first match is used.
_LISTS = {
    "artifacts/uploads": "artifacts uploads list",
    "signing-keys": "artifacts signing-keys list",
    "releases": "models releases",
    "aliases": "models alias list",
    "bases": "models base list",
    "pools": "fleet pools",
    "nodes": "fleet nodes",
    "quarantines": "fleet quarantines",
    "golden-prompts": "golden list",
    **{
        kind: f"{kind} list"
        for kind in [
            "tiers",
            "tenants",
            "models",
            "adapters",
            "artifacts",
            "rollouts",
            "admin-keys",
        ]
    },
}
Json = dict[str, Any]


class ApiError(RuntimeError):
    """A call that failed. Its message is written for people.

    Attributes:
        status: HTTP status, or 0 if there was no answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ApiClient:
    """A client of one service's HTTP API, which sends the admin key."""

    def __init__(self, base_url: str, key: str, *, timeout_s: float = TIMEOUT_S) -> None:
        import httpx

        self.base_url = base_url
        # The network is the loopback or an operator's own. Plain HTTP needs no certificate store.
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {key}"},
            timeout=timeout_s,
            verify=urlsplit(base_url).scheme == "https" and trust(),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str | int] | None = None,
    ) -> Json:
        """Return the JSON object of the answer, which is empty if the answer has no body.

        Raises:
            ApiError: There is no answer, or its status is 400 or higher.
        """
        answer = await self._send(method, path, body=body, query=query)
        return answer.json() if answer.content else {}

    async def edit(
        self, path: str, change: Callable[[Json], Json], new: Json | None = None
    ) -> Json:
        """Replace an object by the result of `change`, without losing a concurrent change.

        Args:
            path: Path of the object.
            change: Function that computes the body of the PUT from the read object. After a
                concurrent change it is called again.
            new: First version of a missing object. With None, the object must exist.

        Raises:
            ApiError: As for `call`. The status is 404 if the object must exist and is missing.
        """
        for left in reversed(range(_EDITS_MAX)):
            condition = {"If-None-Match": "*"}
            try:
                read = await self._send("GET", path)
                known: Json = read.json()
                condition = {"If-Match": read.headers["ETag"]}
            except ApiError as error:
                if error.status != 404 or new is None:
                    raise
                known = dict(new)
            try:
                answer = await self._send("PUT", path, body=change(known), headers=condition)
                return answer.json()
            except ApiError as error:
                if error.status != _PRECONDITION_FAILED or not left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        query: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "httpx.Response":
        import httpx

        # The process that received the call ended or hung. Another may serve the address.
        answer_lost = (httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout)
        sent, path = dict(headers or {}), _checked(path)
        if method != "GET":  # so that a retry cannot repeat the change
            sent["idempotency-key"] = secrets.token_hex(16)
        request = partial(
            self._http.request,
            *(method, path),
            json=body,
            content=content,
            params=query,
            headers=sent,
        )
        try:
            try:
                answer = await request()
            except answer_lost:
                answer = await request()
        except httpx.HTTPError as error:
            raise ApiError(
                f"{self.base_url} does not answer ({type(error).__name__}); "
                "is the stack running? See: sluice status"
            ) from error
        if answer.status_code >= 400:
            status = answer.status_code
            told = f"{method} {path}: {status} {_problem(answer)}{_hint(path, status)}"
            raise ApiError(told, status)
        return answer

    async def send_bytes(self, path: str, content: bytes) -> None:
        """PUT bytes unchanged. Raises ApiError like `call`."""
        await self._send("PUT", path, content=content)

    async def read(self, path: str, query: Mapping[str, str | int]) -> bytes:
        """Return the bytes of an answer that is not JSON. Raises ApiError like `call`."""
        return (await self._send("GET", path, query=query)).content

    async def report_alerts(self, alerts: Sequence[Json]) -> None:
        """Report alerts in the form that Prometheus uses. Raises ApiError like `call`."""
        content = json.dumps(alerts).encode()
        await self._send("POST", "/v1/alertmanager/api/v2/alerts", content=content)

    async def find(self, path: str) -> dict[str, Any] | None:
        """Return an object, or None if no object has this id."""
        try:
            return await self.call("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, path: str, **query: str | int) -> list[dict[str, Any]]:
        """Return the first `limit` objects of a list, or all objects, read page by page."""
        limit = int(query.pop("limit", 0))
        found: list[dict[str, Any]] = []
        while True:
            size = {"limit": min(limit - len(found), _PAGE_MAX)} if limit else {}
            page = await self.call("GET", path, query={**query, **size})
            found += page["data"]
            if not page.get("has_more") or len(found) == limit:
                return found
            query["after"] = found[-1].get("id") or found[-1]["digest"]


def _checked(path: str) -> str:
    """Return a quoted path. Raises ApiError if an id is empty or consists of dots."""
    if not all(part.strip(".") for part in path.split("/")[1:]):
        raise ApiError(f"{path}: an id is missing, or has only dots; give one", 400)
    return quote(path, safe="/%@:+,=~")


def _hint(path: str, status: int) -> str:
    """Return a hint for an error, or an empty string if the message suffices."""
    if status == _UNAUTHORIZED:
        return "; the key is that of SLUICE_ADMIN_KEY, else of the running stack"
    if status != _NOT_FOUND:
        return ""
    kind = next((kind for kind in _LISTS if path.startswith(f"/v1/{kind}/")), None)
    return "" if kind is None else f"; see: sluice {_LISTS[kind]}"


def trust() -> "ssl.SSLContext | bool":
    """Return the accepted CAs of servers: the public CAs, and the platform's own CA if set.

    Public CAs are needed because a proxy before the services may have a public certificate.
    """
    import httpx

    from sluice.certificates import no_passphrase, ours

    certificates = ours()
    if certificates is None:
        return True
    context = httpx.create_ssl_context(trust_env=False)
    context.load_verify_locations(cadata=certificates.fresh().ca.decode("ascii", "ignore"))
    context.load_cert_chain(
        certificates.certificate_file, certificates.key_file, password=no_passphrase
    )
    return context


def _problem(answer: "httpx.Response") -> str:
    try:
        problem = answer.json()
        return str(problem.get("detail") or problem["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return answer.text.strip()[:200]
