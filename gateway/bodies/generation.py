"""Fields that determine how an answer is generated, for chat completions and completions. Pure."""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from gateway.bodies.fields import (
    EntriesMax,
    Flag,
    Integer,
    Metadata,
    ModelName,
    Number,
    Only,
    ServedUpTo,
    ShortText,
)
from gateway.bodies.guides import (
    Choices,
    GrammarText,
    JsonSchemaFormat,
    Regex,
    ResponseFormat,
    guide_of,
)
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Body, Strict
from gateway.bodies.prompts import check_ids
from gateway.bodies.vllm_names import translated
from sluice.deadlines import DEADLINE_MS_MAX
from sluice.errors import BadRequestError, ErrorCode
from sluice.pacing import INTERVAL_MS_MAX
from sluice.priority import CLASSES, queue_priority
from sluice.wire.engine.v1 import engine_pb2 as engine

N_MAX = 8
_N_ELSEWHERE_MAX = 128  # OpenAI's bound of `n`
STOPS_MAX = 4
_STOP_CHARACTERS_MAX = 1024
_BIASES_MAX = 300
# Smallest value sent as `top_p`, because the engine reads 0 as no limit. A share this small always
# contains only the most probable token.
_TOP_P_LEAST = 1e-6
_REPETITION_LEAST = 0.01
_REPETITION_SENT_LEAST = 0.01 + 1e-9  # a 32-bit 0.01 would be below the engine's bound

Penalty = Annotated[Number, Field(ge=-2, le=2)]
Share = Annotated[Number, Field(ge=0, le=1)]
OutputTokens = Annotated[Integer, Field(ge=1, le=1 << 30)]
StopText = Annotated[str, Field(min_length=1, max_length=_STOP_CHARACTERS_MAX)]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
        Annotated[Number, Field(ge=-100, le=100)],
    ],
    EntriesMax(_BIASES_MAX),
]


class Defaults(Protocol):
    """Sampling values that a base's authors recommend, used where a request sets no value."""

    @property
    def temperature(self) -> float:
        """Sampling temperature, where 0 selects greedy decoding."""
        ...

    @property
    def top_p(self) -> float:
        """Share of the probability mass to sample from, where 1 sets no limit."""
        ...

    @property
    def top_k(self) -> int:
        """Number of most probable tokens to sample from, where 0 sets no limit."""
        ...


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    interval_ms: (
        Annotated[
            Integer,
            Field(
                ge=0,
                le=INTERVAL_MS_MAX,
                description=(
                    "Least milliseconds between two writes; 0: live. Default: the key's setting."
                ),
            ),
        ]
        | None
    ) = None
    include_obfuscation: Annotated[Any, Only(False)] = None


@cache
def _param_names(grammar: str, logprobs: str) -> Mapping[str, str]:
    """Return the names for `param_names`. Requests with equal arguments share the mapping."""
    same = GenerationFields.model_fields.keys() & engine.Sampling.DESCRIPTOR.fields_by_name.keys()
    others = {"adapter_digest": "model", "tokens_min": "min_tokens", "prediction": "prediction"}
    others["prompt_logprobs"] = "echo"
    return {name: name for name in same} | others | {"grammar": grammar, "logprobs": logprobs}


class GenerationFields(Body):
    """The fields that determine an answer. A field whose value is None counts as absent."""

    model: ModelName
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1, le=_N_ELSEWHERE_MAX), ServedUpTo(N_MAX)] | None = None
    stop: (
        StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=STOPS_MAX)] | None
    ) = None
    max_tokens: OutputTokens | None = None
    min_tokens: (
        Annotated[
            Integer,
            Field(
                ge=0,
                le=1 << 30,
                description=(
                    "Least output tokens before the end token; a stop string, and a regex, choice"
                    " or schema that is complete, end the answer earlier."
                ),
            ),
        ]
        | None
    ) = None
    ignore_eos: Flag | None = None
    seed: Annotated[Integer, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(ge=_REPETITION_LEAST, le=10)] | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    prompt_cache_key: ShortText | None = None
    session_id: ShortText | None = None
    priority: Annotated[Integer, Field(gt=-CLASSES, le=0)] | None = None
    deadline_ms: Annotated[Integer, Field(ge=1, le=DEADLINE_MS_MAX)] | None = None
    # Fields of vLLM's server. Only their neutral values are accepted.
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    stop_token_ids: Annotated[Any, Only([], instead="send their text as 'stop'")] = None
    truncate_prompt_tokens: Annotated[Any, Only(instead="shorten the prompt")] = None
    prompt_logprobs: Annotated[Any, Only()] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1.0)] = None
    bad_words: Annotated[Any, Only([], instead="use 'logit_bias'")] = None
    guided_decoding_backend: Annotated[Any, Only(instead="leave it out")] = None
    guided_whitespace_pattern: Annotated[Any, Only(instead="leave it out")] = None

    @classmethod
    def translated(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Return a body in which vLLM's field names are replaced, or raise BadRequestError."""
        return translated(document)

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Whether each chunk reports the usage so far, which is vLLM's extension."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def interval_ms(self) -> int | None:
        """Milliseconds between two writes of a stream, 0 for a write per token, or None if unset.

        If unset, the setting of the request's API key decides.
        """
        return None if self.stream_options is None else self.stream_options.interval_ms

    @property
    def session(self) -> str:
        """Key of requests that share a prefix, or empty if the request names no session."""
        return self.session_id or self.prompt_cache_key or ""

    @property
    def output_tokens_max(self) -> int | None:
        """The bound on the tokens of each answer, or None to allow the rest of the context."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report per token: 0 for only the token itself, None for no report."""
        return None

    @property
    def echoed_alternatives(self) -> int | None:
        """Alternatives to report per token of the echoed prompt, or None for no report."""
        return None

    @property
    def is_echo_alone(self) -> bool:
        """Whether only the echoed prompt is shown, because the client has requested no tokens."""
        return False

    @property
    def alternatives_param(self) -> str:
        """Name of the body's field for `alternatives`."""
        return "logprobs"

    def prompt_param(self, index: int) -> str:
        """Return the name of the body's field for a prompt, by the prompt's index."""
        raise NotImplementedError

    @property
    def param_names(self) -> Mapping[str, str]:
        """Names of the body's fields, by the engine's name of the same parameter."""
        return _param_names(self.guide_param or "tools", self.alternatives_param)

    @property
    def served_tier(self) -> str | None:
        """The answer's `service_tier`, or None if the request has none."""
        if self.service_tier is None:
            return None
        return "flex" if self.is_lowered else "default"

    @property
    def is_lowered(self) -> bool:
        """Whether the request has a lowered priority within its tier, and may be preempted."""
        return bool(self.priority) or self.service_tier == "flex"

    def queue_priority(self, tier_priority: int) -> int:
        """Return the priority at a router. A lowered request still precedes all lower tiers."""
        below = max(-(self.priority or 0), int(self.service_tier == "flex"))
        return queue_priority(tier_priority, below)

    @property
    def guide(self) -> engine.Grammar | None:
        """Grammar of the answer, from `response_format`, `regex`, `choice` or `grammar`."""
        asked = self.response_format or self.regex or self.choice or self.grammar
        if asked is None:
            # This usual case avoids the lock of the cached property.
            return None
        return self._guide

    @cached_property
    def _guide(self) -> engine.Grammar | None:
        return guide_of(self.response_format, self.regex, self.choice, self.grammar)

    @property
    def free_schemas(self) -> Sequence[Any]:
        """Schemas that a grammar may enforce only in part."""
        form = self.response_format
        if not isinstance(form, JsonSchemaFormat) or form.json_schema.strict:
            return ()
        return (form.json_schema.content,)

    @property
    def guide_param(self) -> str | None:
        """Name of the body's field for `guide`."""
        if self.guide is None:
            return None
        given = {"regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return next((name for name, value in given.items() if value is not None), "response_format")

    def check(self) -> None:
        """Raise BadRequestError if fields exclude each other."""
        if self.stream_options is not None and not self.stream:
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
                param="stream_options",
            )
        bound = self.output_tokens_max
        if self.min_tokens and bound is not None and self.min_tokens > bound:
            raise bad_value("min_tokens", f"the answer has at most {bound} tokens")
        _ = self.guide  # raises the errors here, before any use of the guide

    def check_vocabulary(self, size: int) -> None:
        """Raise BadRequestError for a bias with a token id of at least `size`."""
        if self.logit_bias:
            check_ids("logit_bias", map(int, self.logit_bias), size)

    def sampling(self, defaults: Defaults) -> engine.Sampling:
        """Return the sampling parameters for the engine. Absent fields have the base's defaults.

        Requests with the same parameters share a message, which must not be changed. A separate
        message would cost each request 5 us, and half a kilobyte of memory until its answer.
        """
        shared = _shared_sampling(
            defaults.temperature if self.temperature is None else self.temperature,
            defaults.top_p if self.top_p is None else self.top_p,
            defaults.top_k if self.top_k is None else self.top_k,
            self.min_p,
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            self.min_tokens,
            self.alternatives,
        )
        guide = self.guide
        if guide is None and self.seed is None and not self.logit_bias:
            return shared
        sampling = engine.Sampling()
        sampling.CopyFrom(shared)
        if self.seed is not None:
            sampling.seed = self.seed % (1 << 64)
        if guide is not None:
            sampling.grammar.CopyFrom(guide)
        if self.logit_bias:
            sampling.bias_token.extend(map(int, self.logit_bias))
            sampling.logit_bias.extend(self.logit_bias.values())
        return sampling


@lru_cache(maxsize=256)
def _shared_sampling(
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float | None,
    presence_penalty: float | None,
    frequency_penalty: float | None,
    repetition_penalty: float | None,
    tokens_min: int | None,
    logprobs: int | None,
) -> engine.Sampling:
    return engine.Sampling(
        temperature=temperature,
        top_p=max(top_p, _TOP_P_LEAST),
        top_k=max(top_k, 0),
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty and max(repetition_penalty, _REPETITION_SENT_LEAST),
        tokens_min=tokens_min,
        logprobs=logprobs,
    )
