"""Run every benchmark and write benchmarks/results/: `python -m benchmarks.run [NAME ...]`."""

import argparse
import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

MODULES = {
    "gateway": "benchmarks.micro.gateway_paths",
    "request": "benchmarks.micro.request_calls",
    "interpreters": "benchmarks.micro.interpreters",
    "limiter": "benchmarks.micro.limiter",
    "bodies": "benchmarks.micro.bodies",
    "cli_start": "benchmarks.micro.cli_start",
    "directory": "benchmarks.micro.directory",
    "agent_streams": "benchmarks.micro.agent_streams",
    "router": "benchmarks.micro.router_core",
    "index": "benchmarks.micro.router_index",
    "shell": "benchmarks.micro.router_shell",
    "pool_service": "benchmarks.micro.pool_service",
    "events": "benchmarks.micro.event_emit",
    "traces": "benchmarks.micro.trace_queries",
    "pipeline": "benchmarks.load.telemetry_pipeline",
    "share": "benchmarks.load.telemetry_share",
    "month": "benchmarks.micro.trace_month",
    "console": "benchmarks.load.console",
    "sampling": "benchmarks.micro.sampling",
    "scheduler": "benchmarks.micro.engine_scheduler",
    "scaling_plan": "benchmarks.micro.scaling_plan",
    "engine": "benchmarks.engine_alone",
    "memory": "benchmarks.micro.engine_memory",
    "predictions": "benchmarks.micro.predictions",
    "auto": "benchmarks.micro.auto",
    "auto_replay": "benchmarks.micro.auto_replay",
    "auto_judged": "benchmarks.micro.auto_judged",
    "guarding": "benchmarks.micro.guarding",
    "guard_triples": "benchmarks.micro.guard_triples",
    "guard_fence": "benchmarks.micro.guard_fence",
    "host": "benchmarks.micro.engine_host",
    "replica": "benchmarks.load.replica",
    "embed": "benchmarks.load.embed",
    "gateway_embed": "benchmarks.load.gateway_embed",
    "agent": "benchmarks.load.agent_faults",
    "stack": "benchmarks.load.stack",
    "idle": "benchmarks.load.idle",
    "edge": "benchmarks.load.gateway",
    "refused": "benchmarks.load.refused_prompts",
    "sockets": "benchmarks.load.sockets",
    "stored": "benchmarks.load.stored",
    "http2": "benchmarks.load.http2",
    "chains": "benchmarks.micro.chains",
    "long_chains": "benchmarks.load.long_chains",
    "long_requests": "benchmarks.load.long_requests",
    "churn": "benchmarks.load.churn",
    "peers": "benchmarks.load.peers",
    "routing": "benchmarks.load.routing_study",
    "ablation": "benchmarks.load.ablation",
    "rollouts": "benchmarks.load.rollouts",
    "scores": "benchmarks.micro.scores",
    "distribution": "benchmarks.load.distribution",
    "watch": "benchmarks.load.watch",
    "publish": "benchmarks.load.publish",
    "wake": "benchmarks.load.wake",
    "gates": "benchmarks.load.gates",
}


def about(module: str) -> str:
    """Return the module docstring of a benchmark, without running the benchmark."""
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""


def main() -> None:
    """Run the named benchmarks, all by default, each in a process of its own."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Run benchmarks and write benchmarks/results/.",
        epilog="\n\n".join(f"{name}: {about(module)}" for name, module in MODULES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODULES))
    names = parser.parse_args().names
    if unknown := set(names) - MODULES.keys():
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; known: {', '.join(MODULES)}")
    for name in names or MODULES:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", MODULES[name]], check=True)


if __name__ == "__main__":
    main()
