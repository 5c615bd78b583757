"""Measures the time from an adapter in a directory to its first token, on a local stack.

One operation is `sluice models publish` of a directory with an adapter that is new to all nodes
(upload, checks, release). Then a streamed chat request is repeated until the gateway accepts the
model's name. The time ends at the first token of the accepted answer, whose text must show the
adapter's style. In `promoted`, the model is pointed at the version, so nodes may load the adapter
before the request. In `asked_for_first`, no model points at the version, so the first request that
names it waits until the adapter is loaded. The time includes the start of the command's Python
process. Not measured: a network, other nodes, large adapters (the shipped one has 0.1 MB).
Run: `python -m benchmarks.load.publish`.
"""

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import environ
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine_alone import SHIPPED_BASE
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.results import write_result

ROUNDS = 5
_MARK = "matey"  # a word in most answers of the shipped adapter `pirate`
_QUESTION = "Who are you?"
_PATIENCE_S = 60.0
_ADAPTER = SHIPPED_BASE.parent / "adapters" / "pirate"


@dataclass(frozen=True, slots=True)
class Round:
    """The times of one publication, in seconds since the command began.

    Attributes:
        published_s: Seconds until the command has ended.
        known_s: Seconds until the gateway accepted a request with the name.
        first_token_s: Seconds until the first token.
        command_cpu_s: CPU seconds of the command alone.
    """

    published_s: float
    known_s: float
    first_token_s: float
    command_cpu_s: float


def _sluice(stack: BenchmarkStack, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        env={**environ, "SLUICE_HOME": str(stack.home)},
        check=True,
        capture_output=True,
        timeout=_PATIENCE_S,
    )


def _time_request(client: httpx.Client, model: str) -> tuple[float, float]:
    """Return the times when the accepted request was sent and when its first token arrived."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": 60,
        "stream": True,
    }
    give_up_at = time.perf_counter() + _PATIENCE_S
    while time.perf_counter() < give_up_at:
        sent_at = time.perf_counter()
        with client.stream("POST", "/chat/completions", json=body) as answer:
            if answer.status_code == 404:
                time.sleep(0.01)
                continue
            answer.raise_for_status()
            first_at, text = 0.0, ""
            for line in answer.iter_lines():
                delta = _content(line)
                if delta and not text:
                    first_at = time.perf_counter()
                text += delta
        if _MARK not in text:
            raise AssertionError(f"{model} answered out of style: {text!r}")
        return sent_at, first_at
    raise TimeoutError(f"nobody knew {model} within {_PATIENCE_S} s")


def _content(line: str) -> str:
    data = line.removeprefix("data: ")
    if data in {line, "[DONE]"}:  # no event, or the end of the stream
        return ""
    choices = json.loads(data)["choices"]
    return choices[0]["delta"].get("content") or "" if choices else ""


def _publish(
    stack: BenchmarkStack, client: httpx.Client, folder: Path, version: int, option: str
) -> Round:
    """Publish one version, send a request to it, and return the times."""
    directory = folder / str(version)
    shutil.copytree(_ADAPTER, directory)
    (directory / "README.md").write_text(f"version {version}\n")  # changes the digest
    name = "parrot" if option == "--promote" else f"parrot@{version}"
    base_model = "--base-model=sluice-tiny"
    began_at, cpu_s = time.perf_counter(), _children_cpu_s()
    _sluice(stack, "models", "publish", "parrot", str(version), str(directory), base_model, option)
    published_at, cpu_s = time.perf_counter(), _children_cpu_s() - cpu_s
    sent_at, first_at = _time_request(client, name)
    return Round(published_at - began_at, sent_at - began_at, first_at - began_at, cpu_s)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    columns = {name: [asdict(one)[name] for one in rounds] for name in asdict(rounds[0])}
    return {
        name: {"median": round(statistics.median(values), 2), "max": round(max(values), 2)}
        for name, values in columns.items()
    }


def main() -> None:
    """Publish versions with and without promotion, and write the figures."""
    with tempfile.TemporaryDirectory() as folder, started("openvino", "--no-embeddings") as stack:
        _sluice(stack, "artifacts", "push", str(SHIPPED_BASE))
        with httpx.Client(
            base_url=stack.env["OPENAI_BASE_URL"],
            headers={"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"},
            timeout=_PATIENCE_S,
        ) as client:
            made = [
                _publish(stack, client, Path(folder), number, option)
                for number, option in enumerate(["--promote", "--no-promote"] * ROUNDS)
            ]
    figures = {
        "rounds": ROUNDS,
        "promoted": _figures(made[::2]),
        "asked_for_first": _figures(made[1::2]),
    }
    print(write_result("publish", __doc__ or "", figures), figures)


if __name__ == "__main__":
    main()
