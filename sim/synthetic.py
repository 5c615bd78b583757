"""Generates workloads with Poisson or bursty arrivals, lognormal lengths and sessions.

Conversations may begin with one of several system prompts. On the command line a workload is named
by its settings, `SETTING=VALUE` joined by commas, for example `--format synthetic --trace
requests=2000,burst=4,turns=3`.
"""

import random
from dataclasses import dataclass, fields
from heapq import heappop, heappush

from sim.traces import BLOCK_TOKENS, SessionChains, TraceError
from sim.workload import Trace, TraceRequest

_BURST_S = 20.0  # mean duration of a burst, and of the time between two bursts
_THINK_S = 30.0  # mean time of a user between two turns


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Settings of a generated workload, in which a session is one conversation of a tenant.

    Attributes:
        requests: Number of requests.
        rate: Conversations that begin per second. A run at a given load rescales all times.
        burst: Rate inside bursts divided by the rate outside bursts. A value of 1 is a plain
            Poisson process.
        prompt: Median prompt tokens that a turn adds to the conversation.
        prompt_sigma: Standard deviation of the prompt length's logarithm.
        output: Median tokens of an answer.
        output_sigma: Standard deviation of the output length's logarithm.
        turns: Mean turns of a conversation. Each prompt repeats all earlier prompts and answers.
        systems: Number of distinct system prompts, or 0 for none.
        system_tokens: Tokens of each system prompt, rounded down to blocks.
        tenants: Number of tenants, of which the first has the most conversations.
    """

    requests: int = 2000
    rate: float = 5.0
    burst: float = 1.0
    prompt: float = 1000.0
    prompt_sigma: float = 1.0
    output: float = 200.0
    output_sigma: float = 0.7
    turns: float = 1.0
    systems: int = 0
    system_tokens: int = 1024
    tenants: int = 1


def parse(text: str) -> Synthetic:
    """Return the workload that a text like `requests=100,burst=4` describes.

    Raises:
        TraceError: A setting is unknown or out of range.
    """
    types = {field.name: field.type for field in fields(Synthetic)}
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in types:
            raise TraceError(f"synthetic: unknown setting {name!r}; known: {', '.join(types)}")
        try:
            values[name] = int(value) if types[name] is int else float(value)
        except ValueError:
            raise TraceError(f"synthetic: {name} is {value!r}, not a number") from None
        is_optional = name.endswith("sigma") or name in ("systems", "system_tokens")
        if values[name] < 0 or (values[name] == 0 and not is_optional):
            raise TraceError(f"synthetic: {name} must be above 0")
    return Synthetic(**values)  # type: ignore[arg-type] - whole numbers where they belong


def generate(workload: Synthetic, *, seed: int, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Return the trace of a workload, which is equal for equal seeds."""
    return _Generator(workload, seed, block_tokens).trace()


class _Generator:
    def __init__(self, workload: Synthetic, seed: int, block_tokens: int) -> None:
        self._workload = workload
        self._draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._block_tokens = block_tokens
        self._chains = SessionChains(block_tokens)
        tokens = workload.system_tokens // block_tokens * block_tokens
        self._systems = [self._chains.fresh(tokens) for _ in range(workload.systems)]
        self._now_s = 0.0
        self._is_burst = False
        self._changes_s = self._draw.expovariate(1 / _BURST_S)

    def trace(self) -> Trace:
        workload, draw = self._workload, self._draw
        requests: list[TraceRequest] = []
        # (time, order, session, history tokens, system blocks, tenant), where order breaks ties
        turns: list[tuple[float, int, int, int, tuple[int, ...], int]] = []
        sessions, order = 0, 0
        begins_s = self._arrival()
        while len(requests) < workload.requests:
            if not turns or begins_s <= turns[0][0]:
                sessions += 1
                system = draw.choice(self._systems) if self._systems else ()
                tenant = min(int(draw.expovariate(2 / workload.tenants)), workload.tenants - 1)
                history = len(system) * self._block_tokens
                turn = (begins_s, order, sessions, history, system, tenant)
                begins_s = self._arrival()
            else:
                turn = heappop(turns)
            at_s, _, session, history, system, tenant = turn
            prompt = history + self._length(workload.prompt, workload.prompt_sigma)
            output = self._length(workload.output, workload.output_sigma)
            blocks = self._chains.blocks(session, prompt, system)
            requests.append(TraceRequest(at_s, prompt, output, blocks, session, f"tenant-{tenant}"))
            if draw.random() < 1 - 1 / max(1.0, workload.turns):
                order += 1
                next_s = at_s + draw.expovariate(1 / _THINK_S)
                heappush(turns, (next_s, order, session, prompt + output, system, tenant))
        return Trace("synthetic", self._block_tokens, tuple(requests))

    def _arrival(self) -> float:
        """Return the time of the next conversation, by a Poisson process with two rates."""
        burst = self._workload.burst
        low = 2 * self._workload.rate / (1 + burst)  # mean of both rates = the workload's rate
        while True:
            rate = low * burst if self._is_burst else low
            gap_s = self._draw.expovariate(rate)
            if self._now_s + gap_s <= self._changes_s:
                self._now_s += gap_s
                return self._now_s
            self._now_s = self._changes_s
            self._is_burst = not self._is_burst
            self._changes_s += self._draw.expovariate(1 / _BURST_S)

    def _length(self, median: float, sigma: float) -> int:
        return max(1, round(median * self._draw.lognormvariate(0.0, sigma)))
