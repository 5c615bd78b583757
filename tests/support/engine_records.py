"""Records what two engines decide from given inputs, to compare builds of their scheduler.

The inputs depend on the seed only, and never on what an engine answers. The two engines send each
other cached blocks.
"""

import hashlib
from collections import Counter
from random import Random

from replica.engine.plan import ScheduledSequence, StepPlan
from replica.engine.types import URGENT_PRIORITY, Fork, RefusedError, Sampling, SequenceRequest
from sluice.hashing import block_hashes, cache_root
from tests.support.memory_engine import Clock, MemoryEngine, NamedAdapter, memory_engine

STEPS = 250
_ADAPTERS = 4


class EngineRecord:
    """Two engines, their inputs by a seed, and what they have decided.

    Attributes:
        seen: How often each kind of decision was met.
    """

    def __init__(self, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._random = Random(seed)
        self._clock = Clock()
        self._engines = [memory_engine(blocks=blocks, clock=self._clock) for blocks in (20, 64)]
        self._texts = [[(base * 13 + i) % 190 for i in range(150)] for base in range(3)]
        self._asked: list[SequenceRequest] = []
        self._lines: list[str] = []

    def run(self) -> str:
        """Run all steps, check the books, and return the digest of all decisions."""
        for _ in range(STEPS):
            self._disturb()
            for engine in self._engines:
                self._step(engine)
        for engine in self._engines:
            for request in self._asked:
                engine.cancel(request.key)
            self._step(engine)
            engine.scheduler.pool.check()
            engine.scheduler.adapters.check()
            self._lines.append(repr(engine.cached_blocks()))
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def _disturb(self) -> None:
        """Give one of the engines something to do besides its next step."""
        random, engine = self._random, self._random.choice(self._engines)
        self._clock.sleep(random.choice((0.01, 0.01, 0.01, 400.0)))
        digest = _digest(random.randrange(1, 1 + _ADAPTERS))
        asked = random.choice(self._asked) if self._asked else self._request()
        hashes = block_hashes(asked.prompt, asked.cache_root, len(asked.prompt) // 32)
        until_s = self._clock.now_s + random.choice((-1.0, 50.0, 2000.0))
        backend = engine.backend
        backend.is_broken = random.random() < 0.02
        told: object = None
        try:
            match random.randrange(8):
                case 0 | 1 | 2:
                    engine.add(self._request())
                case 3:
                    told = engine.cancel(asked.key)
                case 4:
                    told = engine.scheduler.pool.pin(hashes, until_s, self._clock.now_s)
                case 5:
                    other = self._engines[engine is self._engines[0]]
                    told = other.import_blocks(engine.export_blocks(hashes))
                    self.seen["blocks sent"] += bool(told)
                case 6:
                    engine.put_adapter(digest, NamedAdapter(int(digest, 16)))
                case _:
                    engine.drop_adapter(digest)
                    backend.failing = {asked.key: "it cannot go on"}
        except RefusedError as error:
            told = error.message
        self._lines.append(repr(told))

    def _request(self) -> SequenceRequest:
        random, key = self._random, 10 * len(self._asked)
        text = random.choice(self._texts)
        tail = [random.randrange(200) for _ in range(random.randrange(1, 40))]
        digest = _digest(random.choice((0, 0, 1, 2, 3, 4)))
        tells_prompt = random.random() < 0.2
        request = SequenceRequest(
            key=key,
            prompt=text[: random.randrange(len(text))] + tail,
            output_tokens_max=random.randrange(1, 60),
            sampling=Sampling(seed=random.randrange(5), logprobs=random.choice((-1, 0))),
            cache_root=cache_root("base", digest, random.choice((b"", b"a"))),
            adapter_digest=digest,
            priority=random.choice((0, 1, 2, 2, 2, URGENT_PRIORITY)),
            ignore_eos=random.random() < 0.8,
            submitted_at_s=self._clock.now_s,
            forks=tuple(Fork(key + 1 + i, i) for i in range(random.choice((0, 0, 0, 1, 3)))),
            resumed_tokens=random.choice((0, 0, 1)),
            prompt_logprobs=0 if tells_prompt else -1,
            draft_tokens_max=random.choice((0, 0, 3, 16)),
            prediction=random.choice(((), (), text[40:])),
            pinned_blocks=random.choice((0, 0, 2)),
            scored_tokens=random.choice((0, 1)) if tells_prompt else 0,
        )
        self._asked.append(request)
        return request

    def _step(self, engine: MemoryEngine) -> None:
        engine.backend.plans = []
        events = engine.step()
        plans = engine.backend.plans
        self._lines += [_plan_line(plan) for plan in plans]
        self._lines += [repr(events), repr(engine.load()), repr(engine.adapters())]
        load = engine.load()
        self.seen["preemptions"] = max(self.seen["preemptions"], load.preemptions)
        self.seen["cached tokens"] = max(self.seen["cached tokens"], load.cached_tokens)
        self.seen["accepted drafts"] = max(self.seen["accepted drafts"], load.accepted_tokens)
        self.seen["pinned blocks"] += load.kv_blocks_pinned
        self.seen["evictions"] = max(self.seen["evictions"], engine.scheduler.pool.evictions)
        self.seen["forks"] += sum(len(plan.fork_of) for plan in plans)
        self.seen["copies"] += sum(len(plan.copies) for plan in plans)
        self.seen["adapters loaded"] += sum(len(plan.loads) for plan in plans)
        self.seen["logprobs of prompts"] += len(events.prompt_logprobs)
        for event in events.finished:
            self.seen[event.reason.name] += 1
            self.seen["scores"] += event.score is not None


def _digest(adapter: int) -> str:
    return f"{adapter:064x}" if adapter else ""


def _plan_line(plan: StepPlan) -> str:
    """Return all that a plan says."""
    decode, sampled = map(_sequences, (plan.decode, plan.sampled))
    prefill = [(_sequences([sequence]), count) for sequence, count in plan.prefill]
    books = plan.fork_of, plan.drafts, plan.loads, plan.copies, plan.tokens
    return repr((decode, prefill, sampled, *books))


def _sequences(sequences: list[ScheduledSequence]) -> list[object]:
    return [
        (it.request.key, it.computed, it.capacity, it.slot, it.blocks, it.scored, it.rank())
        for it in sequences
    ]
