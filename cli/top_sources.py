"""Sources of the numbers of `sluice top`, which are metrics pages of processes or a Prometheus."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from cli.admin import has_certificate
from cli.api import ApiClient, ApiError
from cli.top_scrape import Labels, Scrape, ScrapeChange, gathered, parse

if TYPE_CHECKING:  # imported only by functions that send requests
    import httpx

_TIMEOUT_S = 2.0
_AT_ONCE = 32
_PAGE_BYTES_MAX = 8 << 20
_TARGETS_EVERY_S = 10.0
# All metrics of the views, so that a Prometheus returns no others. Tests check the list.
NAMES = (
    *("llm_e2e_seconds_count", "llm_goodput_requests_total", "router_tokens_total"),
    *("gateway_open_generations", "llm_ttft_seconds_bucket", "llm_itl_seconds_bucket"),
    *("gateway_tenant_requests_total", "gateway_tenant_tokens_total"),
    *("control_plane_replicas_count", "llm_queue_depth", "router_queue_requests"),
    *("router_running_requests", "router_ttft_seconds_bucket", "router_queue_seconds_bucket"),
    *("nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_request_metrics"),
    *("llm_output_tokens_total", "llm_prefix_cache_tokens_total", "llm_adapter_tokens_total"),
)


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """One page of metrics, with `labels` that are added to all its series."""

    url: str
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def instance(self) -> str:
        """Host and port, which distinguish the process in the label `instance`."""
        return urlsplit(self.url).netloc


class ScrapeSource(Protocol):
    """A source of pairs of scrapes."""

    async def change(self) -> ScrapeChange:
        """Return the latest scrape and an earlier one. Raises ScrapeError if there is none."""
        ...


class ScrapeError(RuntimeError):
    """No metrics can be read. The message is written for people."""


class Targets(Protocol):
    """A function that lists the pages to scrape."""

    async def __call__(self) -> Sequence[ScrapeTarget]:
        """Return the present targets. Raises ApiError if they cannot be listed."""
        ...


class Pages:
    """Scrapes the pages of processes. Each `change` is the difference from the previous scrape."""

    def __init__(self, http: "httpx.AsyncClient", targets: Targets) -> None:
        self._http = http
        self._targets = targets
        self._known: Sequence[ScrapeTarget] = ()
        self._known_at_s = 0.0
        self._why = ""
        self._last: Scrape | None = None

    async def change(self) -> ScrapeChange:
        """Return the changes since the last call. The first call returns an interval of 0 s."""
        await self._look()
        limit = asyncio.Semaphore(_AT_ONCE)
        at_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._page(target, limit)) for target in self._known]
        pages = [task.result() for task in tasks]
        samples = [sample for page in pages if not isinstance(page, str) for sample in page]
        silent = [page for page in (*pages, self._why) if page and isinstance(page, str)]
        if not samples:
            raise ScrapeError("; ".join(silent[:3]) or "no page to scrape: give --metrics-url")
        scrape = gathered(at_s, samples, silent)
        before, self._last = self._last or scrape, scrape
        return ScrapeChange(before, scrape)

    async def _look(self) -> None:
        """Update the targets at intervals. If the update fails, the earlier targets stay."""
        if self._known and time.monotonic() - self._known_at_s < _TARGETS_EVERY_S:
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._known, self._why = await self._targets(), ""
        except TimeoutError:
            self._why = f"the list of replicas: silent for {_TIMEOUT_S:g} s"
        except ApiError as error:
            self._why = str(error)
        self._known_at_s = time.monotonic()

    async def _page(
        self, target: ScrapeTarget, limit: asyncio.Semaphore
    ) -> list[tuple[str, Labels, float]] | str:
        import httpx

        labels = {"instance": target.instance, **dict(target.labels)}
        try:
            async with limit, asyncio.timeout(_TIMEOUT_S):
                text = await self._read(target.url)
            return [it for it in parse(text, labels) if it[0] in NAMES]
        except (httpx.HTTPError, TimeoutError) as error:
            return f"{target.url}: {type(error).__name__}"
        except (ValueError, httpx.InvalidURL) as error:
            return f"{target.url}: no page of metrics ({str(error)[:80]})"

    async def _read(self, url: str) -> str:
        async with self._http.stream("GET", url) as answer:
            answer.raise_for_status()
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > _PAGE_BYTES_MAX:
                    raise ValueError(f"more than {_PAGE_BYTES_MAX >> 20} MiB")
        return body.decode()


def parse_targets(words: Iterable[str]) -> list[ScrapeTarget]:
    """Return the targets that words of the form URL, or POOL=URL for engines, denote.

    Raises:
        ValueError: A word has neither form.
    """
    targets: list[ScrapeTarget] = []
    for word in words:
        pool, separator, url = word.partition("=")
        if not separator or "://" in pool:
            pool, url = "", word
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise ValueError(f"{word!r} is neither URL nor POOL=URL")
        url = url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"
        targets.append(ScrapeTarget(url, (("pool", pool),) if pool else ()))
    return targets


async def engine_targets(api: ApiClient) -> list[ScrapeTarget]:
    """Return the metrics pages of all replicas that have started. Raises ApiError."""
    scheme = "https" if has_certificate() else "http"
    return [
        ScrapeTarget(f"{scheme}://{it['metrics_address']}/metrics", (("pool", it["pool_id"]),))
        for it in await api.list("/v1/replicas")
        if it["metrics_address"]
    ]


class Prometheus:
    """Queries a Prometheus for present and earlier values."""

    def __init__(self, http: "httpx.AsyncClient", url: str, window_s: float) -> None:
        self._http = http
        self._url = url.rstrip("/") + "/api/v1/query"
        self._window_s = window_s

    async def change(self) -> ScrapeChange:
        """Return the window's first and last values. Raises ScrapeError if Prometheus has none."""
        import httpx

        now_s = time.time()
        try:
            async with asyncio.timeout(_TIMEOUT_S * 2):
                before, after = (
                    await self._values(now_s - self._window_s),
                    await self._values(now_s),
                )
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise ScrapeError(f"{self._url}: {type(error).__name__}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ScrapeError(f"{self._url} does not answer as Prometheus does") from None
        if not after.values:
            raise ScrapeError(f"{self._url} knows none of the platform's metrics")
        return ScrapeChange(before, after)

    async def _values(self, at_s: float) -> Scrape:
        query = '{__name__=~"' + "|".join(NAMES) + '"}'
        answer = await self._http.post(self._url, data={"query": query, "time": f"{at_s:.3f}"})
        answer.raise_for_status()
        return gathered(at_s, _samples(answer.json()["data"]["result"]))


def _samples(result: Sequence[Mapping[str, Any]]) -> list[tuple[str, Labels, float]]:
    found: list[tuple[str, Labels, float]] = []
    for one in result:
        labels = dict(one["metric"])
        name, value = labels.pop("__name__"), float(one["value"][1])
        if isfinite(value):
            found.append((name, frozenset(labels.items()), value))
    return found
