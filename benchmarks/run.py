"""Run every benchmark and write benchmarks/results/: `python -m benchmarks.run [NAME ...]`."""

import subprocess
import sys

MODULES = {
    "router": "benchmarks.micro.router_core",
    "events": "benchmarks.micro.event_emit",
    "engine": "benchmarks.engine_alone",
    "stack": "benchmarks.load.stack",
}


def main() -> None:
    """Run the named benchmarks, all by default, each in a process of its own."""
    unknown = set(sys.argv[1:]) - MODULES.keys()
    if unknown:
        raise SystemExit(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(MODULES)}")
    for name in sys.argv[1:] or MODULES:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", MODULES[name]], check=True)


if __name__ == "__main__":
    main()
