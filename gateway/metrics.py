"""The metrics of the gateway. Their labels have few values and never include models.

Tenants are labels only in `gateway.tenant_series`, which bounds the number of series.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.objectives import OBJECTIVES, ObjectiveResult, Objectives, mean_tpot_s
from gateway.pool_choice import PoolReason
from gateway.tenant_series import TenantSeries, Without
from sluice.certificate_metric import CertificateExpiry
from sluice.errors import ErrorCode

# Upper bounds of the histograms' buckets. TTFT has bounds at the objectives of 0.3 s and 1.5 s.
_TTFT_EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
_TPOT_EDGES_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_ITL_EDGES_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOTAL_EDGES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GATEWAY_EDGES_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_LAG_EDGES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

# Values of other parts that are read at each scrape: name without `_total`, type and help text.
_FOLLOWED = (
    ("gateway_open_generations", "gauge", "Accepted, not ended"),
    ("gateway_open_connections", "gauge", "Connections of clients"),
    ("gateway_open_http2_connections", "gauge", "Of these, the ones over HTTP/2"),
    ("gateway_open_http2_streams", "gauge", "Requests on connections over HTTP/2"),
    ("gateway_http2_floods", "counter", "Connections cut: too many frames that ask for nothing"),
    ("gateway_open_sockets", "gauge", "WebSockets of clients"),
    (
        "gateway_open_background_responses",
        "gauge",
        "Responses that run in the background, or go on after their client has disconnected",
    ),
    ("gateway_body_buffer_bytes", "gauge", "Bytes of request bodies that have not all come"),
    ("gateway_retries_refused", "counter", "Lost answers not tried again: too many were already"),
    ("gateway_open_copies", "gauge", "Copies for shadow stages, and scores of answers, under way"),
    ("gateway_routers_up", "gauge", "Connected routers"),
    ("gateway_embedders_trusted", "gauge", "Replicas of embedding pools that get texts"),
    ("gateway_open_embeddings", "gauge", "Texts that accepted requests may have under way"),
    ("gateway_control_age_seconds", "gauge", "Age of the control state"),
    ("gateway_valkey_up", "gauge", "1 when connected"),
    ("gateway_bases_missing", "gauge", "Bases whose small files are not here yet"),
    ("gateway_limit_local_decisions", "counter", "Reservations decided without Valkey"),
    ("gateway_limit_lost_settlements", "counter", "Settlements that Valkey did not take"),
    ("gateway_events_dropped", "counter", "Request events lost"),
    ("gateway_event_spool_bytes", "gauge", "Request events that wait on disk for the broker"),
    ("gateway_text_events_dropped", "counter", "Redacted texts lost on their way to the broker"),
    ("gateway_responses_kept", "gauge", "1 while responses can be stored"),
    ("gateway_responses_waiting", "gauge", "Stored responses that PostgreSQL does not have yet"),
    ("gateway_text_spool_bytes", "gauge", "Redacted texts that wait on disk for the broker"),
    ("gateway_certificate_stale", "gauge", "1 when newer files of the certificate cannot be used"),
    (
        "gateway_certificate_expiry_seconds",
        "gauge",
        "Until the certificate ends; 0 while clients refuse it, infinite without TLS",
    ),
)
FOLLOWED_NAMES = tuple(name for name, _, _ in _FOLLOWED)


class FastHistogram(Collector):
    """A histogram without a lock, for use on the event loop only.

    An observation costs a bisection and two additions. The library's own histogram acquires a
    lock and costs 1-2 us per observation, which is too much for every token.
    """

    def __init__(self, name: str, documentation: str, edges: Sequence[float]) -> None:
        """Start without observations. `edges` are the buckets' upper bounds in ascending order."""
        self._name = name
        self._documentation = documentation
        self._edges = tuple(edges)
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """Yield the metric family with cumulative buckets, as the exposition format requires."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for edge, count in zip((*self._edges, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if edge == float("inf") else repr(edge), total))
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], buckets, self._sum)
        yield family


class MetricCount:
    """The count of a `FastCounter` for one combination of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to the count."""
        self.value += amount


class FastCounter(Collector):
    """A counter without a lock, for use on the event loop only.

    A request increments five counters. The library's own counter acquires a lock and costs 0.35 us
    per increment, ten times as much as this class.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        """Start without series. `name` must end in `_total`."""
        self._name = name
        self._documentation = documentation
        self._labelnames = labels  # this attribute's name is the library's
        self._counts: dict[tuple[str, ...], MetricCount] = {}

    def labels(self, *values: str) -> MetricCount:
        """Return the series of some label values. Callers store it to avoid further look-ups."""
        return self._counts.setdefault(values, MetricCount())

    def collect(self) -> Iterable[Metric]:
        """Yield the metric family of all series."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, count in self._counts.items():
            family.add_metric(values, count.value)
        yield family


class GatewayMetrics:
    """The metrics of one gateway worker, in a separate registry."""

    def __init__(self, objectives: Objectives = OBJECTIVES) -> None:
        """Declare all metrics. `objectives` define goodput."""
        self._objectives = objectives
        self.registry = CollectorRegistry()
        self.registry.register(CertificateExpiry())
        self.ttft = self._histogram(
            "llm_ttft_seconds", "Request received to first token sent", _TTFT_EDGES_S
        )
        self.tpot = self._histogram(
            "llm_tpot_seconds",
            "Mean time per token after the first, of requests that ended well",
            _TPOT_EDGES_S,
        )
        self.itl = self._histogram(
            "llm_itl_seconds", "Gap between two token frames of a stream", _ITL_EDGES_S
        )
        self.total = self._histogram(
            "llm_e2e_seconds", "Request received to answer complete", _TOTAL_EDGES_S
        )
        self.before_router = self._histogram(
            "gateway_admission_seconds", "Request received to submitted", _GATEWAY_EDGES_S
        )
        self.loop_lag = self._histogram(
            "gateway_loop_lag_seconds",
            "By how much a timer of the event loop is late",
            _LAG_EDGES_S,
        )
        self.scores = Counter(
            "gateway_scores_total",
            "Scores of answers of adapters in rollout by their base and themselves: made, or failed"
            " (engines that score nothing, or have no time)",
            ("fate",),
            registry=self.registry,
        )
        self._declare_requests()
        self._declare_pools()
        self._declare_texts()
        self._declare_goodput()

    def _declare_requests(self) -> None:
        self.requests = self._counter(
            "gateway_requests_total",
            "HTTP requests by endpoint, status and code (outcome or error)",
            ("endpoint", "status", "code"),
        )
        self.tokens = self._counter(
            "gateway_tokens_total",
            "Tokens of accepted requests: prompt, cached (of the prompt) or output",
            ("kind",),
        )
        self.prompt_tokens = self.tokens.labels("prompt")
        self.cached_tokens = self.tokens.labels("cached")
        self.output_tokens = self.tokens.labels("output")
        self.drafts = self._counter(
            "gateway_draft_tokens_total",
            "Tokens that a pool's engines tried ahead of the model: proposed, and of them accepted",
            ("pool", "result"),
        )
        self.resumes = Counter(
            "gateway_resumes_total", "Answers continued elsewhere", registry=self.registry
        )
        self.fallbacks = Counter(
            "gateway_fallbacks_total",
            "Requests passed to the model that stands in for a saturated one",
            registry=self.registry,
        )
        self.auto = Counter(
            "gateway_auto_requests_total",
            "Requests for `auto`, by why its model answered",
            ["reason"],
            registry=self.registry,
        )
        self.decided = Counter(
            "gateway_rollout_requests_total",
            "Accepted requests whose release a rollout (control, canary) or a pin (pinned) chose,"
            " or would have, were it served (unserved), its base here (unready: to control) or its"
            " adapter one that engines load (unloaded: to control)",
            ("arm",),
            registry=self.registry,
        )
        self.base_fetches = Counter(
            "gateway_base_fetches_total",
            "Tries to get the small files of a base from the control plane: fetched or failed",
            ("result",),
            registry=self.registry,
        )
        self.copies = Counter(
            "gateway_copies_total",
            "Copies of requests for a shadow stage: sent, or dropped because too many were under"
            " way",
            ("fate",),
            registry=self.registry,
        )

    def _declare_pools(self) -> None:
        self.pool_choices = self._counter(
            "gateway_pool_choices_total",
            "Requests for models of several pools, by their pool and its reason: home or away (of a"
            " session), wait (no session), move (it waited elsewhere), wake, none (no pool serves)",
            ("pool", "reason"),
        )
        self.gate_refusals = Counter(
            "gateway_gate_refusals_total",
            "Requests refused before any work, because routers have no room for their tier, or"
            " embedding replicas have no place",
            registry=self.registry,
        )

    def _declare_texts(self) -> None:
        self.guard_matches = Counter(
            "gateway_guard_matches_total",
            "Places in texts of requests and answers that rules of tenants match, of rules that act"
            " (acting) and of those that are counted alone (shadow)",
            ("stage",),
            registry=self.registry,
        )
        self.classifier_texts = Counter(
            "gateway_classifier_texts_total",
            "Texts for classifiers of the operator's file: judged, failed (no usable answer), late,"
            " or refused (too many waited, or the classifier had just failed)",
            ("classifier", "result"),
            registry=self.registry,
        )
        self.texts = Counter(
            "gateway_texts_total",
            "Texts of requests of tenants that opted in: kept (redacted and on their way), or"
            " dropped because too many waited (full), they could not be made ready (failed), or the"
            " worker stopped",
            ("fate",),
            registry=self.registry,
        )

    def _declare_goodput(self) -> None:
        goodput = self._counter(
            "llm_goodput_requests_total",
            "Accepted requests by what they came to: good, ttft_missed, tpot_missed or failed;"
            " without those that their callers ended or got wrong",
            ("result",),
        )
        self._goodput = {result: goodput.labels(result.value) for result in ObjectiveResult}
        self.aborts = Counter(
            "llm_request_aborts_total",
            "Accepted requests that ended without their whole answer, by code",
            ("code",),
            registry=self.registry,
        )
        self.tenants = TenantSeries()
        self.registry.register(self.tenants)

    def pool_chosen(self, pool_id: str, reason: PoolReason) -> None:
        """Count the choice of a pool for a model that several pools serve."""
        self.pool_choices.labels(pool_id, reason.value).inc()

    def ended(
        self,
        tenant_id: str,
        code: str,
        *,
        ttft_s: float,
        decode_s: float,
        prefill_s: float,
        prompt_tokens: int,
        output_tokens: int,
        answers: int,
    ) -> None:
        """Count an accepted text request that has ended.

        Args:
            tenant_id: Tenant of the request.
            code: Error code, or empty if the request was successful.
            ttft_s: Seconds from the arrival to the first token.
            decode_s: Seconds from the first token to the end.
            prefill_s: Prefill time in seconds, as the engine measured it.
            prompt_tokens: Tokens of all prompts.
            output_tokens: Tokens of all answers.
            answers: Number of requested answers.
        """
        if code:
            self.aborts.labels(code).inc()
            result = ObjectiveResult.FAILED if ErrorCode(code).policy.status >= 500 else None
        else:
            tpot_s = mean_tpot_s(decode_s, output_tokens, answers)
            if tpot_s:
                self.tpot.observe(tpot_s)
            result = self._objectives.result(ttft_s, prompt_tokens, prefill_s, tpot_s)
        if result is not None:
            self._goodput[result].inc()
        self.tenants.count(tenant_id, result, prompt_tokens, output_tokens)

    def follow(self, read: Mapping[str, Callable[[], float]]) -> None:
        """Read the values of `_FOLLOWED` at each scrape. `read` has a function for each name."""
        assert read.keys() == set(FOLLOWED_NAMES), read.keys() ^ set(FOLLOWED_NAMES)
        for name, kind, text in _FOLLOWED:
            self.registry.register(_ReadMetric(name, kind, text, read[name]))

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def public_page(self) -> bytes:
        """Return the metrics without those that name tenants, for readers without a key."""
        return generate_latest(Without(self.tenants, self.registry))

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> FastCounter:
        counter = FastCounter(name, text, labels)
        self.registry.register(counter)
        return counter

    def _histogram(self, name: str, text: str, edges: Sequence[float]) -> FastHistogram:
        histogram = FastHistogram(name, text, edges)
        self.registry.register(histogram)
        return histogram


class _ReadMetric(Collector):
    def __init__(self, name: str, kind: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._kind, self._text, self._read = name, kind, text, read

    def describe(self) -> Iterable[Metric]:
        yield Metric(self._name, self._text, self._kind)

    def collect(self) -> Iterable[Metric]:
        family = Metric(self._name, self._text, self._kind)
        suffix = "_total" if self._kind == "counter" else ""
        family.add_sample(self._name + suffix, {}, self._read())
        yield family
