"""All policies by name, in an explicit table and by names that contain parameters.

Groups are names for the best of several policies, which `sim.runs` runs to report the best result.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from sim.policies.aibrix import AibrixPrefixCache
from sim.policies.dynamo import Dynamo, DynamoQueue
from sim.policies.llmd import LlmdPredictedLatency, LlmdScores
from sim.policies.oracle import Oracle
from sim.policies.preble import PrebleE2
from sim.policies.sglang import SglangCacheAware
from sim.policies.simple import (
    BoundedHash,
    LeastRequests,
    LeastTokens,
    PowerOfTwo,
    Random,
    RoundRobin,
    SessionSticky,
)
from sim.pool import Policy


class PolicyError(ValueError):
    """Raised for a name that is no policy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The maker of a policy, and the cache that the policy needs.

    Attributes:
        make: Returns a new instance of the policy.
        is_shared: Whether all replicas share one infinite cache, as for the upper bound.
    """

    make: Callable[[], Policy]
    is_shared: bool = False


def _sglang(name: str, match_ratio: float, imbalance: int, imbalance_ratio: float) -> Entry:
    return Entry(
        lambda: SglangCacheAware(
            name, match_ratio=match_ratio, imbalance=imbalance, imbalance_ratio=imbalance_ratio
        )
    )


def _llmd(name: str, queue: float, kv: float, prefix: float, *, is_exact: bool) -> Entry:
    return Entry(lambda: LlmdScores(name, (queue, kv, prefix), is_exact=is_exact))


TABLE: dict[str, Entry] = {
    **{
        policy.name: Entry(policy)
        for policy in (
            RoundRobin,
            Random,
            LeastRequests,
            PowerOfTwo,
            LeastTokens,
            BoundedHash,
            SessionSticky,
            LlmdPredictedLatency,
            AibrixPrefixCache,
            PrebleE2,
        )
    },
    "sglang_cache_aware": _sglang("sglang_cache_aware", 0.3, 64, 1.5),
    "sglang_cache_aware_old": _sglang("sglang_cache_aware_old", 0.5, 32, 1.1),
    "llmd_default": _llmd("llmd_default", 2, 2, 3, is_exact=False),
    "llmd_precise": _llmd("llmd_precise", 1, 1, 2, is_exact=True),
    "dynamo_kv": Entry(lambda: Dynamo("dynamo_kv")),
    "oracle_0.2": Entry(lambda: Oracle("oracle_0.2", ageing=0.2), is_shared=True),
    "oracle_0": Entry(lambda: Oracle("oracle_0", ageing=0.0), is_shared=True),
}

_NUMBER = r"(\d+(?:\.\d+)?)"
_PATTERNS: dict[str, tuple[str, Callable[[str, tuple[str, ...]], Entry]]] = {
    "dynamo_kv_plsS": (
        rf"dynamo_kv_pls{_NUMBER}",
        lambda name, part: Entry(lambda: Dynamo(name, scale=float(part[0]))),
    ),
    "dynq_S_T_ORDER": (
        rf"dynq_{_NUMBER}_{_NUMBER}_(fcfs|wspt)",
        lambda name, part: Entry(
            lambda: DynamoQueue(
                name,
                scale=float(part[0]),
                threshold_steps=float(part[1]),
                is_shortest_first=part[2] == "wspt",
            )
        ),
    ),
    "sglang_THRESHOLD_ABS_REL": (
        rf"sglang_{_NUMBER}_(\d+)_{_NUMBER}",
        lambda name, part: _sglang(name, float(part[0]), int(part[1]), float(part[2])),
    ),
    "llmd_Q_KV_PREFIX": (
        rf"llmd_{_NUMBER}_{_NUMBER}_{_NUMBER}",
        lambda name, part: _llmd(name, *map(float, part[:3]), is_exact=False),
    ),
    "llmdx_Q_KV_PREFIX": (
        rf"llmdx_{_NUMBER}_{_NUMBER}_{_NUMBER}",
        lambda name, part: _llmd(name, *map(float, part[:3]), is_exact=True),
    ),
    "aibrix_SPREAD": (
        r"aibrix_(\d+)",
        lambda name, part: Entry(lambda: AibrixPrefixCache(name, spread_max=int(part[0]))),
    ),
}

# The grid of the study, over scale, threshold and order of Dynamo's router queue. A scale above 64
# improved only the pure shortest-first order further.
DYNAMO_GRID = (
    *(f"dynq_{s}_{t}_{o}" for s in (1, 4, 16, 64) for t in (0, 1, 4, 16) for o in ("fcfs", "wspt")),
    "dynq_256_0_fcfs",
    "dynq_256_0_wspt",
)
# The part of the grid that can win. On the traces of the study, orders by arrival and small scales
# are far from the best wherever the queue has work. The published defaults and a router without a
# queue are included.
_DYNAMO_SHORT = (
    *(f"dynq_{s}_{t}_wspt" for s in (4, 16, 64) for t in (0, 1, 4, 16)),
    *("dynq_256_0_wspt", "dynq_1_16_fcfs"),
    *("dynamo_kv", "dynamo_kv_pls4", "dynamo_kv_pls16", "dynamo_kv_pls64"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "dynamo_best": _DYNAMO_SHORT,
    "dynq_best": DYNAMO_GRID,
    "peer_best": (
        *DYNAMO_GRID,
        *("dynamo_kv", "dynamo_kv_pls4", "dynamo_kv_pls16", "dynamo_kv_pls64"),
        *("llmd_default", "llmd_precise", "llmd_predlat"),
        *("llmdx_2_1_1", "llmdx_4_1_1", "llmdx_4_1_2"),
        *("sglang_cache_aware", "sglang_cache_aware_old", "sglang_0.3_4_1.1", "sglang_0.5_8_1.1"),
        *("aibrix_prefix_cache", "aibrix_2", "aibrix_4", "aibrix_16"),
        *("preble_e2", "session_sticky", "chwbl", "least_requests", "least_tokens"),
        *("round_robin", "power_of_two"),
    ),
    "oracle": ("oracle_0.2", "oracle_0"),
}
ROUTER = "sluice"  # the real router core, created by `sim.runs` with its settings


def entry(name: str) -> Entry:
    """Return the entry of a policy by its name.

    Raises:
        PolicyError: No policy has this name.
    """
    if name in TABLE:
        return TABLE[name]
    for pattern, make in _PATTERNS.values():
        if match := re.fullmatch(pattern, name):
            return make(name, match.groups())
    raise PolicyError(f"unknown policy {name!r}; known: {', '.join(names())}")


def names() -> list[str]:
    """Return the names of all policies, where names with parameters are patterns."""
    return [ROUTER, *TABLE, *_PATTERNS, *GROUPS]
