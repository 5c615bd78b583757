"""Texts of those figures of docs/benchmarks.md that combine several values of a result file."""

from statistics import mean
from typing import Any

Result = dict[str, Any]


def plans(result: Result, part: str, policy: str) -> tuple[float, float]:
    """Return a policy's mean violated minutes of a day, and its multiple of the oracle's hours."""
    rows = [it for it in result[part] if it["demand"].startswith("diurnal24")]

    def of(name: str, figure: str) -> float:
        return mean(it[figure] for it in rows if it["policy"] == name)

    return of(policy, "violation_minutes"), of(policy, "gpu_hours") / of("oracle", "gpu_hours")


def scaling(result: Result, part: str) -> str:
    pairs = [plans(result, part, policy) for policy in ("sluice", "hpa")]
    return "; ".join(f"{minutes:.1f} min, {hours:.2f} x" for minutes, hours in pairs)


def idle(result: Result, *names: str) -> str:
    """Return the percent of a core that processes use without requests."""
    return ", ".join(f"{result['processes'][it]['core_percent']:.1f}" for it in names) + " %"


def goodput(result: Result, policy: str, load: float) -> str:
    rows = result["cases"]["conversation-8"]
    found = (it for it in rows if it["policy"] == policy and it["load"] == load)
    return f"{next(found)['goodput_mean']:.3f}"


def goodputs(result: Result) -> str:
    policies = "sluice", "dynamo_best", "oracle"
    pairs = ([goodput(result, policy, load) for load in (0.95, 1.05)] for policy in policies)
    return "; ".join(" / ".join(pair) for pair in pairs)


def last_s(result: Result, run: str) -> str:
    figures = result["runs"][run]["figures"]
    return f"{mean(it['last_s'] for it in figures):.1f} s (bound {figures[0]['bound_s']:.1f})"


def rollouts(result: Result) -> str:
    rows = {it["scenario"]: it for it in result["scenarios"]}
    bad = [it for name, it in rows.items() if name not in ("identical", "better")]

    def of(*scenarios: Result) -> str:
        back = sum(it["rolled_back"] for it in scenarios)
        return f"{back} of {sum(it['rollouts'] for it in scenarios)}"

    return f"{of(rows['identical'])}; {of(*bad)}"


def jitter(result: Result) -> str:
    streams = [result[f"{count}_streams"] for count in (50, 200, 500)]
    return ", ".join(f"{it['added_p99_ms']:.1f}" for it in streams) + " ms"


def peer(result: Result, name: str) -> str:
    row = result[name]
    tokens = f"{row['us_per_token_500_streams']:.1f} / {row['us_per_token_100_streams']:.1f}"
    return f"{tokens} µs, {row['us_per_request_of_two_tokens']:.0f} µs"


def late_looks(result: Result) -> str:
    counts = dict(line.rsplit(" ", 1) for line in result["loop_lag"])
    within, all_looks = (
        float(counts[f'gateway_loop_lag_seconds_bucket{{le="{edge}"}}'])
        for edge in ("0.005", "+Inf")
    )
    return f"{all_looks - within:.0f} of {all_looks:.0f} looks"


def calls(result: Result) -> str:
    every = result["per_request"]["all"]
    return f"{every['python']:.0f} + {every['c']:.0f}"


def fleet(result: Result) -> str:
    days = result["days"]
    late, of_all = (
        mean(it[figure] for it in days)
        for figure in ("violated_pool_minutes", "violated_pool_minutes_share")
    )
    hours = mean(it["gpu_hours"] / it["gpu_hours_of_demand"] for it in days)
    goodput = mean(it["goodput"] for it in days)
    return f"{goodput:.4f}; {late:.0f} ({of_all:.2%}); {hours:.2f} x"


def compiled(result: Result) -> str:
    loads = "token_500_streams", "token_100_streams", "request_of_two_tokens"
    names = [f"us_per_{load}" for load in loads]
    ratios = (result["sluice"][name] / result["vllm-router"][name] for name in names)
    return " / ".join(f"{ratio:.2f}" for ratio in ratios) + " x"


def scheduler(result: Result) -> str:
    ratios = " / ".join(f"{it:.2f}" for it in result["of_plain"].values())
    plain = " / ".join(f"{it:.0f}" for it in result["plain"].values())
    return f"{ratios} x; {plain} µs"


def interpreters(result: Result) -> str:
    request, token = result["request"], result["token"]
    return "; ".join(
        f"{version} {request[version]['of_first']:.2f} / {token[version]['of_first']:.2f} x"
        for version in list(request)[1:]
    )


def per_request(result: Result, replicas: int) -> str:
    rows = (it for it in result["per_request"] if it["replicas"] == replicas)
    row = next(it for it in rows if not it["decoding"])
    return f"p50 {row['p50_us']:.0f}, p99 {row['p99_us']:.0f} µs"


def served(result: Result) -> str:
    rows = result["figures"]["served"]["sequences"]
    return ", ".join(f"{100 * rows[count]['ratio']:.0f} %" for count in ("1", "8", "32", "256"))


def woken(result: Result, engine: str) -> str:
    """Return the seconds from the first request to a sleeping pool to its first token."""
    first = result[engine]["asleep"]["first_token_s"]
    return f"{first['median']:.1f} / {first['max']:.1f}"


def month(result: Result) -> str:
    worst = [it["p99_ms"] for it in result["with_rollups"].values()]
    return f"{min(worst):.0f}-{max(worst):.0f} ms"


def console(result: Result) -> str:
    longest = max(it["wall_p50_ms"] for it in result["pages"].values())
    return f"{longest:.0f} ms; {result['live']['core_percent_of_twenty']:.1f} % of a core"


def adapters(result: Result) -> str:
    def share(adapters: int) -> str:
        planned = [it for it in result["cases"] if it["is_planned"] and not it["is_shifted"]]
        [found] = [it["read_share"] for it in planned if it["adapters"] == adapters]
        return f"{100 * found:.1f} %"

    return f"{share(500)}; {share(10_000)}"


def scores(result: Result) -> str:
    ratios = [it["both_of_answer"] for it in result["shapes"]]
    return f"{min(ratios):.2f}-{max(ratios):.2f} of the answer's"


def auto(result: Result) -> str:
    times = (result[f"{name}_us"] for name in ("question", "talk", "session"))
    return " / ".join(f"{it / 1000:.2f}" for it in times) + " ms"


def auto_judged(result: Result) -> str:
    """Return cost and calibration of `auto` on public judgements, MMLU and GSM8K together."""
    both = result["both"]
    costs = both["cost_at_95_percent"]
    shown = (costs[name] for name in ("auto", "knn_words", "random"))
    cost = "; ".join(f"{mean:.2f} ({low:.2f}-{high:.2f})" for mean, low, high in shown)
    error, chance = both["calibration_error"]["auto"][0], both["calibration_error_by_chance"]
    return f"{cost}; {100 * error:.1f}, by chance {100 * chance:.1f} points"


def chains_elsewhere(result: Result) -> str:
    times = (result[name]["total_us"] for name in ("other_worker_renders", "other_worker"))
    return " / ".join(f"{it / 1000:.0f}" for it in times) + " ms"


def chains(result: Result) -> str:
    return f"{result['turn_50']['total_us'] / result['turn_2']['total_us']:.1f} x"


def cpu(result: Result, load: str, figure: str = "cpu_us_per_token_total") -> str:
    return f"{result[load][figure]:.1f}"


def short(result: Result) -> str:
    """Return the CPU time of a request with two tokens, including the CPU time of these tokens."""
    loads = (result[f"{count}_short_streams"] for count in (100, 500))
    per_request = [sum(it["cpu_s"].values()) / it["requests"] * 1e6 for it in loads]
    return " / ".join(f"{it:.0f}" for it in per_request) + " µs"
