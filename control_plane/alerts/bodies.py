"""Bodies of the admin REST about alerts."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from control_plane.alerts.model import LABELS_MAX, NAME, AlertMatcher
from control_plane.fields import AdminBody

ALERTS_MAX = 1000  # Largest number of alerts per report. Prometheus sends at most 64 per request.
_PATTERN_MAX = 200
SILENCE_S_MAX = 90 * 86_400

Label = Annotated[str, Field(max_length=1000)]
LabelName = Annotated[str, Field(pattern=r"^[a-zA-Z_]\w*$", max_length=200)]
Words = Annotated[str, Field(min_length=1, max_length=4000)]


class AlertReport(BaseModel):
    """An alert in Prometheus' form for an Alertmanager (API v2), with times in RFC 3339."""

    model_config = ConfigDict(frozen=True)

    labels: Annotated[dict[LabelName, Label], Field(max_length=LABELS_MAX)]
    annotations: Annotated[
        dict[LabelName, Annotated[str, Field(max_length=8000)]], Field(max_length=LABELS_MAX)
    ] = Field(default_factory=dict[str, str])
    startsAt: datetime | None = None  # noqa: N815 - Alertmanager's name
    endsAt: datetime | None = None  # noqa: N815 - Alertmanager's name
    generatorURL: str = ""  # noqa: N815 - Alertmanager's name

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if not self.labels.get(NAME):
            raise ValueError(f"labels: {NAME} is missing")
        for moment in (self.startsAt, self.endsAt):
            if moment is not None and moment.tzinfo is None:
                raise ValueError("a time needs its zone, as 2026-11-26T05:43:00Z")
        return self


class AlertReports(RootModel[Annotated[list[AlertReport], Field(max_length=ALERTS_MAX)]]):
    """Alerts in the form in which Prometheus posts them."""


class MatcherBody(AdminBody):
    """A condition on the value of a label. A pattern must match the whole value."""

    name: LabelName
    operator: Literal["=", "!=", "=~", "!~"] = "="
    value: Annotated[str, Field(max_length=_PATTERN_MAX)]

    @model_validator(mode="after")
    def _is_pattern(self) -> Self:
        if self.operator.endswith("~"):
            try:
                re.compile(self.value)
            except re.error as error:
                raise ValueError(f"{self.value!r} is no pattern: {error}") from None
            if re.search(r"[+*}]\)*[+*{]|\\[1-9]|\(\?", self.value):
                raise ValueError(
                    "the pattern may take too long: avoid nested repeats, references, look-around"
                )
        return self


class SilenceBody(AdminBody):
    """A silence, during which alerts that match all matchers cause no notices."""

    matchers: Annotated[list[MatcherBody], Field(min_length=1, max_length=20)]
    duration_s: Annotated[int, Field(ge=60, le=SILENCE_S_MAX)]
    reason: Words


class AlertNote(AdminBody):
    """An acknowledgement of an alert, with a note."""

    note: Annotated[str, Field(max_length=4000)] = ""


class IncidentText(AdminBody):
    """A note on an incident, or the incident's cause when it is closed."""

    text: Words


def matchers_of(stored: list[dict[str, Any]]) -> tuple[AlertMatcher, ...]:
    """Return the matchers of a silence from their stored form."""
    return tuple(AlertMatcher(it["name"], it["operator"], it["value"]) for it in stored)
