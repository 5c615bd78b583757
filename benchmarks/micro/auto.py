"""Measures the CPU time of a decision of `auto` among four models in pools of two cells each.

One operation is `AutoBoard.decide`: the features of the whole conversation, its cached prefixes,
the state of the pools, and the choice. There are three conversations. The first is a question of 60
characters. The second is a talk of 20 messages and 8 kB, the third a session of 400 messages and
400 kB. The quality table has judged answers for all clusters of questions. Each conversation is
new, so no cached result is reused. The figure is CPU time of one core, and the goal is 0.5 ms. Not
measured: reading the body, tokenizing, the request to Valkey, and the refusal if no model remains.
Run: `python -m benchmarks.micro.auto`.
"""

import asyncio
import hashlib
import random
import time

from benchmarks.results import write_result
from gateway.auto.board import AskedPrompt, AutoBoard
from gateway.auto.prompt_keys import PromptHasher
from gateway.auto.shared_conversations import SharedConversations
from gateway.directory import Directory
from gateway.dispatch.cell_choice import CellView
from gateway.limits.valkey import ValkeyClient
from gateway.limits.valkey_commands import ValkeyCommands
from sluice.auto.features import CLUSTERS, SCHEME
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

MODELS, CELLS = 4, 2
ROUNDS = 200
SHAPES = {"question": (1, 60), "talk": (20, 400), "session": (400, 1000)}
_WORDS = (
    "the",
    "of",
    "code",
    "def",
    "12 + 7",
    "how many",
    "bridges",
    "commit",
    "it",
    "solve",
    "für",
)


class _Request:
    """A chat with a number of messages, each with a number of characters."""

    model = "auto"
    session = ""
    output_tokens_max = None

    def __init__(self, chance: random.Random, messages: int, characters: int) -> None:
        self._texts = [_text(chance, characters) for _ in range(messages)]

    def asked(self) -> AskedPrompt:
        return AskedPrompt(self._texts)


def _text(chance: random.Random, characters: int) -> str:
    return " ".join(chance.choices(_WORDS, k=characters // 4))[:characters]


def _state() -> ControlState:
    state, names = ControlState(), [f"m{number}" for number in range(MODELS)]
    objects = wire.Objects(
        tiers=[wire.Tier(id="free")],
        tenants=[wire.Tenant(id="t", tier_id="free", weight=1)],
        keys=[wire.ApiKey(id="k", tenant_id="t", secret_sha256=hashlib.sha256(b"k").digest())],
        bases=[wire.Base(digest="b", context_tokens_max=200_000)],
        models=[wire.Model(id=name, base_digest="b", pool_id=name) for name in names],
        pools=[wire.Pool(id=name, base_digest="b") for name in names],
    )
    objects.auto_policies.add(
        id="t",
        scheme=SCHEME,
        miss_price=0.01,
        second_price=0.001,
        explored_share=0.01,
        candidates=[
            wire.AutoModel(model=name, prompt_price=rank, output_price=4 * rank, quality=0.5)
            for rank, name in enumerate(names, 1)
        ],
        cells=[
            wire.AutoCell(cluster=cluster, model=name, good=10, bad=5)
            for cluster in range(CLUSTERS)
            for name in names
        ],
    )
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=objects))
    return state


async def _measured(messages: int, characters: int) -> float:
    """Return the CPU time of a decision in microseconds, from the better of two passes."""
    state = _state()
    directory = Directory(state, lambda _: True)
    principal = directory.authenticate("k", 0)
    views = {
        f"m{number}": [CellView(f"c{it}", 2, 1000, 40, queued=1, running=3) for it in range(CELLS)]
        for number in range(MODELS)
    }
    away = ValkeyCommands(ValkeyClient("redis://127.0.0.1:1"), commands_max=1)
    hasher, shared = PromptHasher(b"secret"), SharedConversations(away)
    board, chance = AutoBoard(directory, views.__getitem__, hasher, shared), random.Random(1)
    best = float("inf")
    for _ in range(2):
        requests = [_Request(chance, messages, characters) for _ in range(ROUNDS)]
        begun = time.process_time()
        for number, request in enumerate(requests):
            assert await board.decide(principal, request, f"{number:032x}") is not None
        best = min(best, time.process_time() - begun)
    return best / ROUNDS * 1e6


def main() -> None:
    """Measure all and write benchmarks/results/auto.json."""
    found = {
        f"{name}_us": round(asyncio.run(_measured(*shape)), 1) for name, shape in SHAPES.items()
    }
    print(found)
    write_result("auto", "one decision of `auto` among four models", found)


if __name__ == "__main__":
    main()
