"""Derives the golden prompts for replicas from models and bases. Pure.

An asking (`Asking`) is a golden prompt for a base with an adapter. Answers to the same asking are
compared. The adapter is the adapter of the release that the prompt's model points at now. During a
rollout each of the two releases has an asking.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sluice.engines import profile_of
from sluice.profiles import FRAMES
from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2 as wire
from sluice.wire.control.v1 import control_pb2 as control

DEFAULT = "default"  # first word in the ids of the default prompts, which every base has
# Texts that a model may continue in many ways, so that the answer depends on every layer. A text
# with an obvious continuation would hide errors. These four texts detect 19 of 20 random errors in
# one layer.
DEFAULT_TEXTS = (
    "The old man walked down to the river and",
    "The price of bread rose because",
    "The president of the company said that",
    "Dear Sir or Madam, I am writing to",
)
# Token ids that every vocabulary has, used if the base's tokenizer cannot be read.
DEFAULT_TOKENS = (35, 120, 77, 210, 64, 99, 143, 58, 201, 46, 88, 175, 51, 132, 67, 240)
DEFAULT_OUTPUT_TOKENS = 24
DEFAULT_EVERY_S = 60
ROLLOUT_EVERY_S = 5  # seconds between two runs of a prompt with an expected answer during a rollout
_DIGEST_CHARACTERS = 16  # length of the shortened digests in the id of an asking


@dataclass(frozen=True, slots=True)
class Prompt:
    """A golden prompt for a model's releases, with columns of the table `golden_prompts`."""

    id: str
    model_id: str
    token_ids: tuple[int, ...]
    output_tokens_max: int
    every_s: int
    expected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Asking:
    """A golden prompt for a base with an adapter.

    Attributes:
        id: `prompt/base` or `prompt/base/adapter`, with shortened digests.
        prompt_id: Id of the prompt, or `default` for the default prompts of every base.
        model_id: Model of the prompt, or empty for a default prompt.
        base_digest: Base of the replicas that answer the prompt.
        adapter_digest: Adapter of the prompt, or empty for the base without an adapter.
        token_ids: Token ids of the prompt.
        output_tokens_max: Largest number of tokens in an answer.
        every_s: Seconds between two runs on a replica.
        expected: Tokens with which an answer must begin. If there are none, any answer is accepted.
        owner: Tenant of the prompt's model, or empty if the model belongs to the platform.
        is_rollout: Whether a rollout of the model waits for the expected answer.
    """

    id: str
    prompt_id: str
    model_id: str
    base_digest: str
    adapter_digest: str
    token_ids: tuple[int, ...]
    output_tokens_max: int
    every_s: int
    expected: tuple[int, ...] = ()
    owner: str = ""
    is_rollout: bool = False

    def wire(self) -> wire.GoldenPrompt:
        """Return the asking as a message for agents."""
        return wire.GoldenPrompt(
            id=self.id,
            base_digest=self.base_digest,
            adapter_digest=self.adapter_digest,
            token_ids=self.token_ids,
            output_tokens_max=self.output_tokens_max,
            every_s=self.every_s,
        )


def asking_id(prompt_id: str, base_digest: str, adapter_digest: str) -> str:
    """Return the id of an asking, with shortened digests."""
    parts = (prompt_id, base_digest[:_DIGEST_CHARACTERS], adapter_digest[:_DIGEST_CHARACTERS])
    return "/".join(part for part in parts if part)


def current(
    state: ControlState,
    prompts: Iterable[Prompt],
    token_ids: Mapping[str, Sequence[tuple[int, ...]]] = MappingProxyType({}),
) -> dict[str, Asking]:
    """Return all askings by id, for the default prompts of bases and for the models' prompts."""
    found = {one.id: one for one in defaults(state, token_ids)}
    for prompt in prompts:
        about = about_model(state, prompt.model_id)
        if about is not None:
            found |= {one.id: one for one in put(prompt, about)}
    return found


def generating_bases(state: ControlState) -> set[str]:
    """Return the digests of bases that generate text."""
    return {pool.base_digest for pool in state.pools.values() if profile_of(pool.engine) is FRAMES}


def defaults(
    state: ControlState, token_ids: Mapping[str, Sequence[tuple[int, ...]]] = MappingProxyType({})
) -> list[Asking]:
    """Return the default askings of all bases that generate text.

    Args:
        state: State with the pools.
        token_ids: Token ids of `DEFAULT_TEXTS`, by base, for the bases whose tokenizer was read.
    """
    return [
        Asking(
            id=asking_id(name, base, ""),
            prompt_id=DEFAULT,
            model_id="",
            base_digest=base,
            adapter_digest="",
            token_ids=ids,
            output_tokens_max=DEFAULT_OUTPUT_TOKENS,
            every_s=DEFAULT_EVERY_S,
        )
        for base in sorted(generating_bases(state))
        for name, ids in _named(token_ids.get(base, ()))
    ]


def _named(prompts: Sequence[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return each default prompt, with the first part of the id of its asking."""
    if not prompts:
        return [(DEFAULT, DEFAULT_TOKENS)]
    return [(f"{DEFAULT}-{number}", ids) for number, ids in enumerate(prompts, 1)]


@dataclass(frozen=True, slots=True)
class About:
    """The facts about a model that determine its askings.

    Attributes:
        owner: Tenant of the model, or empty if the model belongs to the platform.
        served: (base, adapter) of the model's release, and of the releases in a rollout.
        is_rollout: Whether a rollout splits the model's requests.
    """

    owner: str
    served: tuple[tuple[str, str], ...]
    is_rollout: bool


def about_model(state: ControlState, model_id: str) -> About | None:
    """Return the facts about a model, or None if the model does not exist."""
    model = state.models.get(model_id)
    if model is None:
        return None
    is_rollout = model_id in state.splits
    return About(model.owner_tenant_id, tuple(_served(state, model)), is_rollout)


def put(prompt: Prompt, about: About) -> list[Asking]:
    """Return the askings of a prompt for a model."""
    is_rollout = about.is_rollout and bool(prompt.expected)
    every_s = min(prompt.every_s, ROLLOUT_EVERY_S) if is_rollout else prompt.every_s
    return [
        Asking(
            asking_id(prompt.id, base_digest, adapter_digest),
            prompt.id,
            prompt.model_id,
            base_digest,
            adapter_digest,
            prompt.token_ids,
            prompt.output_tokens_max,
            every_s,
            prompt.expected,
            about.owner,
            is_rollout,
        )
        for base_digest, adapter_digest in about.served
    ]


def _served(state: ControlState, model: control.Model) -> list[tuple[str, str]]:
    """Return (base, adapter) of a model's release, and of the releases in its rollout."""
    found = [(model.base_digest, model.adapter_digest)]
    split = state.splits.get(model.id)
    for name in (split.control, split.canary) if split is not None else ():
        release = state.releases.get(f"{model.id}@{name}")
        if release is not None:
            found.append((release.base_digest, release.adapter_digest))
    return list(dict.fromkeys(found))
