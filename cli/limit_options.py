"""Command options for limits, one option per kind of `sluice.limits`."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from cli.admin import given
from sluice.limits import LimitKind

_PLACE = "limits"


def limit_options(
    kinds: Iterable[LimitKind], of: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's `limits` by an option per kind of limit.

    The command receives the limits on the command line as a mapping from names of kinds.

    Args:
        kinds: Kinds of limits.
        of: End of each option's help, which names the owner and the meaning of 0.
    """
    options = [
        Parameter(
            kind.name,
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[int | None, typer.Option(min=0, help=kind.help(of))],
        )
        for kind in kinds
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(*arguments: Any, **named: Any) -> None:
            limits = given(**{option.name: named.pop(option.name) for option in options})
            command(*arguments, limits=limits, **named)

        shape = signature(command)
        parameters = [
            it
            for known in shape.parameters.values()
            for it in (options if known.name == _PLACE else (known,))
        ]
        vars(run)["__signature__"] = shape.replace(parameters=parameters)
        del vars(run)["__wrapped__"]
        run.__annotations__ = {it.name: it.annotation for it in parameters}
        return run

    return decorate
