"""Figures of docs/benchmarks.md that miss their targets, each computed from one result file."""

from benchmarks import figure_texts as texts
from benchmarks.figure_row import FigureRow

MISSED = (
    FigureRow(
        "CPU per streamed token, 500 / 100 streams of 100 tokens",
        "proxy_cpu",
        lambda it: f"{texts.cpu(it, '500_streams')} / {texts.cpu(it, '100_streams')} µs",
        "12 / 20 µs",
    ),
    FigureRow(
        "the same beside the best proxy in Rust; each step wakes router and gateway, for 100"
        " tokens or for one",
        "peers",
        lambda it: " / ".join(
            f"{it['sluice'][load] / min(it[peer][load] for peer in it if 'router' in peer):.2f} x"
            for load in ("us_per_token_500_streams", "us_per_token_100_streams")
        ),
        "0.9 x / 1.2 x",
    ),
    FigureRow(
        "CPU per request of two tokens, 100 / 500 streams",
        "proxy_cpu",
        texts.short,
        "300 µs",
    ),
    FigureRow(
        "calls of functions per request in the gateway, in Python + in C; flat over some 400"
        " functions",
        "request_calls",
        texts.calls,
        "290 + 220",
    ),
    FigureRow(
        "memory of a gateway worker per open stream, 10,000 of them; mostly six nested"
        " coroutines and the objects of the connection",
        "gateway_streams",
        lambda it: f"{it['kib_per_stream']} KiB",
        "10.1 KiB",
    ),
    FigureRow(
        "client CPU of a limit's check, 64 callers at a time",
        "limiter",
        lambda it: f"{it['closed_check_64']['client_us']:.1f} µs",
        "3 µs",
    ),
    FigureRow(
        "CPU of a router without requests, in percent of a core: some 12 signs of life a second, of"
        " an engine, to a gateway and to the control plane",
        "idle",
        lambda it: texts.idle(it, "router"),
        "0.5 %",
    ),
    FigureRow(
        "ITL added at 60 % load, p99; 50, 200, 500 streams",
        "gateway_jitter",
        texts.jitter,
        "3 ms",
    ),
    FigureRow(
        "placing a request among 64 replicas with plain Python, p99",
        "router_core",
        lambda it: texts.per_request(it, 64),
        "100 µs",
    ),
    FigureRow(
        "rules on answers, per token, the first 20,000 tokens of new text",
        "guarding",
        lambda it: f"{it['all']['first_us_per_token']:.0f} µs",
        "2 µs",
    ),
    FigureRow(
        "scaling with sleepers, days with flash crowds: violated minutes, hours over the oracle's",
        "scaling",
        lambda it: texts.scaling(it, "ladder").partition(";")[0],
        "0 min, 1.3 x",
    ),
    FigureRow(
        "500 streams on 8 connections of HTTP/2 against 500 of HTTP/1.1: CPU per token",
        "http2",
        lambda it: f"{it['http2_of_http1']:.2f} x",
        "0.33 x",
    ),
    FigureRow(
        "turn 50 of a chain of 60,000 tokens against turn 2: TTFT with an engine whose steps take"
        " no time",
        "long_chains",
        lambda it: f"{it['ttft_of_turn_2']:.2f} x",
        "1.1 x",
    ),
    FigureRow(
        "requests of 50,000 to 100,000 tokens per second and core of gateway and router, with keys,"
        " limits, a budget and events; new texts / texts of the tenant with a new question",
        "long_requests",
        lambda it: (
            f"{it['new']['requests_per_core_s']:.0f} / {it['again']['requests_per_core_s']:.0f}"
        ),
        "100",
    ),
    FigureRow(
        "50 streams on one WebSocket against 50 connections of SSE: CPU per token",
        "sockets",
        lambda it: f"{it['socket_of_sse']:.2f} x",
        "0.5 x",
    ),
)
