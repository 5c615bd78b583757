"""The replicas of a cell, as the control plane plans them and their engines describe them."""

from dataclasses import dataclass, field
from enum import IntEnum


class ReplicaRole(IntEnum):
    """The work of a replica, which is BOTH unless its pool separates prefill from decode."""

    BOTH = 0
    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """A replica that the control plane has assigned to one of the router's cells."""

    replica_id: str
    cell_id: str
    is_draining: bool = False
    role: ReplicaRole = ReplicaRole.BOTH


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The sizes and features of an engine, reported once per attachment.

    Attributes:
        adapter_slots: Most adapters in one batch, or 0 if the engine serves no adapters.
        prompt_tokens_max: Longest prompt, in tokens, that leaves room for one output token.
    """

    context_tokens_max: int
    sequences_max: int
    step_tokens_max: int
    kv_blocks: int
    block_tokens: int
    adapter_slots: int = 0
    features: frozenset[str] = frozenset()
    prompt_tokens_max: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute `prompt_tokens_max` once, because placement reads it often."""
        longest = min(self.context_tokens_max, self.kv_blocks * self.block_tokens) - 1
        object.__setattr__(self, "prompt_tokens_max", longest)
