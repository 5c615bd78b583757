"""Converts shares from percent in requests and answers to the stored unit, and back. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

Json = dict[str, Any]

OF_CLIENT = {"is_of_client": True}  # validation context that marks JSON sent by a client
_ROUNDING = 1e-6


def _in_hundredths(value: float) -> float:
    return _in_steps(value, 100)


def _in_tenths(value: float) -> float:
    return _in_steps(value, 10)


def _in_steps(value: float, of_percent: int) -> float:
    if abs(value * of_percent - round(value * of_percent)) > _ROUNDING:
        raise ValueError(f"steps of {1 / of_percent:g} percent are expected")
    return value


Percent = Annotated[float, Field(ge=0, le=100), AfterValidator(_in_hundredths)]
PercentInTenths = Annotated[float, Field(ge=0, le=100), AfterValidator(_in_tenths)]


@dataclass(frozen=True, slots=True)
class ShareField:
    """A share whose stored unit is not percent.

    Attributes:
        name: Name of the share, without a unit.
        of_percent: Stored units in one percent, for example 100 basis points or 10 permille.
        is_whole: Whether the stored unit is an integer.
        unit: Suffix of the stored name.
        least: Least value in percent.
        most: Largest value in percent.
    """

    name: str
    of_percent: float = 100
    is_whole: bool = True
    unit: str = ""
    least: float = 0.0
    most: float = 100.0

    @property
    def stored(self) -> str:
        """Name of the stored field."""
        return f"{self.name}_{self.unit}" if self.unit else self.name

    @property
    def shown(self) -> str:
        """Name of the field in percent."""
        return f"{self.name}_percent"

    def read(self, percent: float) -> float:
        """Return the stored value of a share in percent."""
        return round(percent * self.of_percent) if self.is_whole else percent * self.of_percent

    def show(self, value: float) -> float:
        """Return a stored value in percent, rounded to a hundredth."""
        return round(value / self.of_percent, 2)

    def parsed(self, data: object, info: ValidationInfo) -> object:
        """Return the input of a pydantic model with the share in its stored field.

        Raises:
            ValueError: A client sent the stored field instead of the percent, or no number.
        """
        if info.context != OF_CLIENT or not isinstance(data, dict):
            return data
        found: Json = dict(data)  # type: ignore[reportUnknownArgumentType] # JSON of a client
        if self.stored in found:
            raise ValueError(f"{self.stored}: shares are in percent: give {self.shown}")
        if self.shown not in found:
            return found
        percent = found.pop(self.shown)
        if isinstance(percent, bool) or not isinstance(percent, int | float):
            message = f"{self.shown}: a number of percent is expected"
            raise ValueError(message)  # noqa: TRY004 - pydantic reports only a ValueError
        if not self.least <= percent <= self.most:
            raise ValueError(f"{self.shown}: {self.least:g} to {self.most:g} is expected")
        try:
            _in_hundredths(percent)
        except ValueError as error:
            raise ValueError(f"{self.shown}: {error}") from None
        return found | {self.stored: self.read(percent)}

    def describe(self, schema: Json) -> None:
        """Replace the stored field by the percent field in a JSON schema."""
        properties = schema["properties"]
        was = properties.pop(self.stored)
        properties[self.shown] = {
            "type": "number",
            "minimum": self.least,
            "maximum": self.most,
        }
        if "default" in was:
            properties[self.shown]["default"] = self.show(was["default"])
        if self.stored in schema.get("required", ()):
            schema["required"][schema["required"].index(self.stored)] = self.shown


def shown(document: Mapping[str, Any], *fields: ShareField) -> Json:
    """Return a stored document with its shares in percent, in the original order of fields."""
    of = {field.stored: field for field in fields}
    return {
        of[name].shown if name in of else name: of[name].show(value) if name in of else value
        for name, value in document.items()
    }
