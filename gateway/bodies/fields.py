"""Types of fields, which are bounded and never converted. Pure.

A value that is not served is refused by the field's name. A string is never read as a number, nor a
fraction or boolean as an integer. As at OpenAI, a value of the wrong type is a mistake of the
caller.
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
    """Bounds the entries of an object before each of them is validated and reported."""

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
    """A documented parameter without effect here, which accepts only its neutral values."""

    def __init__(self, *values: Any, instead: str = "") -> None:
        """Accept these values and null. `instead` names the alternative in the error."""
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
    """Values of a field that OpenAI documents and this server lacks, which are refused by name."""

    def __init__(self, *values: str, instead: str) -> None:
        """Refuse these values. `instead` names the alternative in the error."""
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
    """Bounds a number that may be larger at other servers. A larger number is refused."""

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
