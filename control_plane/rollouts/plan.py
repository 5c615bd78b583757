"""The plan of a rollout, with its stages, its gates and its rule for too little traffic. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, model_validator

from control_plane import percent
from control_plane.fields import AdminBody
from control_plane.percent import ShareField
from control_plane.rollouts.evidence import Metric
from sluice.split import SHARE_MAX

_Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
_Sample = Annotated[int, Field(ge=0, le=10_000_000)]
SHARE = ShareField("share", least=0.01)
MIRRORED = ShareField("mirrored")
TOLERATED = ShareField("tolerated", of_percent=0.01, is_whole=False, most=99.99)


# Number of golden prompts per release that a stage requires, if the model has golden prompts with
# an expected answer.
GOLDEN_SAMPLE_MIN = 20


class Stage(AdminBody):
    """A share of the traffic, and its duration.

    A stage ends when it was watched for `duration_min_s` *and* `sample_min` requests of canary were
    counted. If control has traffic, `sample_min` requests of control are needed as well. With less
    traffic the stage continues up to `duration_max_s`. At that time `sample_light` requests are
    enough, or `sample_min` if `sample_light` is None. With still fewer requests, `Plan.when_short`
    decides. A shadow stage sends canary copies of a share of requests, and clients never receive
    the answers.
    """

    model_config = ConfigDict(json_schema_extra=SHARE.describe)

    share: Annotated[int, Field(ge=1, le=SHARE_MAX)]  # share of the traffic in basis points
    duration_min_s: _Seconds = 600.0
    sample_min: _Sample = 0
    sample_light: _Sample | None = None
    duration_max_s: _Seconds = 86_400.0
    is_shadow: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_percent(cls, data: object, info: ValidationInfo) -> object:
        return SHARE.parsed(data, info)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.duration_max_s < self.duration_min_s:
            raise ValueError("duration_max_s must not be below duration_min_s")
        if self.sample_light is not None and self.sample_light > self.sample_min:
            raise ValueError("sample_light must not be above sample_min")
        return self

    @property
    def is_compared(self) -> bool:
        """Whether control has traffic in this stage, so that both releases are compared."""
        return self.is_shadow or self.share < SHARE_MAX


class Gate(AdminBody):
    """A comparison that canary must not lose.

    `tolerated` is the tolerated excess, as a share of the requests that are good in control. For
    example, 0.005 permits a rise of the error rate from 1 % to 1.495 %. A stage also waits for
    `sample_min` observations of the gate. This matters for golden prompts, which are rare.
    """

    model_config = ConfigDict(json_schema_extra=TOLERATED.describe)

    metric: Metric
    tolerated: Annotated[float, Field(ge=0, lt=1)]
    sample_min: _Sample = 0

    @model_validator(mode="before")
    @classmethod
    def _of_percent(cls, data: object, info: ValidationInfo) -> object:
        return TOLERATED.parsed(data, info)


# With the default gates, an error rate of 5 % instead of 1 % is detected within 660 requests in 19
# of 20 cases. The number is larger at night, when both releases have fewer errors. So the first
# stage requires 1,000 requests. Stages with a larger share last longer, because late effects cost
# more there. Examples are a cache that fills, and the traffic of the next hour. The longest
# durations add up to less than a day. At one request per second, 1 % of the traffic is 288 requests
# in 8 hours.
DEFAULT_STAGES = (
    Stage(
        share=100,
        duration_min_s=300.0,
        sample_min=1_000,
        sample_light=20,
        duration_max_s=8 * 3_600.0,
    ),
    Stage(
        share=1_000,
        duration_min_s=900.0,
        sample_min=1_000,
        sample_light=20,
        duration_max_s=8 * 3_600.0,
    ),
    Stage(
        share=5_000,
        duration_min_s=1_800.0,
        sample_min=2_000,
        sample_light=20,
        duration_max_s=6 * 3_600.0,
    ),
    Stage(share=SHARE_MAX),
)
DEFAULT_GATES = (
    Gate(metric=Metric.ERRORS, tolerated=0.005),
    Gate(metric=Metric.SLOW_FIRST_TOKEN, tolerated=0.05),
    Gate(metric=Metric.SLOW_TOKENS, tolerated=0.05),
    Gate(metric=Metric.LONG_ANSWERS, tolerated=0.05),
    Gate(metric=Metric.SHORT_ANSWERS, tolerated=0.05),
    Gate(metric=Metric.REFUSALS, tolerated=0.02),
    Gate(metric=Metric.FEWER_REFUSALS, tolerated=0.02),
    Gate(metric=Metric.EMPTY_ANSWERS, tolerated=0.02),
    Gate(metric=Metric.REPETITIVE_ANSWERS, tolerated=0.02),
    Gate(metric=Metric.CUT_ANSWERS, tolerated=0.05),
    Gate(metric=Metric.BASE_LIKE_ANSWERS, tolerated=0.05),
    # A well trained release differs a little from its base. A broken release differs in all
    # answers.
    Gate(metric=Metric.UNLIKELY_ANSWERS, tolerated=0.2),
    Gate(metric=Metric.UNSURE_ANSWERS, tolerated=0.2),
    Gate(metric=Metric.GOLDEN, tolerated=0.05),
)


class Plan(AdminBody):
    """The stages and gates of a rollout.

    Attributes:
        stages: Stages in their order. Only the first may be a shadow stage, and the last has all
            traffic.
        gates: Gates, one for each metric that counts.
        alpha: False-alarm rate of the whole rollout, as a probability. Alpha is the highest
            probability that any gate, in any stage, rolls back a release that is not worse than
            tolerated. The bound is independent of the duration, and is divided evenly among the
            gates and the compared stages.
        when_short: Reaction if a stage has too little traffic up to its longest duration. The
            rollout waits for an operator, continues with the present sample, or is rolled back.
        ready_max_s: Seconds after which a rollout pauses if the fleet is not ready for a stage.
        quiet_max_s: Seconds without any evidence after which the rollout pauses.
        pause_max_s: Seconds of a pause after which the rollout is rolled back.
    """

    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=20)] = DEFAULT_STAGES
    gates: Annotated[tuple[Gate, ...], Field(min_length=1, max_length=20)] = DEFAULT_GATES
    alpha: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    when_short: Literal["pause", "go_on", "roll_back"] = "pause"
    ready_max_s: _Seconds = 3_600.0
    quiet_max_s: _Seconds = 600.0
    pause_max_s: _Seconds = 3 * 86_400.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if after.is_shadow:
                raise ValueError("only the first stage can be a shadow stage")
            if not before.is_shadow and after.share <= before.share:
                shares = f"{SHARE.show(after.share):g} % follows {SHARE.show(before.share):g} %"
                raise ValueError(f"shares must grow: {shares}")
        last = self.stages[-1]
        if last.is_shadow or last.share != SHARE_MAX:
            raise ValueError("the last stage must have all of the traffic: share_percent 100")
        metrics = [gate.metric for gate in self.gates]
        if twice := {metric.value for metric in metrics if metrics.count(metric) > 1}:
            raise ValueError(f"more than one gate for {', '.join(sorted(twice))}")
        return self

    @property
    def alpha_of_test(self) -> float:
        """False-alarm rate of one gate in one stage, an equal part of `alpha`."""
        compared = sum(stage.is_compared for stage in self.stages)
        return self.alpha / (len(self.gates) * max(compared, 1))


def shown(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored plan with its shares in percent. An unreadable plan is returned unchanged."""
    try:
        return {
            **document,
            "stages": [percent.shown(stage, SHARE) for stage in document["stages"]],
            "gates": [percent.shown(gate, TOLERATED) for gate in document["gates"]],
        }
    except (KeyError, TypeError, AttributeError):
        return dict(document)
