"""Parses the price list: prices and figures of accelerators, paid pools, and prices of APIs.

Money is stored as integer millionths of the currency, so that parts add up exactly.
"""

import json
import tomllib
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

MICRO = 1_000_000

_Price = Annotated[Decimal, Field(ge=0, le=1_000_000)]
_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_HINTS = {
    "timezone_aware": "write it as 2030-12-31T12:00:00Z",
    "missing": "add it",
    "extra_forbidden": "no such field: remove it, or look for a slip of the pen",
}


class PricesError(ValueError):
    """The price list is invalid. The text has one line per mistake."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AcceleratorPrice(_Part):
    """The price and the data-sheet figures of a kind of accelerator.

    Attributes:
        price_per_hour: Price of one accelerator for an hour, whether it is used or not.
        memory_bandwidth_gb_s: Memory bandwidth in GB/s, from the data sheet.
        tflops: Peak of dense matrix products in TFLOP/s, in the number format of the weights.
    """

    price_per_hour: _Price
    memory_bandwidth_gb_s: _Size
    tflops: _Size


class PriceStep(_Part):
    """The number of paid replicas from a point in time on.

    Attributes:
        since: Time with its offset, for example 2030-12-31T12:00:00Z. By default the step has no
            beginning.
        replicas: Number of replicas until the next step. It is 0 before the first step.
    """

    since: AwareDatetime = datetime.fromtimestamp(0, UTC)
    replicas: Annotated[int, Field(ge=0, le=1_000_000)]


class PricedPool(_Part):
    """The paid replicas of a pool, and the model figures that turn its tokens into work.

    Attributes:
        accelerator: Name of an accelerator in the list.
        replicas: Number of paid replicas, whether busy or not. It may also be a list of steps in
            the order of time. None means that the control plane has recorded the replicas.
        accelerators_per_replica: Number of accelerators that one replica uses.
        parameters: Parameters of the base. For a mixture of experts, the active parameters per
            token.
        bytes_per_parameter: Bytes of a parameter, for example 2 for bf16 and 1 for FP8.
        kv_bytes_per_token: Bytes of keys and values of one token in all layers.
    """

    accelerator: str
    replicas: Annotated[list[PriceStep], Field(min_length=1)] | None = None
    accelerators_per_replica: Annotated[int, Field(ge=1, le=1024)] = 1
    parameters: _Size
    bytes_per_parameter: _Size
    kv_bytes_per_token: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @field_validator("replicas", mode="before")
    @classmethod
    def _number_is_a_step(cls, replicas: object) -> object:
        return (
            replicas if replicas is None or isinstance(replicas, list) else [{"replicas": replicas}]
        )

    @field_validator("replicas")
    @classmethod
    def _steps_go_on(cls, replicas: list[PriceStep] | None) -> list[PriceStep] | None:
        for before, after in pairwise(replicas or ()):
            if after.since <= before.since:
                raise ValueError(f"{after.since} is not after {before.since}: sort the steps")
        return replicas

    def accelerator_hours(self, from_ms: int, to_ms: int) -> float:
        """Return the paid accelerator-hours of a time range in Unix milliseconds."""
        assert self.replicas is not None, "the control plane knows"
        steps = [(round(it.since.timestamp() * 1000), it.replicas) for it in self.replicas]
        ends = [begin_ms for begin_ms, _ in steps[1:]] + [to_ms]
        paid_ms = sum(
            replicas * max(0, min(end_ms, to_ms) - max(begin_ms, from_ms))
            for (begin_ms, replicas), end_ms in zip(steps, ends, strict=True)
        )
        return paid_ms / 3_600_000 * self.accelerators_per_replica


class ApiPrice(_Part):
    """A provider's prices per 1M tokens.

    Attributes:
        prompt_per_million: Price of uncached prompt tokens.
        cached_per_million: Price of cached prompt tokens.
        output_per_million: Price of output tokens.
    """

    prompt_per_million: _Price
    cached_per_million: _Price
    output_per_million: _Price

    def cost_micros(self, uncached: float, cached: float, output: float) -> int:
        """Return the price of token counts, in millionths of the currency."""
        return round(
            float(self.prompt_per_million) * uncached
            + float(self.cached_per_million) * cached
            + float(self.output_per_million) * output
        )


class Prices(_Part):
    """A price list.

    Attributes:
        currency: Currency of all prices, as a code of ISO 4217.
        accelerators: Accelerators by kind.
        pools: Pools by id.
        apis: APIs to compare with, by any name.
    """

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    accelerators: dict[str, AcceleratorPrice]
    pools: Annotated[dict[str, PricedPool], Field(min_length=1)]
    apis: dict[str, ApiPrice] = {}

    @model_validator(mode="after")
    def _kinds_exist(self) -> Self:
        for name, pool in self.pools.items():
            if pool.accelerator not in self.accelerators:
                known = ", ".join(sorted(self.accelerators)) or "none"
                raise ValueError(
                    f"pools.{name}.accelerator: {pool.accelerator!r} is not in [accelerators] "
                    f"({known}): add it there, or name one of these"
                )
        return self

    @property
    def recorded_pools(self) -> list[str]:
        """Ids of the pools whose paid hours the control plane has recorded."""
        return [name for name, pool in self.pools.items() if pool.replicas is None]

    @property
    def replica_prices(self) -> dict[str, float]:
        """The price of one replica-hour, by pool."""
        return {
            name: float(self.accelerator_of(name).price_per_hour) * pool.accelerators_per_replica
            for name, pool in self.pools.items()
        }

    def accelerator_of(self, pool_id: str) -> AcceleratorPrice:
        """Return the price and figures of the accelerators of a pool in the price list."""
        return self.accelerators[self.pools[pool_id].accelerator]


def parse_prices(text: str, *, is_json: bool = False) -> Prices:
    """Parse a price list in TOML or JSON.

    Raises:
        PricesError: The list has mistakes. The text names each wrong field and its remedy.
    """
    try:
        found: Any = json.loads(text) if is_json else tomllib.loads(text)
    except ValueError as error:  # both parsers raise errors of this class
        raise PricesError(f"is no {'JSON' if is_json else 'TOML'}: {error}") from None
    try:
        return Prices.model_validate(found)
    except ValidationError as error:
        lines = [_line(item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise PricesError("\n".join(lines)) from None


def read_prices(path: Path) -> Prices:
    """Read a price list. A file whose name ends in .json is JSON, and any other file is TOML.

    Raises PricesError if the price list is not valid. Each line of its text names the file.
    """
    try:
        return parse_prices(path.read_text(encoding="utf-8"), is_json=path.suffix == ".json")
    except OSError as error:
        raise PricesError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PricesError(f"{path}: is no text in UTF-8") from None
    except PricesError as error:
        lines = [f"{path}: {line}" for line in str(error).splitlines()]
        raise PricesError("\n".join(lines)) from None


def _line(place: tuple[int | str, ...], kind: str, message: str) -> str:
    message = message.removeprefix("Value error, ")
    hint = f" ({_HINTS[kind]})" if kind in _HINTS else ""
    where = ".".join(str(part) for part in place)
    return f"{where}: {message}{hint}" if where else message
