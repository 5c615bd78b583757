"""Tenants that have series of their own: few, and nothing is missed by whoever scrapes, and when."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.objectives import ObjectiveResult
from gateway.tenant_series import OTHER, TenantSeries


class Site:
    """Two named tenants at most, a clock, and scrapers that read as Prometheus does."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.series = TenantSeries(named_max=2, clock=lambda: self.now_s)

    def use(self, tenant: str, tokens: int) -> None:
        self.series.count(tenant, ObjectiveResult.GOOD, tokens, 0)

    def values(self) -> dict[tuple[str, str], float]:
        samples = [sample for family in self.series.collect() for sample in family.samples]
        found = {tuple(sample.labels.values()): sample.value for sample in samples}
        assert len(found) == len(samples)
        return found

    def after(self, seconds: float) -> dict[tuple[str, str], float]:
        """Return the last values, with a look every 15 s."""
        self.values()
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 15)
            self.values()
        return self.values()


def named(values: dict[tuple[str, str], float]) -> set[str]:
    return {tenant for tenant, _ in values}


def test_the_busiest_tenants_have_names() -> None:
    site = Site()
    for tenant, tokens in (("a", 10), ("b", 200), ("c", 300)):
        site.use(tenant, tokens)
    first = site.values()
    assert named(first) == {"b", "c", OTHER}
    assert first["b", "prompt"] == first["c", "good"] == 0
    site.use("c", 5)  # not everybody has seen its 0 yet
    begun = site.after(30)
    assert (begun["c", "prompt"], begun[OTHER, "prompt"]) == (0, 515)
    site.use("c", 7)
    assert site.values()["c", "prompt"] == 7
    for _ in range(50):
        site.use("a", 100)
    changed = site.after(15)
    assert changed[OTHER, "prompt"] == 5515
    assert named(changed) == {"a", "b", "c", OTHER}
    site.use("a", 1)
    assert site.after(30)["a", "prompt"] == 0
    site.use("a", 1)
    last = site.after(300)
    assert named(last) == {"a", "c", OTHER}  # what was b's is shown no more
    assert last["a", "prompt"] == 1


def test_a_series_that_is_still_shown_goes_on_when_its_tenant_is_back() -> None:
    site = Site()
    site.use("a", 100)
    site.use("b", 200)
    site.after(30)
    site.use("a", 10)
    site.use("c", 5000)
    assert named(site.after(15)) == {"a", "b", "c", OTHER}
    site.use("a", 50_000)  # into `other`
    assert site.after(15)["a", "prompt"] == 10
    site.use("a", 1)
    assert site.values()["a", "prompt"] == 11


def test_looks_change_nothing_before_it_is_time() -> None:
    site = Site()
    site.values()
    site.use("a", 100)
    assert named(site.values()) == named(site.values()) == {OTHER}
    assert named(site.after(15)) == {"a", OTHER}


def test_a_tenant_named_other_has_a_series_of_its_own() -> None:
    site = Site()
    site.use("other", 5)
    site.use("_other", 5)
    site.after(30)
    site.use("other", 1)
    site.use("_other", 2)
    found = site.values()
    told = (found[OTHER, "prompt"], found["_other", "prompt"], found["__other", "prompt"])
    assert told == (10, 1, 2)
    registry = CollectorRegistry()
    registry.register(site.series)
    lines = [line.rpartition(b" ")[0] for line in generate_latest(registry).splitlines()]
    assert Counter(line for line in lines if b"{" in line).most_common(1)[0][1] == 1


_USES = st.tuples(st.sampled_from(["a", "b", "c", "d", OTHER]), st.integers(0, 999))
_PASSES = st.floats(0.1, 14.0)
_SCRAPES = st.sampled_from(["first", "second"])


@given(st.lists(_USES | _PASSES | _SCRAPES, max_size=150), st.floats(14.0, 29.0))
def test_increases_of_all_series_equal_the_count(steps: list[object], apart_s: float) -> None:
    """Whoever looks, at any time, but at least every 30 s."""
    site, total = Site(), 0
    seen: dict[str, dict[tuple[str, str], float]] = {}
    looked_s = dict.fromkeys(("first", "second"), 0.0)
    increases, began = Counter[str](), dict[str, int]()

    def look(who: str) -> None:
        now = {key: value for key, value in site.values().items() if key[1] == "prompt"}
        assert len(now) <= 5
        if who not in seen:
            began[who] = total
        for key, value in now.items():
            last = seen.get(who, {}).get(key)
            if last is not None:  # the first sample of a series is no increase
                increases[who] += int(value - last if value >= last else value)
        seen[who], looked_s[who] = now, site.now_s
        assert increases[who] == total - began[who]

    for step in steps:
        match step:
            case float():
                site.now_s += step
                for who, at_s in looked_s.items():
                    if site.now_s - at_s > apart_s - 14.0:
                        look(who)
            case str():
                look(step)
            case (str(tenant), int(tokens)):
                site.use(tenant, tokens)
                total += tokens
