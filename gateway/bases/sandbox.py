"""Runs untrusted chat templates with bounds on their access, run time and memory.

Jinja's sandbox denies a template access to Python's internals. But a template could still run for
minutes, or fill the memory with one multiplication. So every loop iteration, call, filter and
output is charged to the rendering's budget. If the result of an operation can be much larger than
its operands, the result's size is checked before the operation runs.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from gateway.bases.growing import SEAM

TreeChange = Callable[[nodes.Template], nodes.Template]

# Maximum ratio of output to input, since a template adds only some marks per message.
_OUTPUT_FACTOR = 4
_OUTPUT_ALLOWANCE = 64 << 10
# Characters and items that a rendering may allocate in total. Intermediate values count, since
# templates concatenate text in loops.
_ALLOCATION_ALLOWANCE = 128 << 20
_VALUE_ALLOWANCE = 1 << 20  # characters and items of one value
_ALLOCATION_FACTOR = 64  # additional allocation per character of the template's input
_COMPILE_CPU_S = 5.0  # processor seconds for filters on constants, which run at compile time
_SOURCE_CHARACTERS_MAX = 512 << 10
# The clock is read after this many steps, or after a step with a result above `_SMALL`. Reading the
# clock costs as much as one step.
_STEPS_PER_LOOK, _SMALL = 16, 4096
_INTEGER_BITS_MAX = 4096
_INDENT_MAX = 64
_DIGITS_MAX = 20  # maximum number of digits for the filter `round`
_PADDING_MAX = 100_000  # maximum width of a padded value, in characters

# Jinja's filters that chat templates use. The others are removed, since some can enlarge text.
_FILTERS = frozenset(
    re.findall(
        "[a-z]+",
        "abs attr capitalize count d default dictsort e escape first float format groupby indent"
        " int items join last length list lower map max min reject rejectattr replace reverse"
        " round safe select selectattr sort string title tojson trim unique upper urlencode"
        " wordcount",
    )
)
_GLOBALS = frozenset(("range", "dict", "cycler", "joiner", "namespace"))
_PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))
_REFUSED_METHODS = frozenset(("expandtabs", "translate", "maketrans", "to_bytes"))
_TOO_LARGE = "it makes far more text than it was given"
# Matches a format width of at least five digits, or a width that is computed from a value.
_WIDE = re.compile(r"[0-9]{5}|\{[^}]*\{|%[^a-zA-Z%]*\*")


class ExhaustedError(Exception):
    """The template has used more time or memory than any chat template needs."""


class OutOfTimeError(ExhaustedError):
    """The template has run for too long."""


class RenderBudget:
    """Limits of one rendering: the processor time of its thread, and allocated memory."""

    __slots__ = (
        *("_allocated_max", "_cpu_s", "_ends_at_s", "_steps", "_value_max", "_weighed"),
        "output_max",
    )

    def __init__(self, cpu_s: float, given: int) -> None:
        """Start the limits. `given` is the number of characters of the template's input."""
        self._cpu_s = cpu_s
        self._ends_at_s: float | None = None  # None until the first reading of the clock
        self._steps = 0  # steps since the last reading
        self._allocated_max = _ALLOCATION_ALLOWANCE + _ALLOCATION_FACTOR * given
        self.output_max = _OUTPUT_ALLOWANCE + _OUTPUT_FACTOR * given
        self._value_max = _VALUE_ALLOWANCE + _ALLOCATION_FACTOR * given
        # Length of each container as text, by the container's `id()`. The entry also refers to the
        # container, so that it stays alive and no other object can have the same `id()`.
        self._weighed: dict[int, tuple[int, object]] = {}

    def spend(self, value: object = None) -> None:
        """Charge one step and the size of its result `value`."""
        self._steps += 1
        if isinstance(value, str):
            made = len(value)
        elif isinstance(value, _CONTAINERS):
            made = len(value)
            self.check_size(self._weight(value))
        else:
            made = 0
        self._allocated_max -= made
        if self._allocated_max < 0:
            raise ExhaustedError(_TOO_LARGE)
        if self._steps >= _STEPS_PER_LOOK or made >= _SMALL:
            self._look()

    def _look(self) -> None:
        """Read the clock and check the time limit.

        The limit counts from the first reading, so that short templates never read the clock.
        """
        self._steps = 0
        now_s = time.thread_time()
        if self._ends_at_s is None:
            self._ends_at_s = now_s + self._cpu_s
        if now_s > self._ends_at_s:
            raise OutOfTimeError("it runs for too long")

    def _weight(self, value: object) -> int:
        """Return the length that a value would have as text, without writing the text.

        A list can contain another list twice, on many levels. This value needs little memory, but
        its text would have an exponential length.
        """
        if isinstance(value, str):
            return 1 + len(value)
        if not isinstance(value, _CONTAINERS):
            check_printable((value,))
            return 1
        known = self._weighed.get(id(value))
        if known is not None:
            return known[0]
        items: Iterable[object] = cast("Iterable[object]", value)
        if isinstance(value, dict):
            items = chain.from_iterable(cast("dict[object, object]", value).items())
        weight = 1 + sum(map(self._weight, items))
        self._weighed[id(value)] = weight, value
        return weight

    def check_size(self, size: int) -> None:
        """Raise ExhaustedError if a value of `size` characters or items would be too large."""
        if size > self._value_max or size > self._allocated_max:
            raise ExhaustedError(_TOO_LARGE)


_CONTAINERS = (list, tuple, dict)
_DICT_ATTRIBUTES = frozenset(dir(dict))

_budget: ContextVar[RenderBudget] = ContextVar("budget")


class _Generation(Extension):
    """The block `{% generation %}`, which marks text for training and here renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the library's own type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of Hugging Face's `apply_chat_template`, limited by a `RenderBudget`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    seam = SEAM

    def __init__(
        self,
        *,
        functions: Mapping[str, Callable[..., Any]],
        filters: Mapping[str, Callable[..., Any]],
    ) -> None:
        """Add these functions and filters to Jinja's own."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            autoescape=False,
            finalize=_shown,
        )
        known = cast("dict[str, Any]", self.globals)
        for name in known.keys() - _GLOBALS:
            del known[name]
        known.update(functions)
        self.filters.update(filters)
        for name in self.filters.keys() - _FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(name, function)

    def compiled(self, source: str, change: TreeChange | None = None) -> Template:
        """Compile a template after applying `change`, or raise ValueError if it is invalid."""
        if len(source) > _SOURCE_CHARACTERS_MAX:
            raise ValueError(f"it has more than {_SOURCE_CHARACTERS_MAX} characters")
        token = _budget.set(RenderBudget(_COMPILE_CPU_S, len(source)))
        try:
            tree = self.parse(source)
            if change is not None:
                tree = change(tree)
            code = self.compile(cast("nodes.Template", _Charging().visit(tree)))
            return Template.from_code(self, code, dict(self.globals))
        except (TemplateError, SyntaxError, RecursionError, ExhaustedError) as error:
            raise ValueError(str(error)) from error
        finally:
            _budget.reset(token)

    @property
    def turn(self) -> None:
        """Charge one iteration of a loop. Compiled templates call this method."""
        _budget.get().spend()

    def listed(self, *items: object) -> list[object]:
        """Return a list, in place of a list literal of the template, so that it is charged."""
        return list(items)

    def tupled(self, *items: object) -> tuple[object, ...]:
        """Return a tuple, in place of a tuple literal of the template, so that it is charged."""
        return items

    def mapped(self, pairs: list[tuple[object, object]]) -> dict[object, object]:
        """Return a dict, in place of a dict literal of the template, so that it is charged."""
        return dict(pairs)

    def concatenated(self, *parts: object) -> str:
        """Return joined texts, in place of Jinja's operator `~`, so that each use is charged."""
        check_printable(parts)
        texts = list(map(str, parts))
        _budget.get().check_size(sum(map(len, texts)))
        return "".join(texts)

    def render(
        self, template: Template, values: Mapping[str, Any], budget: RenderBudget
    ) -> list[str]:
        """Return the template's output, cut at each `SEAM`.

        Raises ExhaustedError, or any error of the template itself.
        """
        token = _budget.set(budget)
        try:
            texts, parts = list[str](), list[str]()
            size = 0
            # The context is built here, because the library's method needs two more calls and two
            # copies.
            known = template.globals
            context = self.context_class(
                self, {**known, **values}, template.name, template.blocks, globals=known
            )
            for part in template.root_render_func(context):
                if part is SEAM:
                    texts.append("".join(parts))
                    parts.clear()
                    continue
                size += len(part)
                if size > budget.output_max:
                    raise ExhaustedError(_TOO_LARGE)
                parts.append(part)
            texts.append("".join(parts))
            return texts
        finally:
            _budget.reset(token)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 - as the base class has it: templates may name any keyword
        """Call a function for the template, and charge the call and its result."""
        budget = _budget.get()
        budget.spend()
        # A macro of the template needs no check, because the operations in it are charged.
        if type(__obj) is Macro:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            found = __obj(__context.eval_ctx, *args, **kwargs)
        else:
            _check_method(budget, __obj, args)
            found = super().call(__context, __obj, *args, **kwargs)
        budget.spend(found)
        return found

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a message's field as a dict item, because Jinja would try an attribute first."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]  # pyright: ignore[reportUnknownVariableType] - a template's
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002 - the library's signature
        """Compute a binary operation for the template, and charge its result."""
        budget = _budget.get()
        if operator == "+" and type(left) is str and type(right) is str:  # the usual case
            budget.check_size(len(left) + len(right))
            found = left + right
        else:
            _check_operation(budget, operator, left, right)
            found = self.binop_table[operator](left, right)
        budget.spend(found)
        return found

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item or a slice of a value for the template. Only slices are charged."""
        found = super().getitem(obj, argument)
        return _charged(found) if isinstance(argument, slice) else found


def check_printable(values: Iterable[object]) -> None:
    """Refuse a namespace as a value, because its size may change after the check."""
    if any(isinstance(value, Namespace) for value in values):
        raise ExhaustedError("it uses a namespace as a value")


class _Charging(NodeTransformer):
    """Wraps the operations for which Jinja calls no method of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the library's name
        self.generic_visit(node)
        turn = nodes.EnvironmentAttribute("turn", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802 - the library's name
        self.generic_visit(node)
        return _call("listed", node.items, node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802 - the library's name
        self.generic_visit(node)
        return node if node.ctx == "store" else _call("tupled", node.items, node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802 - the library's name
        self.generic_visit(node)
        pairs = [
            nodes.Tuple([pair.key, pair.value], "load", lineno=node.lineno) for pair in node.items
        ]
        whole = nodes.List(cast("list[nodes.Expr]", pairs), lineno=node.lineno)
        return _call("mapped", [whole], node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the library's name
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node.lineno)


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=lineno)


def _charged(value: Any) -> Any:
    _budget.get().spend(value)
    return value


def _shown(value: Any) -> Any:
    if type(value) is not str and isinstance(value, Namespace):
        check_printable((value,))
    _budget.get().spend(value)
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # If a filter has a `jinja_pass_arg`, its first argument is Jinja's context, not a value.
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend()
        values = [*args[skipped:], *kwargs.values()]
        check_printable(values)
        if name == "replace":
            _check_replacement(budget, *map(str, (*values, "", "")[:3]))
        elif name == "join" and len(values) > 1:
            args = (*args[:skipped], list(values[0]), *args[skipped + 1 :])
            _check_joint(budget, str(values[1]), args[skipped])
        elif name in ("indent", "tojson"):
            _check_indent(budget, values)
        elif name == "round":
            _check_numbers(values[1:], _DIGITS_MAX)
        elif name == "format":
            _check_format(str(values[0]))
        return _charged(function(*args, **kwargs))

    return bounded


def _check_method(budget: RenderBudget, function: Any, args: tuple[Any, ...]) -> None:
    """Check the size of a result before a method of a built-in type is called."""
    function = getattr(function, "__wrapped__", function)
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return
    check_printable(args)
    if name in _REFUSED_METHODS:
        raise ExhaustedError(f"it calls {name}, which is not to be used here")
    if name in _PADDING_METHODS:
        _check_numbers(args, _PADDING_MAX)
    elif name in ("format", "format_map"):
        _check_format(str(owner))
    elif name == "replace" and len(args) > 1:
        _check_replacement(budget, str(owner), str(args[0]), str(args[1]))
    elif name == "join" and args:
        budget.check_size(len(str(owner)) * len(args[0]))


def _check_operation(budget: RenderBudget, operator: str, left: Any, right: Any) -> None:
    """Check the size of an operation's result before the operation is computed."""
    if operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.check_size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        check_printable((right,))
        _check_format(left)
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if hasattr(value, "__len__") and isinstance(times, int):
                budget.check_size(len(value) * times)
        _check_integers(left, right, lambda a, b: a + b)
    elif operator == "**":
        _check_integers(left, right, lambda a, _: a * abs(int(right)))


def _check_integers(left: Any, right: Any, bits: Callable[[int, int], int]) -> None:
    if isinstance(left, int) and isinstance(right, int):  # noqa: SIM102 - two questions
        if bits(left.bit_length(), right.bit_length()) > _INTEGER_BITS_MAX:
            raise ExhaustedError("it calculates with huge numbers")


def _check_numbers(values: Iterable[Any], value_max: int) -> None:
    if any(isinstance(value, int) and abs(value) > value_max for value in values):
        raise ExhaustedError(f"it asks for more than {value_max} places")


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise ExhaustedError("it formats to a huge width")


def _check_replacement(budget: RenderBudget, text: str, old: str, new: str) -> None:
    budget.check_size(len(text) + text.count(old) * len(new))


def _check_joint(budget: RenderBudget, separator: str, items: list[Any]) -> None:
    budget.check_size(len(separator) * len(items))


def _check_indent(budget: RenderBudget, values: list[Any]) -> None:
    """Check the size of an indentation (a width or a text) that is added to every line."""
    for width in values[1:]:
        if isinstance(width, str):
            budget.check_size(str(values[0]).count("\n") * len(width))
        else:
            _check_numbers((width,), _INDENT_MAX)
