"""Simulates how often `auto` changes the model of a conversation, and how much it saves.

One operation is a turn. Each seed has 40 conversations that grow turn by turn, and a tenth of their
turns changes the subject to code. The waits of three pools follow a random walk. The gateway has
the exact waits, or waits with an error of a fifth. The saving of a change is the cost of the old
model minus the cost of the new model. Both costs include the true waits, and the cost of the new
model includes the prefix, which it has not cached. Figures are sums over 20 seeds, in the currency
of the prices. `lost` counts changes with a negative saving. Not measured: engines, and quality
other than the published figures.
Run: `python -m benchmarks.micro.auto_replay`.
"""

from random import Random

from benchmarks.results import write_result
from sluice.auto.choice import (
    SWITCH_MARGIN,
    AutoCandidate,
    AutoReason,
    AutoRules,
    AutoTurn,
    PoolOutlook,
    choose,
    expected_running,
)
from sluice.auto.features import PromptFeatures
from sluice.auto.quality import QualityPrior, table_of

SEEDS = 20
MODELS = (
    AutoCandidate("small", "1", 0.1, 0.01, 0.4),
    AutoCandidate("medium", "1", 0.3, 0.03, 1.2),
    AutoCandidate("large", "1", 1.0, 0.1, 4.0),
)
PRIORS = {
    "small": QualityPrior("llama-3.2-3b-instruct"),
    "medium": QualityPrior("llama-3.1-8b-instruct"),
    "large": QualityPrior("llama-3.1-70b-instruct"),
}
PREFILL_S = {"small": 2e-5, "medium": 5e-5, "large": 2e-4}
RULES = AutoRules(second_price=0.0005, miss_price=0.01, explored_share=0.0)
TABLE = table_of((), PRIORS)


def replay(seed: int, error: float) -> tuple[list[float], int]:
    """Return the saving of each change by the true waits, and the number of turns."""
    random, saved, turns = Random(seed), list[float](), 0
    waits = {it.name: random.uniform(0, 1) for it in MODELS}
    for _ in range(40):
        tokens, current, cached = random.randint(50, 4000), "", dict[str, int]()
        code = 0.0
        for _ in range(random.randint(2, 12)):
            for name, wait in waits.items():
                waits[name] = min(20.0, max(0.0, wait + random.gauss(0, 1.0)))
            code = 9.0 if random.random() < 0.1 else code  # code stays the subject
            features = PromptFeatures(tokens=tokens, code=code)
            turn = AutoTurn(features, current=current, cached=dict(cached))
            heard = {it.name: _pool(it.name, waits, random.gauss(1, error)) for it in MODELS}
            choice = choose(MODELS, turn, TABLE, heard, RULES)
            if choice.reason is AutoReason.SWITCHED:
                true = {it.name: _pool(it.name, waits, 1.0) for it in MODELS}
                saved.append(_cost(current, turn, true) - _cost(choice.model, turn, true))
            current = choice.model
            cached[current] = tokens
            tokens += random.randint(50, 1500)
            turns += 1
    return saved, turns


def _pool(name: str, waits: dict[str, float], factor: float) -> PoolOutlook:
    return PoolOutlook(True, 1, 0, max(0.0, waits[name] * factor), PREFILL_S[name], 0.02)


def _cost(name: str, turn: AutoTurn, pools: dict[str, PoolOutlook]) -> float:
    candidate = next(it for it in MODELS if it.name == name)
    running = expected_running(candidate, turn, pools[name], RULES.second_price)[2]
    quality = TABLE.quality(turn.features.cluster, name, candidate.release)
    return running + RULES.miss_price * (1 - quality)


def main() -> None:
    """Replay and write benchmarks/results/auto_replay.json."""
    found: dict[str, object] = {"margin": SWITCH_MARGIN, "seeds": SEEDS}
    for name, error in (("exact", 0.0), ("a_fifth_off", 0.2)):
        runs = [replay(seed, error) for seed in range(SEEDS)]
        saved = [it for one, _ in runs for it in one]
        found[name] = {
            "turns": sum(turns for _, turns in runs),
            "changes": len(saved),
            "lost": sum(it < 0 for it in saved),
            "saved": round(sum(saved), 4),
        }
    print(found)
    write_result("auto_replay", "one turn of a replayed conversation", found)


if __name__ == "__main__":
    main()
