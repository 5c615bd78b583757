"""Base of every service's settings, which reads environment variables and refuses unknown names.

A field `x` of the section with prefix `GATEWAY__` is set by `GATEWAY__X`.
"""

import difflib
import os
import sys
from collections.abc import Collection
from typing import Annotated, Self

from pydantic import AfterValidator, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from sluice.addresses import host_and_port, is_address


def _known(address: str) -> str:
    if not is_address(address) or host_and_port(address)[1] == 0:
        raise ValueError(
            "want host:port, with a port from 1 to 65535, as in 127.0.0.1:8000 or [::1]:8000"
        )
    return address


def _bindable(address: str) -> str:
    if not is_address(address):
        raise ValueError("want host:port, as in 0.0.0.0:7000 or [::]:7000; port 0 is any free one")
    return address


def _bindable_or_none(address: str) -> str:
    return _bindable(address) if address else ""


Address = Annotated[str, AfterValidator(_known)]
BindAddress = Annotated[str, AfterValidator(_bindable)]
OptionalBindAddress = Annotated[str, AfterValidator(_bindable_or_none)]  # empty means no address


class ServiceSettings(BaseSettings):
    """Frozen settings of one service. Subclasses set `env_prefix` in their `model_config`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_nested_delimiter="__", env_ignore_empty=True
    )

    @classmethod
    def from_environment(cls) -> Self:
        """Return the settings.

        Errors are printed, one per line, and end the process with status 2.
        """
        settings, problems = cls.check()
        if problems or settings is None:
            sys.stderr.write("\n".join(problems) + "\n")
            raise SystemExit(2)
        return settings

    @classmethod
    def check(cls) -> tuple[Self | None, list[str]]:
        """Return the settings, or None if invalid, and one line per error without any value.

        Unknown names with the service's prefix are errors, although pydantic-settings itself
        ignores them.
        """
        prefix = str(cls.model_config.get("env_prefix", ""))
        known = {(prefix + name).upper() for name in cls.model_fields}
        unknown = sorted(
            name
            for name in os.environ
            if prefix
            and name.upper().startswith(prefix.upper())
            and not any(
                name.upper() == field or name.upper().startswith(field + "__") for field in known
            )
        )
        problems = [f"unknown setting {name}; {_advice(name.upper(), known)}" for name in unknown]
        try:
            return cls(), problems
        except ValidationError as error:
            # The messages omit the input, because it may be a secret.
            return None, problems + [
                f"{prefix}{'__'.join(str(part) for part in item['loc']).upper()}: {item['msg']}"
                for item in error.errors(include_input=False, include_url=False)
            ]


def _advice(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
