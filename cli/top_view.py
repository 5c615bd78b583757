"""Views of `sluice top`, computed from two scrapes without I/O.

Any number may be missing. A missing number is None, which is shown as `-` and never as 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cli.top_scrape import INSTANCE, ScrapeChange

_TENANTS_MAX = 10
_MODELS_MAX = 10
_READY = "ready"
_ENDED = ("stopped", "lost")
_NAME_MIN = 8  # least length of a shortened name, before columns are left out instead
_QUANTILES = (0.5, 0.95)
Number = float | None


@dataclass(frozen=True, slots=True)
class FleetView:
    """The sums over all gateways and routers, with times in seconds and rates per second."""

    requests_per_s: Number
    failed_per_s: Number
    output_tokens_per_s: Number
    open_requests: Number
    queued: Number
    ttft_p50_s: Number
    ttft_p95_s: Number
    itl_p95_s: Number


@dataclass(frozen=True, slots=True)
class PoolView:
    """The replicas of a pool, with figures of KV cache and batch from their engines.

    Attributes:
        kv_max: Share of KV blocks in use by sequences, in the replica with the greatest share.
        batch: Number of sequences in all running batches.
        cached: Share of prompt tokens that were found in prefix caches.
    """

    name: str
    ready: Number
    replicas: Number
    queued: Number
    output_tokens_per_s: Number
    batch: Number
    waiting: Number
    kv_mean: Number
    kv_max: Number
    cached: Number


@dataclass(frozen=True, slots=True)
class RouterView:
    """One router. Its TTFT is measured from its queue to the engine's first token."""

    name: str
    queued: Number
    running: Number
    ttft_p50_s: Number
    ttft_p95_s: Number
    queue_p95_s: Number


@dataclass(frozen=True, slots=True)
class Share:
    """The requests and tokens per second of one tenant or model."""

    name: str
    requests_per_s: Number
    prompt_tokens_per_s: Number
    output_tokens_per_s: Number


@dataclass(frozen=True, slots=True)
class View:
    """The figures of the platform in one interval between two scrapes."""

    took_s: float
    fleet: FleetView
    pools: Sequence[PoolView]
    routers: Sequence[RouterView]
    tenants: Sequence[Share]
    models: Sequence[Share]
    silent: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return the view as JSON values for programs."""
        return asdict(self)


def build(change: ScrapeChange, models: Mapping[str, str] | None = None) -> View:
    """Return the view that two scrapes show.

    Args:
        change: The scrapes.
        models: Names of models, by the first digits of their adapters' digests in metrics.
    """
    return View(
        took_s=change.took_s,
        fleet=_fleet(change),
        pools=_pools(change),
        routers=_routers(change),
        tenants=_tenants(change),
        models=_models(change, models or {}),
        silent=change.after.silent,
    )


def _fleet(change: ScrapeChange) -> FleetView:
    ttft = change.quantiles("llm_ttft_seconds", _QUANTILES).get((), [None, None])
    itl = change.quantiles("llm_itl_seconds", _QUANTILES).get((), [None, None])
    return FleetView(
        requests_per_s=change.rate("llm_e2e_seconds_count"),
        failed_per_s=change.rate("llm_goodput_requests_total", result="failed"),
        output_tokens_per_s=change.rate("router_tokens_total"),
        open_requests=_sum(change, "gateway_open_generations"),
        queued=_sum(change, "router_queue_requests"),
        ttft_p50_s=ttft[0],
        ttft_p95_s=ttft[1],
        itl_p95_s=itl[1],
    )


def _pools(change: ScrapeChange) -> list[PoolView]:
    # Control planes report on all replicas, a router on its own cells, an engine only on itself.
    states = change.gauges("control_plane_replicas_count", "pool", "state")
    queued = change.gauges("llm_queue_depth", "pool")
    kv = _of_engines(change, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="fraction")
    batch = _of_engines(change, "nv_trt_llm_request_metrics", request_type="scheduled")
    waiting = _of_engines(change, "nv_trt_llm_request_metrics", request_type="waiting")
    tokens = change.rates("llm_output_tokens_total", "pool")
    prompt = change.rates("llm_prefix_cache_tokens_total", "pool")
    hits = change.rates("llm_prefix_cache_tokens_total", "pool", result="hit")
    names = {key[0] for found in (states, queued, kv, tokens) for key in found} - {""}
    pools: list[PoolView] = []
    for name in sorted(names):
        counts = {state: max(them) for (pool, state), them in states.items() if pool == name}
        found_kv, computed = kv.get((name,), []), prompt.get((name,), 0.0)
        pools.append(
            PoolView(
                name=name,
                ready=counts.get(_READY),
                replicas=sum(n for state, n in counts.items() if state not in _ENDED)
                if counts
                else None,
                queued=_total(queued.get((name,))),
                output_tokens_per_s=tokens.get((name,)),
                batch=_total(batch.get((name,))),
                waiting=_total(waiting.get((name,))),
                kv_mean=sum(found_kv) / len(found_kv) if found_kv else None,
                kv_max=max(found_kv, default=None),
                cached=hits.get((name,), 0.0) / computed if computed else None,
            )
        )
    return pools


def _of_engines(
    change: ScrapeChange, name: str, **labels: str
) -> dict[tuple[str, ...], list[float]]:
    """Return a value per engine by pool. An engine's value is the largest of its models."""
    found: dict[tuple[str, ...], list[float]] = {}
    for (pool, _), values in change.gauges(name, "pool", INSTANCE, **labels).items():
        found.setdefault((pool,), []).append(max(values))
    return found


def _routers(change: ScrapeChange) -> list[RouterView]:
    queued = change.gauges("router_queue_requests", INSTANCE)
    running = change.gauges("router_running_requests", INSTANCE)
    ttft = change.quantiles("router_ttft_seconds", _QUANTILES, INSTANCE)
    waits = change.quantiles("router_queue_seconds", _QUANTILES, INSTANCE)
    nothing: list[Number] = [None, None]
    return [
        RouterView(
            name=key[0],
            queued=_total(queued.get(key)),
            running=_total(running.get(key)),
            ttft_p50_s=ttft.get(key, nothing)[0],
            ttft_p95_s=ttft.get(key, nothing)[1],
            queue_p95_s=waits.get(key, nothing)[1],
        )
        for key in sorted(queued.keys() | running.keys())
    ]


def _tenants(change: ScrapeChange) -> list[Share]:
    requests = change.rates("gateway_tenant_requests_total", "tenant")
    prompt = change.rates("gateway_tenant_tokens_total", "tenant", kind="prompt")
    output = change.rates("gateway_tenant_tokens_total", "tenant", kind="output")
    shares = [
        Share(key[0], requests.get(key), prompt.get(key), output.get(key))
        for key in requests.keys() | output.keys()
    ]
    return _most(shares, _TENANTS_MAX)


def _models(change: ScrapeChange, names: Mapping[str, str]) -> list[Share]:
    """Return the load of adapters by engines' counts. The rest of a pool's load is its base's."""
    output = change.rates("llm_adapter_tokens_total", "pool", "adapter", kind="output")
    prompt = change.rates("llm_adapter_tokens_total", "pool", "adapter", kind="prompt")
    shares = [
        Share(names.get(adapter, adapter), None, prompt.get((pool, adapter)), rate)
        for (pool, adapter), rate in output.items()
    ]
    for (pool,), rate in change.rates("llm_output_tokens_total", "pool").items():
        of_adapters = sum(it for (its_pool, _), it in output.items() if its_pool == pool)
        shares.append(Share(f"base of {pool or '?'}", None, None, max(0.0, rate - of_adapters)))
    return _most(shares, _MODELS_MAX)


def _most(shares: Sequence[Share], most: int) -> list[Share]:
    return sorted(
        shares, key=lambda it: (-(it.output_tokens_per_s or 0), -(it.requests_per_s or 0), it.name)
    )[:most]


def _sum(change: ScrapeChange, name: str) -> Number:
    return _total(change.gauges(name).get(()))


def _total(values: Sequence[float] | None) -> Number:
    return sum(values) if values else None


# --- text -----------------------------------------------------------------------------------


def lines(view: View, width: int) -> Iterator[str]:
    """Yield lines of at most `width` characters."""
    for line in _all_lines(view, width):
        yield line if len(line) <= width else line[: max(0, width - 1)] + "…"


def _all_lines(view: View, width: int) -> Iterator[str]:
    fleet = view.fleet
    yield (
        f"requests {_rate(fleet.requests_per_s)}/s, failed {_rate(fleet.failed_per_s)}/s; output "
        f"{_rate(fleet.output_tokens_per_s)} tokens/s; open {_count(fleet.open_requests)}, queued "
        f"{_count(fleet.queued)}"
    )
    yield (
        f"TTFT p50 {_time(fleet.ttft_p50_s)}, p95 {_time(fleet.ttft_p95_s)}; ITL p95 "
        f"{_time(fleet.itl_p95_s)}; of the last {view.took_s:.1f} s"
    )
    heads = ("pool", "ready", "queued", "tokens/s", "batch", "waiting", "KV", "KV max", "cached")
    yield from _table(heads, [_pool_cells(it) for it in view.pools], width)
    router_heads = ("router", "queued", "running", "TTFT p50", "TTFT p95", "queue p95")
    yield from _table(router_heads, [_router_cells(it) for it in view.routers], width)
    for what, shares in (("tenant", view.tenants), ("model", view.models)):
        share_heads = (what, "requests/s", "prompt/s", "output/s")
        yield from _table(share_heads, [_share_cells(it) for it in shares], width)
    if view.silent:
        yield ""
        yield from (f"silent: {it}" for it in view.silent)


def _pool_cells(pool: PoolView) -> tuple[str, ...]:
    return (
        pool.name,
        f"{_count(pool.ready)}/{_count(pool.replicas)}",
        _count(pool.queued),
        _rate(pool.output_tokens_per_s),
        _count(pool.batch),
        _count(pool.waiting),
        _percent(pool.kv_mean),
        _percent(pool.kv_max),
        _percent(pool.cached),
    )


def _router_cells(router: RouterView) -> tuple[str, ...]:
    times = (router.ttft_p50_s, router.ttft_p95_s, router.queue_p95_s)
    return (router.name, _count(router.queued), _count(router.running), *map(_time, times))


def _share_cells(share: Share) -> tuple[str, ...]:
    rates = (share.requests_per_s, share.prompt_tokens_per_s, share.output_tokens_per_s)
    return (share.name, *map(_rate, rates))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield a table with a left-aligned first column, whose names are shortened to fit."""
    if not rows:
        return
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    rest = sum(widths[1:]) + 2 * (len(heads) - 1)
    widths[0] = min(widths[0], max(_NAME_MIN, width - rest))
    yield ""
    for row in (heads, *rows):
        name = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
        cells = (f"{cell:>{size}}" for cell, size in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((f"{name:<{widths[0]}}", *cells))


def _count(value: Number) -> str:
    return "-" if value is None else f"{value:.0f}"


def _rate(value: Number) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _percent(value: Number) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _time(value: Number) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
