"""Measures the CPU time of the engine's scheduler, in plain Python and compiled.

One operation of `decode_256` or `decode_16` is one step of an engine in which this many sequences
decode. One operation of `request` is all the work for a request, from its admission to its end. It
has 16 tokens, beside 63 other requests. Its prompt has 1,000 tokens, of which an earlier prompt had
800. `drafts` is the same with prompt lookup. Each figure is the best of the
rounds in µs, because the machine is shared. Both builds take turns. Not measured: the model, the
engine host, frames. The argument is a folder with an unpacked compiled wheel, which is built first
without an argument. Run: `python -m benchmarks.micro.engine_scheduler [FOLDER]`.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks.results import write_result
from replica.engine.plan import StepOutput
from replica.engine.scheduler import EngineScheduler
from replica.engine.types import Limits, SequenceRequest

_TURNS = 4  # of each build
_ROUNDS = 4  # in each turn
_STEPS = 400
_REQUESTS = 1500
_ANSWER_TOKENS = 16
_RUNNING = 64
_STEP_S = 0.01
_TURN_S, _BUILD_S = 120.0, 600.0
_NAME = "benchmarks.micro.engine_scheduler"
_ONE_TURN = "--one-turn"


def _scheduler(sequences: int) -> EngineScheduler:
    limits = Limits(131_072, sequences, 2048, 8192, 32_000)
    return EngineScheduler(limits, root=bytes(16), eos_ids=frozenset({2}))


def _step(scheduler: EngineScheduler, now_s: float) -> None:
    plan = scheduler.plan(now_s)
    scheduler.commit(plan, StepOutput([5] * len(plan.sampled)), now_s)
    scheduler.take_events()


def decode_us(sequences: int) -> float:
    """Return the µs of one step in which all sequences decode."""
    scheduler = _scheduler(sequences)
    for key in range(sequences):
        prompt = [key + position for position in range(32)]
        scheduler.add(SequenceRequest(key, prompt, 100_000, ignore_eos=True))
    while scheduler.load(0.0, 0).prefilling or scheduler.load(0.0, 0).waiting:
        _step(scheduler, 0.0)
    began_s = time.process_time()
    for step in range(_STEPS):
        _step(scheduler, step * _STEP_S)
    return (time.process_time() - began_s) / _STEPS * 1e6


def request_us(draft_tokens: int) -> float:
    """Return the µs of all work for one request."""
    scheduler, added, steps = _scheduler(_RUNNING), 0, 0
    began_s = time.process_time()
    while scheduler.has_work or added < _REQUESTS:
        load = scheduler.load(_STEP_S, 0)
        for _ in range(min(_REQUESTS - added, _RUNNING + 8 - load.running - load.waiting)):
            text = added % 50 * 7
            prompt = [*range(text, text + 800), *[added] * 200]
            scheduler.add(
                SequenceRequest(
                    added, prompt, _ANSWER_TOKENS, ignore_eos=True, draft_tokens_max=draft_tokens
                )
            )
            added += 1
        _step(scheduler, steps * _STEP_S)
        steps += 1
    return (time.process_time() - began_s) / _REQUESTS * 1e6


_CASES: dict[str, Callable[[], float]] = {
    "decode_256": lambda: decode_us(256),
    "decode_16": lambda: decode_us(16),
    "request": lambda: request_us(0),
    "drafts": lambda: request_us(8),
}


def _one_turn() -> None:
    """Print the build and its figures."""
    gc.disable()
    found = {name: min(case() for _ in range(_ROUNDS)) for name, case in _CASES.items()}
    spec = find_spec("replica.engine.scheduler")
    is_plain = spec is not None and str(spec.origin).endswith(".py")
    print(json.dumps({"build": "plain" if is_plain else "compiled", "us": found}))


def _turn(*folders: str) -> dict[str, float]:
    """Return the figures of a process that looks for modules in these folders first."""
    wanted = "plain" if len(folders) == 1 else "compiled"
    said = subprocess.run(
        [sys.executable, "-P", "-m", _NAME, _ONE_TURN],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        check=True,
        timeout=_TURN_S,
    ).stdout
    told = json.loads(said)
    if told["build"] != wanted:
        sys.exit(f"{folders[0]}: the engine is {told['build']}; unpack a compiled wheel there")
    return told["us"]


def _build(folder: Path) -> None:
    """Build a compiled wheel of the checkout, and unpack it in an empty folder."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        env=os.environ | {"HATCH_BUILD_HOOKS_ENABLE": "1"},
        check=True,
        timeout=_BUILD_S,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def _measure(site: str) -> None:
    """Let both builds take turns, and write `benchmarks/results/engine_scheduler.json`."""
    checkout = str(Path.cwd())
    turns: dict[str, list[dict[str, float]]] = {"plain": [], "compiled": []}
    for _ in range(_TURNS):
        turns["plain"].append(_turn(checkout))
        turns["compiled"].append(_turn(site, checkout))
    best = {
        build: {name: round(min(it[name] for it in found), 1) for name in _CASES}
        for build, found in turns.items()
    }
    ratios = {name: round(best["compiled"][name] / best["plain"][name], 2) for name in _CASES}
    parameters = {"turns": _TURNS, "rounds": _ROUNDS, "steps": _STEPS, "requests": _REQUESTS}
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    figures = {"parameters": parameters, **best, "of_plain": ratios}
    print(write_result("engine_scheduler", operation, figures).read_text())


def main() -> None:
    """Measure one build in this process, or both in others."""
    if sys.argv[1:] == [_ONE_TURN]:
        _one_turn()
    elif sys.argv[1:]:
        _measure(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            _build(Path(folder))
            _measure(folder)


if __name__ == "__main__":
    main()
