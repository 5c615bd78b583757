"""Analyses whether a chat template can render only the new messages of a conversation. Pure.

A suitable template has one loop over all messages. The text of a message depends only on the
message, its neighbours and the first messages. So the text of a longer conversation is the known
text plus the newly rendered text of the last messages. `going_on` returns a template that renders
only these messages.

The analysis accepts only constructs that are known to preserve this property. A template that
counts messages, searches for the last message, or passes a value from one message to the next is
rendered as a whole.
"""

from enum import Enum, auto
from typing import cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MESSAGES, NEW, KEPT = "messages", "_new", "_kept"
# Marker in the output before each message and after the last message. It is compared by identity,
# because a message may contain the same text.
SEAM = "".join(("\ufdd0", "seam"))  # noqa: FLY002 - an object of its own
_LOOP = "loop"
_STATEFUL = frozenset({"joiner", "cycler", "strftime_now", "self", "caller", NEW, KEPT})
_NEIGHBOURS = frozenset({"first", "index", "index0", "last", "previtem", "nextitem"})
_PURE = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock),
    *(nodes.With, nodes.Macro, nodes.FilterBlock, nodes.Name, nodes.NSRef, nodes.Const),
    *(nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr),
    *(nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
    *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.Mul, nodes.Div, nodes.FloorDiv),
    *(nodes.Add, nodes.Sub, nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg),
    *(nodes.Pos, nodes.Continue, nodes.Break),
)


class _Place(Enum):
    """The position of a node in the template, which determines the constructs that are allowed."""

    BEFORE = auto()  # before the loop over messages
    MACRO = auto()
    LOOP = auto()  # in the loop over messages, where `loop` is this loop's variable
    INNER = auto()  # in a loop inside the loop over messages
    NOWHERE = auto()  # in the loop over messages, where `loop` may be an inner loop's variable


class _NotGrowingError(Exception):
    """The template must render all messages, because it has a construct that is not allowed."""


def head_messages(tree: nodes.Template) -> int | None:
    """Return how many first messages later texts depend on, or None if `tree` is not suitable."""
    loop = _main_loop(tree)
    if loop is None:
        return None
    check = _Check()
    try:
        for node in tree.body[: tree.body.index(loop)]:
            check.visit(node, _Place.BEFORE)
        check.all(loop.body, _Place.LOOP)
    except _NotGrowingError:
        return None
    return check.head


def with_seams(tree: nodes.Template) -> nodes.Template:
    """Return the template with a `SEAM` before each message. `head_messages` must accept it."""
    loop = _main_loop(tree)
    assert loop is not None, "it was looked for"
    return _with_seams(tree, loop)


def going_on(tree: nodes.Template) -> nodes.Template:
    """Return a template that renders only the messages in `_new`, which follow `_kept` others."""
    loop = _main_loop(tree)
    assert loop is not None, "it was looked for"
    shifted = _ShiftedLoop()
    loop.body = [cast("nodes.Node", shifted.visit(node)) for node in loop.body]
    loop.iter = nodes.Name(NEW, "load", lineno=loop.lineno)
    return _with_seams(tree, loop)


def _with_seams(tree: nodes.Template, loop: nodes.For) -> nodes.Template:
    behind = tree.body.index(loop) + 1
    loop.body.insert(0, _seam(loop))
    tree.body.insert(behind, _seam(loop))
    return tree


def _seam(loop: nodes.For) -> nodes.Output:
    return nodes.Output([nodes.EnvironmentAttribute("seam")], lineno=loop.lineno)


def _main_loop(tree: nodes.Template) -> nodes.For | None:
    found = [
        it
        for it in tree.body
        if isinstance(it, nodes.For) and _is_name(it.iter, MESSAGES)
        if isinstance(it.target, nodes.Name) and it.target.name not in (MESSAGES, _LOOP)
        if it.test is None and not it.else_ and not it.recursive
    ]
    return found[0] if len(found) == 1 else None


class _Check:
    """Checks all nodes of a template, up to the end of the loop over messages.

    Attributes:
        head: Number of first messages that the template accesses by index.
    """

    def __init__(self) -> None:
        self.head = 1

    def all(self, found: list[nodes.Node], place: _Place) -> None:
        """Check several nodes."""
        for node in found:
            self.visit(node, place)

    def visit(self, node: nodes.Node, place: _Place, *, is_behind_first: bool = False) -> None:
        """Check a node. With `is_behind_first`, the node is not reached for the first message."""
        if not isinstance(node, _PURE) or _is_refused(node, place):
            raise _NotGrowingError
        match node:
            case nodes.Macro():
                self._below(node, _Place.MACRO)
            case nodes.For():
                self._for(node, place)
            case nodes.Getitem() if _is_name(node.node, MESSAGES):
                self._message(node.arg, place, is_behind_first=is_behind_first)
            case nodes.Getattr() | nodes.Getitem() if place is _Place.LOOP and _of_loop(node):
                if _of_loop(node) not in _NEIGHBOURS:
                    raise _NotGrowingError
            case nodes.And() | nodes.Or():
                self._either(node, place, is_behind_first=is_behind_first)
            case nodes.If() | nodes.CondExpr() if _is_name(node.test, MESSAGES):
                self._below(node, place, but=node.test)
            case _:
                for child in node.iter_child_nodes():
                    self.visit(child, place, is_behind_first=is_behind_first)

    def _below(self, node: nodes.Node, place: _Place, but: nodes.Node | None = None) -> None:
        self.all([it for it in node.iter_child_nodes() if it is not but], place)

    def _for(self, node: nodes.For, place: _Place) -> None:
        if node.recursive:
            raise _NotGrowingError
        is_within = place in (_Place.LOOP, _Place.INNER, _Place.NOWHERE)
        self.visit(node.target, place)
        self.visit(node.iter, place)
        if node.test is not None:
            self.visit(node.test, _Place.NOWHERE if is_within else place)
        self.all(node.else_, _Place.NOWHERE if is_within else place)
        self.all(node.body, _Place.INNER if is_within else place)

    def _message(self, at: nodes.Expr, place: _Place, *, is_behind_first: bool) -> None:
        """Check an index into the messages, which must be a constant or next to `loop.index0`."""
        match at:
            case nodes.Const(value=int(index)) if index >= 0:
                self.head = max(self.head, index + 1)
            case nodes.Sub(left=left, right=nodes.Const(value=1)) if (
                place is _Place.LOOP and is_behind_first and _of_loop(left) == "index0"
            ):
                return  # the index is never -1, which would mean the last message
            case nodes.Add(left=left, right=nodes.Const(value=1)) if (
                place is _Place.LOOP and _of_loop(left) == "index0"
            ):
                return
            case _:
                raise _NotGrowingError

    def _either(self, node: nodes.And | nodes.Or, place: _Place, *, is_behind_first: bool) -> None:
        left = node.left
        # `messages` as a condition is always true, because the list is never empty.
        if not _is_name(left, MESSAGES):
            self.visit(left, place, is_behind_first=is_behind_first)
        if place is _Place.LOOP:
            is_first = isinstance(node, nodes.Or) and _is_first_flag(left)
            is_later = isinstance(node, nodes.And) and _is_later_flag(left)
            is_behind_first = is_behind_first or is_first or is_later
        self.visit(node.right, place, is_behind_first=is_behind_first)


def _is_refused(node: nodes.Node, place: _Place) -> bool:
    """Return whether a node is not allowed at its position."""
    match node:
        case nodes.Name(name="loop"):
            return place in (_Place.LOOP, _Place.NOWHERE)
        case nodes.Name(name=name):
            return name == MESSAGES or name in _STATEFUL
        case nodes.NSRef() | nodes.Macro():
            return place is not _Place.BEFORE
        case nodes.Break():
            return place in (_Place.LOOP, _Place.NOWHERE)
        case _:
            return False


class _ShiftedLoop(NodeTransformer):
    """Corrects the variable `loop` of a loop that begins after the conversation's first messages.

    Indices count from the first message of the conversation. `loop.first` is always false.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the library's name
        node.iter = cast("nodes.Expr", self.visit(node.iter))
        return node  # this inner loop has its own `loop`

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802 - likewise
        return self._shifted(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - likewise
        return self._shifted(node)

    def _shifted(self, node: nodes.Getattr | nodes.Getitem) -> nodes.Node:
        line = node.lineno
        match _of_loop(node):
            case "index" | "index0":
                return nodes.Add(node, nodes.Name(KEPT, "load", lineno=line), lineno=line)
            case "first":
                return nodes.Const(False, lineno=line)
            case "previtem":
                at = nodes.Getattr(nodes.Name(_LOOP, "load"), "index0", "load", lineno=line)
                behind = nodes.Add(at, nodes.Name(KEPT, "load"), lineno=line)
                before = nodes.Sub(behind, nodes.Const(1), lineno=line)
                messages = nodes.Name(MESSAGES, "load", lineno=line)
                return nodes.Getitem(messages, before, "load", lineno=line)
            case _:
                return self.generic_visit(node)


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _of_loop(node: nodes.Node) -> str:
    """Return the attribute of `loop` that a node reads, or empty if it reads no attribute."""
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=name):
            return name
        case nodes.Getitem(node=nodes.Name(name="loop"), arg=nodes.Const(value=str(name))):
            return name
        case _:
            return ""


def _is_first_flag(node: nodes.Node) -> bool:
    return _of_loop(node) == "first" or _compares(node, "eq")


def _is_later_flag(node: nodes.Node) -> bool:
    is_negated = isinstance(node, nodes.Not) and _is_first_flag(node.node)
    return is_negated or _compares(node, "gt") or _compares(node, "ne")


def _compares(node: nodes.Node, how: str) -> bool:
    """Return whether a node compares the message's index with 0 by the operator `how`."""
    match node:
        case nodes.Compare(expr=expr, ops=[nodes.Operand(op=op, expr=nodes.Const(value=0))]):
            return op == how and _of_loop(expr) == "index0"
        case _:
            return False
