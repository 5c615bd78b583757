"""The choice of `auto` for one request, with its response headers and event fields. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.auto.prompt_keys import PromptKeys
from sluice.auto.choice import AutoChoice, AutoOption, AutoReason
from sluice.auto.features import SCHEME
from sluice.wire.telemetry.v1 import telemetry_pb2 as wire

AUTO = "auto"
# Maximum number of alternatives that the response headers list.
_CANDIDATES_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True)
class AutoDecision:
    """The choice of a model for one request.

    Attributes:
        choice: The chosen model and its alternatives.
        keys: Keys of the prompt.
        tokens: Estimated number of prompt tokens.
        answered: Stand-in that answers instead of the chosen model, or empty without a stand-in.
    """

    choice: AutoChoice
    keys: PromptKeys
    tokens: int
    answered: str = ""

    @property
    def model(self) -> str:
        """Public name of the model that answers."""
        return self.answered or self.choice.model

    @property
    def reason(self) -> AutoReason:
        """Reason of the choice, for headers and events."""
        return AutoReason.STAND_IN if self.answered else self.choice.reason

    @property
    def others(self) -> Sequence[str]:
        """Models that may answer instead, best first. Models below the quality floor come last."""
        rest = sorted(self.choice.alternatives, key=lambda it: not it.is_eligible)
        return [it.name for it in rest if it.name != self.model]

    @property
    def headers(self) -> dict[str, str]:
        """Response headers about the choice. Costs are in the currency of the models' prices."""
        options = [self.choice.chosen, *self.choice.alternatives]
        own = next(it for it in options if it.name == self.model)
        rest = [it for it in options if it is not own][:_CANDIDATES_SHOWN_MAX]
        return {
            "x-sluice-auto": f"{self.reason}; {_option_text(own)}",
            "x-sluice-auto-alternatives": ", ".join(
                f"{it.name}; {_option_text(it)}" for it in rest
            ),
        }

    def write(self, event: wire.AutoChoice) -> None:
        """Write the choice into the event of the request."""
        choice = self.choice
        event.scheme, event.cluster = SCHEME, choice.cluster
        event.reason, event.model = self.reason, self.model
        for it in (choice.chosen, *choice.alternatives):
            event.options.add(
                model=it.name,
                release=it.release,
                cost=it.running,
                quality=it.quality,
                propensity=it.propensity,
            )

    def moved_to(self, model: str) -> "AutoDecision":
        """Return the decision with `model` as the stand-in that answers."""
        return replace(self, answered=model)


def _option_text(option: AutoOption) -> str:
    return f"cost={option.cost:.6g}; price={option.price:.6g}; quality={option.quality:.3f}"
