"""Figures of docs/benchmarks.md, each computed from one result file.

No figure is written by hand, so the page always agrees with the result files.
"""

from statistics import median

from benchmarks import figure_texts as texts
from benchmarks.figure_row import FigureRow
from benchmarks.missed_targets import MISSED

_DATA_PLANE = (
    FigureRow(
        "CPU of gateway and router per streamed token; 500 / 100 streams of 100 tokens; keys,"
        " limits, tokenizing and"
        " events on",
        "proxy_cpu",
        lambda it: f"{texts.cpu(it, '500_streams')} / {texts.cpu(it, '100_streams')} µs",
    ),
    FigureRow(
        "the same, 500 streams of 1,000 tokens",
        "proxy_cpu",
        lambda it: f"{texts.cpu(it, '500_long_streams')} µs",
    ),
    FigureRow(
        "CPU of gateway and router per request of two tokens, 100 / 500 streams",
        "proxy_cpu",
        texts.short,
    ),
    FigureRow(
        "beside other proxies in turns, engine steps of 20 ms: CPU per token of 500 / 100"
        " streams, per request of two"
        " tokens; Sluice with everything on",
        "peers",
        lambda it: texts.peer(it, "sluice"),
    ),
    *(
        FigureRow(
            f"{name}, which passes on what it gets",
            "peers",
            lambda it, n=key: texts.peer(it, n),
        )
        for name, key in (
            ("smg 1.13", "smg"),
            ("sglang-router 0.3.2", "sglang-router"),
            ("vllm-router 0.1.17", "vllm-router"),
        )
    ),
    FigureRow(
        "the same with the compiled core of the router, over vllm-router in one run: per token of"
        " 500 / 100 streams, per request",
        "peers_compiled",
        texts.compiled,
    ),
    FigureRow(
        "CPU of the gateway per request of two tokens; of a program that streams the same with"
        " aiohttp alone",
        "request_calls",
        lambda it: f"{it['cpu_us']:.0f}; {it['aiohttp_us']:.0f} µs",
    ),
    FigureRow(
        "CPU of the gateway on other versions of Python over that on 3.11: per request / per token",
        "interpreters",
        texts.interpreters,
    ),
    FigureRow(
        "the engine's scheduler, compiled over plain: step of 256 / 16 decoding sequences, request,"
        " request with drafts; plain",
        "engine_scheduler",
        texts.scheduler,
    ),
    FigureRow(
        "the gateway's own work per streamed token, without the `send()`",
        "gateway_paths",
        lambda it: f"{it['token_us']:.1f} µs",
    ),
    FigureRow(
        "whole answers of one token, one worker, 64 connections: per second; CPU of gateway /"
        " router per request",
        "gateway_unary",
        lambda it: (
            f"{it['requests_per_s']:,}/s; {it['cpu_us_per_request']['gateway']} /"
            f" {it['cpu_us_per_request']['router']} µs"
        ),
    ),
    FigureRow(
        "TTFT that gateway and router add to an engine whose steps take no time, p50 / p99, best"
        " of three rounds",
        "gateway_ttft",
        lambda it: f"{it['added_ms']['p50']:.1f} / {it['added_ms']['p99']:.1f} ms",
    ),
    FigureRow(
        "client CPU of a limit's check, at 5,000 checks a second that arrive at random",
        "limiter",
        lambda it: f"{it['open_check']['client_us']:.1f} µs",
    ),
    FigureRow(
        "turn 50 of a chain of 50,000 tokens against turn 2: CPU of the gateway",
        "chains",
        texts.chains,
    ),
    FigureRow(
        "turn 50 of a chain of 60,000 tokens against turn 2: TTFT that gateway and router add to an"
        " engine whose steps take no time",
        "long_chains",
        lambda it: f"{it['added_of_turn_2']:.2f} x",
    ),
    FigureRow(
        "a stored response against a chat completion of the same 100 tokens: CPU of gateway and"
        " router",
        "stored",
        lambda it: f"{it['stored_of_chat']:.2f} x",
    ),
    FigureRow(
        "turn 50 of 50,000 tokens at a worker that has not seen the chain: without / with stored"
        " tokens",
        "chains",
        texts.chains_elsewhere,
    ),
    FigureRow(
        "chat with a tool, p50: alone / beside refused prompts of 4 MB over 3 connections",
        "refused_prompts",
        lambda it: (
            " / ".join(f"{it[on]['chat']['p50_ms']:.0f}" for on in ("alone", "beside")) + " ms"
        ),
    ),
    FigureRow(
        "TTFT p99 on a machine without a free core: alone / beside two prompts of 220 KB per"
        " second / beside the same"
        " prompts sent straight to the engine",
        "gateway_prompts",
        lambda it: (
            " / ".join(
                f"{it[part]['ttft_ms']['p99']:.0f}"
                for part in ("alone", "beside_gateway", "beside_engine")
            )
            + " ms"
        ),
    ),
    FigureRow(
        "memory of a gateway worker per open stream, 10,000 of them",
        "gateway_streams",
        lambda it: f"{it['kib_per_stream']} KiB",
    ),
    FigureRow(
        "10,000 streams, 50 of which come and go per second, for an hour: the worker after a"
        " minute / in the last ten",
        "gateway_soak",
        lambda it: (
            f"{it['mib'][0]:.0f} / {min(it['mib'][-10:]):.0f}-{max(it['mib'][-10:]):.0f} MiB"
        ),
    ),
    FigureRow(
        "an event on a request's way: its part for the router, the event, handing it over",
        "event_emit",
        lambda it: f"{it['request_path']['sum_us']:.1f} µs",
    ),
    FigureRow(
        "rules on answers, 200 expressions, 20,000 words and the named sets, per token: known"
        " text / new text / the"
        " first texts",
        "guarding",
        lambda it: (
            f"{it['all']['known_us_per_token']:.1f} / {it['all']['last_us_per_token']:.1f} /"
            f" {it['all']['first_us_per_token']:.0f} µs"
        ),
    ),
    FigureRow(
        "classifier behind a sentence fence, 100 answers at once: wait for a verdict, p50 / p99",
        "guard_fence",
        lambda it: (
            f"{it['sentence']['delay_p50_ms']:.1f} / {it['sentence']['delay_p99_ms']:.1f} ms"
        ),
    ),
    FigureRow(
        "random rules, texts and cuttings: triples; leaks and differences",
        "guard_triples",
        lambda it: f"{it['triples']:,}; {it['wrong'] + it['different']}",
    ),
    FigureRow("`auto`: CPU of a decision, question / talk of 8 kB / of 400 kB", "auto", texts.auto),
    FigureRow(
        "a sample of RouteLLM's judgements: cost at 95 % of GPT-4's accuracy against GPT-4 alone,"
        " with 95 % intervals; `auto`; kNN; random mix; calibration error of `auto`",
        "auto_judged",
        texts.auto_judged,
    ),
)
_ENGINES = (
    FigureRow(
        "64 streams on the OpenVINO engine, through everything against the engine alone, medians"
        " of tokens/s",
        "through_everything",
        lambda it: (
            f"{median(it['tokens_per_s_through']):,.0f} of"
            f" {median(it['tokens_per_s_alone']):,.0f}: {100 * it['ratio_of_medians']:.0f} %"
        ),
    ),
    FigureRow(
        "the CPU engine behind Triton and step frames against the engine alone; 1, 8, 32, 256"
        " sequences",
        "replica",
        texts.served,
    ),
    FigureRow(
        "the simulated engine through Triton, 1,000 sequences, steps that take no time",
        "replica",
        lambda it: f"{it['figures']['sim']['served_tok_s']:,} tokens/s",
    ),
    FigureRow(
        "TTFT of 1,024 tokens on the CPU engine, nothing cached / 1,000 cached",
        "replica",
        lambda it: (
            f"{it['figures']['served']['ttft_1024']['cold_ms']:.0f} /"
            f" {it['figures']['served']['ttft_1024']['cached_1000_ms']:.0f} ms"
        ),
    ),
    FigureRow(
        "32 sequences: base and three adapters mixed against the base alone",
        "replica",
        lambda it: f"{100 * it['figures']['adapters']['ratio']:.0f} % of the tokens/s",
    ),
    FigureRow(
        "an adapter from disk to its first token: the first of an engine, which compiles its"
        " graph / the next",
        "replica",
        lambda it: (
            f"{it['figures']['adapters']['hot_add_first_token_ms'][0]:.0f} /"
            f" {median(it['figures']['adapters']['hot_add_first_token_ms'][1:]):.0f} ms"
        ),
    ),
    FigureRow(
        "CPU of both scores of an answer while an adapter is rolled out, CPU engine",
        "scores",
        texts.scores,
    ),
)
_ROUTING = (
    FigureRow(
        "simulated, conversation trace, 8 replicas of a 70B model, load 0.95 / 1.05: goodput of"
        " Sluice; of the best"
        " tuned peer; bound",
        "routing_study",
        texts.goodputs,
    ),
    FigureRow(
        "the same trace, 64 replicas in one cell / in eight cells, load 0.95",
        "routing_study",
        lambda it: " / ".join(
            f"{it['cases'][case][0]['goodput_mean']:.3f}" for case in ("cells-1", "cells-8")
        ),
    ),
    FigureRow(
        "placing a request among 64 replicas, plain Python",
        "router_core",
        lambda it: texts.per_request(it, 64),
    ),
    FigureRow(
        "the same with the compiled core of images",
        "router_core_compiled",
        lambda it: texts.per_request(it, 64),
    ),
    FigureRow(
        "the gateway's loop later than 5 ms beside prompts of 220 KB",
        "gateway_prompts",
        texts.late_looks,
    ),
    FigureRow(
        "simulated faults, 8 replicas: requests lost and doubled; longest pause of a stream when"
        " one is killed /"
        " frozen",
        "router_faults",
        lambda it: (
            f"{sum(plan['lost'] + plan['duplicated'] for plan in it['plans'].values())};"
            f" {it['plans']['kill']['pause_max_s']:.2f} /"
            f" {it['plans']['freeze']['pause_max_s']:.2f} s"
        ),
    ),
    FigureRow(
        "scaling, fluid model, days with flash crowds: violated minutes, hours over the oracle's;"
        " Sluice; Kubernetes'"
        " HPA",
        "scaling",
        lambda it: texts.scaling(it, "plain"),
    ),
)
_OPERATION = (
    FigureRow(
        "`sluice up`, everything installed, empty home: first token",
        "stack_start",
        lambda it: f"{it['seconds_to_first_token']} s",
    ),
    FigureRow(
        "memory of the whole stack, both Tritons and models included",
        "stack_start",
        lambda it: f"{it['memory_total_mib'] / 1024:.2f} GiB",
    ),
    FigureRow(
        "CPU of a stack without requests, in percent of a core: gateway, router, control plane,"
        " agent, telemetry",
        "idle",
        lambda it: texts.idle(it, "gateway", "router", "control-plane", "agent", "telemetry"),
    ),
    FigureRow(
        "CPU of `sluice --help`; of a list of tenants; of an interpreter that does nothing",
        "cli_start",
        lambda it: f"{it['ms']['--help']}; {it['ms']['tenants list']}; {it['ms']['bare']} ms",
    ),
    FigureRow(
        "an engine frozen while ready: noticed / another one ready, medians of five",
        "agent_faults",
        lambda it: (
            f"{it['sim']['frozen']['detected_s']['median']:.1f} /"
            f" {it['sim']['frozen']['ready_s']['median']:.1f} s"
        ),
    ),
    FigureRow(
        "clients hang up: until the engine's metrics show no KV block in use, which they do every"
        " 0.25 s",
        "cancel",
        lambda it: f"{it['worst_s']:.2f} s",
    ),
    FigureRow(
        "a new adapter on a local stack, from the start of `sluice models publish` to its first"
        " token, median / worst"
        " of five",
        "publish",
        lambda it: (
            f"{it['promoted']['first_token_s']['median']:.1f} /"
            f" {it['promoted']['first_token_s']['max']:.1f} s"
        ),
    ),
    FigureRow(
        "the first request to a pool that sleeps as a whole: its first token, median / worst of"
        " twelve, engine `openvino`; `sim`",
        "wake",
        lambda it: f"{texts.woken(it, 'openvino')}; {texts.woken(it, 'sim')} s",
    ),
    FigureRow(
        "a router is saturated: until the last of three gateways refuses the lowest tier itself,"
        " p50 / p99 of bursts",
        "gates",
        lambda it: f"{it['all_gateways_ms']['p50']:.0f} / {it['all_gateways_ms']['p99']:.0f} ms",
    ),
    FigureRow(
        "10,000 models, 50,000 tenants, 200,000 keys: a watcher's first snapshot; a change at"
        " each of 500 watchers of"
        " one control plane, p50 / p99",
        "watch",
        lambda it: (
            f"{it['first_snapshot_s']['median']:.1f} s; {it['change_at_a_watcher_ms']['p50']:.0f} /"
            f" {it['change_at_a_watcher_ms']['p99']:.0f} ms"
        ),
    ),
    FigureRow(
        "simulated, 10 Gbit/s links: a 100 MB adapter on the last of 1,000 nodes; a 140 GB base"
        " on the last of 200",
        "distribution",
        lambda it: f"{texts.last_s(it, 'adapter')}; {texts.last_s(it, 'base')}",
    ),
    FigureRow(
        "a tenant's month of usage among 50 million requests, p99 of a query",
        "trace_month",
        texts.month,
    ),
    FigureRow(
        "ten minutes of 200 turns per second while gateway, control plane, Valkey and PostgreSQL"
        " are killed once each: stored responses that were lost",
        "churn",
        lambda it: f"{it['lost']} of {it['turns']['stored']:,}",
    ),
    FigureRow(
        "the console over 50 million requests: longest wait for a page, p50; CPU of the control"
        " plane for 20 viewers of the live feed",
        "console",
        texts.console,
    ),
    FigureRow(
        "simulated: requests that wait for a read of their adapter; 500 adapters on 16 replicas"
        " after a start, 10,000 on 64",
        "adapters",
        texts.adapters,
    ),
    FigureRow(
        "simulated: a day of a fleet of 5,000 accelerators at up to 100,000 requests/s: goodput;"
        " violated pool minutes of all; paid over demanded accelerator hours",
        "fleet",
        texts.fleet,
    ),
    FigureRow(
        "simulated rollouts: identical releases sent back; bad ones of ten kinds sent back",
        "rollouts",
        texts.rollouts,
    ),
    FigureRow(
        "`docker compose up` with images built, stand-ins for servers of others: first answer",
        "compose",
        lambda it: f"{it['start']['first_answer_s']:.0f} s",
    ),
    FigureRow(
        "the same, each container restarted in turn under 32 streams: requests that failed",
        "compose",
        lambda it: f"{it['rolling_restart']['failed']} of {it['rolling_restart']['requests']:,}",
    ),
    FigureRow(
        "image of gateways and routers, unpacked / packed",
        "compose",
        lambda it: (
            f"{it['images']['sluice-edge:check']['unpacked_mb']:.0f} /"
            f" {it['images']['sluice-edge:check']['packed_mb']:.0f} MB"
        ),
    ),
)
GROUPS = (
    ("The data plane", _DATA_PLANE),
    ("Engines", _ENGINES),
    ("Routing and scaling", _ROUTING),
    ("Operation", _OPERATION),
    ("Targets that are not met", MISSED),
)
