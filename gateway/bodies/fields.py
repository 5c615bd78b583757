"""Types for the fields of bodies, each with a bound and without conversion. Pure.

A value that this server does not support is refused with the field's name. A string is never
converted to a number, nor a fraction or boolean to an integer. As at OpenAI, a value of the wrong
type is an error of the caller.
"""

from dataclasses import dataclass
from typing import Annotated, Any, cast

import orjson
from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.bodies.mistakes import UNSUPPORTED
from gateway.bodies.parsing import BODY_BYTES_MAX

Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(max_length=BODY_BYTES_MAX)]
ShortText = Annotated[str, Field(max_length=512)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]

_METADATA_MAX = 16


@dataclass(frozen=True, slots=True)
class EntriesMax:
    """Bounds the number of an object's entries, before any entry is validated or reported."""

    entries: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Hook of pydantic for validation."""
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Hook of pydantic for the JSON schema."""
        return handler(schema) | {"maxProperties": self.entries}

    def _checked(self, value: Any) -> Any:
        if isinstance(value, dict) and len(cast("dict[str, Any]", value)) > self.entries:
            text = "at most {entries} entries are allowed"
            raise PydanticCustomError("too_many_entries", text, {"entries": self.entries})
        return value


class Only:
    """A parameter that other servers support and this server does not. Only listed values pass."""

    def __init__(self, *values: Any, instead: str = "") -> None:
        """Accept only these values and null, which change nothing. Errors recommend `instead`."""
        self._values = (*values, None)
        shown = " or ".join(orjson.dumps(value).decode() for value in values) or "null"
        self._message = f"this server only takes {shown}"
        if instead:
            self._message += f"; {instead}"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Hook of pydantic for validation."""
        del source, handler
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Hook of pydantic for the JSON schema."""
        del schema, handler
        return {"enum": list(self._values)}

    def _checked(self, value: Any) -> Any:
        for allowed in self._values:
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return value
        raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": self._message})


class Elsewhere:
    """Values that OpenAI documents and this server does not support. Errors name the value."""

    def __init__(self, *values: str, instead: str) -> None:
        """Refuse these values with an error that recommends `instead`."""
        self._values = frozenset(values)
        self._instead = instead

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Hook of pydantic for validation."""
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if isinstance(value, str) and value in self._values:
            text = f"'{value}' is not served here; {self._instead}"
            raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": text})
        return value


@dataclass(frozen=True, slots=True)
class ServedUpTo:
    """The largest supported number, above which a value is refused as unsupported, not invalid."""

    largest: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Hook of pydantic for validation."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Hook of pydantic for the JSON schema."""
        return handler(schema) | {"maximum": self.largest}

    def _checked(self, value: int) -> int:
        if value > self.largest:
            text = "this server takes at most {largest}"
            raise PydanticCustomError(UNSUPPORTED, text, {"largest": self.largest})
        return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], ShortText], EntriesMax(_METADATA_MAX)
]
