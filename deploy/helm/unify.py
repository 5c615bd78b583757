"""One template of several renders of one object: differences become conditions on values.

A *variant* is the set of switches that were on when kustomize rendered; variants of one object are
laid over one another. Alike parts stay as they are. Keys, and items with a name, that only some
variants have stand in an `if`; other differences in `if ... else if`.
"""  # noqa: INP001 - a script beside what it belongs to

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, cast

import yaml

Variant = frozenset[str]
Variants = Mapping[Variant, Any]


class Expression(str):
    """A value that Helm computes: written as it is, in the line of its key."""

    __slots__ = ()


class Block(str):
    """Lines that Helm computes, below a key or in the place of items; `INDENT` is their depth.

    Below a key that begins with `<` they are keys themselves, and that one is not written.
    """

    __slots__ = ()


def template(variants: Variants, switches: Mapping[str, str], depth: int = 0) -> list[str]:
    """Return the lines of the value that all `variants` have; ValueError for one that none tells.

    `switches` maps each switch to Helm's expression for it.
    """
    values = list(variants.values())
    if all(isinstance(it, dict) for it in values) and any(values):
        return _mapping(variants, switches, depth)
    if all(isinstance(it, list) for it in values) and _are_matched(values):
        return _items(variants, switches, depth)
    if any(it != values[0] for it in values):
        return _choice(variants, switches, depth)
    return _plain(values[0], switches, depth)


def condition(
    found: Iterable[Variant], every: Iterable[Variant], switches: Mapping[str, str]
) -> str:
    """Return the expression that is true in `found` and in no other of `every`; empty for all."""
    wanted, universe = set(found), set(every)
    if wanted == universe:
        return ""
    for name, text in switches.items():
        having = {it for it in universe if name in it}
        if having == wanted:
            return text
        if universe - having == wanted:
            return f"not {text}"
    for (one, first), (two, second) in itertools.combinations(switches.items(), 2):
        if {it for it in universe if one in it or two in it} == wanted:
            return f"or {first} {second}"
        if {it for it in universe if one in it and two in it} == wanted:
            return f"and {first} {second}"
    raise ValueError(f"no condition tells {wanted} from the rest of {universe}")


def _mapping(variants: Variants, switches: Mapping[str, str], depth: int) -> list[str]:
    parts: list[tuple[str, list[str]]] = []
    for key in _in_order([list(it) for it in variants.values()]):
        having = {name: it[key] for name, it in variants.items() if key in it}
        body = _under_key(key, having, switches, depth)
        parts.append((condition(having, variants, switches), body))
    return _wrapped(parts, depth)


def _under_key(key: str, having: Variants, switches: Mapping[str, str], depth: int) -> list[str]:
    groups, pad = _groups(having), " " * depth
    values = [having[group[0]] for group in groups]
    if key.startswith("<") or _is_below(values):
        head = [] if key.startswith("<") else [f"{pad}{_scalar(key)}:"]
        return [*head, *template(having, switches, depth + 2 * len(head))]
    if len(groups) == 1:
        return [f"{pad}{_scalar(key)}: {_scalar(values[0])}"]
    bodies = [
        (group, _under_key(key, {group[0]: value}, switches, depth))
        for group, value in zip(groups, values, strict=True)
    ]
    return _cases(bodies, having, switches, depth)


def _is_below(values: list[Any]) -> bool:
    """Return whether all values are written in the lines below their key."""
    if all(isinstance(it, list) for it in values):
        return any(values) and (len(values) == 1 or _are_matched(values))
    return all(isinstance(it, dict | Block) and bool(it) for it in values)


def _items(variants: Variants, switches: Mapping[str, str], depth: int) -> list[str]:
    parts: list[tuple[str, list[str]]] = []
    keys = {variant: _keys(items) for variant, items in variants.items()}
    for key in _in_order(list(keys.values())):
        having = {
            variant: items[keys[variant].index(key)]
            for variant, items in variants.items()
            if key in keys[variant]
        }
        body = _item(having, switches, depth)
        parts.append((condition(having, variants, switches), body))
    return _wrapped(parts, depth)


def _item(having: Variants, switches: Mapping[str, str], depth: int) -> list[str]:
    first = next(iter(having.values()))
    if isinstance(first, Block):
        return [first.replace("INDENT", str(depth))]
    lines = template(having, switches, depth + 2)
    if not lines[0].startswith(" " * (depth + 2)):
        # A condition comes first: the dash has a line of its own.
        return [" " * depth + "-", *lines]
    return [f"{' ' * depth}- {lines[0][depth + 2 :]}", *lines[1:]]


def _choice(variants: Variants, switches: Mapping[str, str], depth: int) -> list[str]:
    groups = _groups(variants)
    bodies = [
        (group, template({it: variants[it] for it in group}, switches, depth)) for group in groups
    ]
    return _cases(bodies, variants, switches, depth)


def _cases(
    bodies: list[tuple[list[Variant], list[str]]],
    variants: Variants,
    switches: Mapping[str, str],
    depth: int,
) -> list[str]:
    pad, lines = " " * depth, list[str]()
    # The commonest comes last: it needs no condition.
    bodies = sorted(bodies, key=lambda it: len(it[0]))
    for position, (group, body) in enumerate(bodies[:-1]):
        word = "else if" if position else "if"
        lines += [f"{pad}{{{{- {word} {condition(group, variants, switches)} }}}}", *body]
    return [*lines, f"{pad}{{{{- else }}}}", *bodies[-1][1], f"{pad}{{{{- end }}}}"]


def _plain(value: Any, switches: Mapping[str, str], depth: int) -> list[str]:
    pad = " " * depth
    if isinstance(value, Block):
        return [value.replace("INDENT", str(depth))]
    if isinstance(value, list) and value:
        return [
            line
            for it in cast("list[Any]", value)
            for line in (
                _item({frozenset(): it}, switches, depth)
                if isinstance(it, dict) and it
                else [f"{pad}- {_scalar(it)}"]
            )
        ]
    return [pad + _scalar(value)]


def _scalar(value: Any) -> str:
    if isinstance(value, Expression):
        return str(value)
    if value in ({}, []):
        return "{}" if value == {} else "[]"
    written = yaml.safe_dump(value, width=10_000, default_flow_style=True, allow_unicode=True)
    return written.removesuffix("\n").removesuffix("\n...")


def _wrapped(parts: list[tuple[str, list[str]]], depth: int) -> list[str]:
    """Return the lines of all parts, neighbours with the same condition in one `if`."""
    pad, lines = " " * depth, list[str]()
    for when, group in itertools.groupby(parts, key=lambda it: it[0]):
        body = [line for _, part in group for line in part]
        lines += [f"{pad}{{{{- if {when} }}}}", *body, f"{pad}{{{{- end }}}}"] if when else body
    return lines


def _groups(variants: Variants) -> list[list[Variant]]:
    groups: list[tuple[Any, list[Variant]]] = []
    for variant, value in variants.items():
        for known, members in groups:
            if known == value:
                members.append(variant)
                break
        else:
            groups.append((value, [variant]))
    return [members for _, members in groups]


def _are_matched(lists: list[list[Any]]) -> bool:
    """Return whether each item of one list is known in the others: by its name, or its place."""
    items = [it for found in lists for it in found]
    if not items or not all(isinstance(it, dict | Block) for it in items):
        return False
    return all("name" in it or isinstance(it, Block) for it in items) or (
        len({len(found) for found in lists}) == 1
    )


def _keys(items: list[Any]) -> list[str]:
    return [
        it if isinstance(it, Block) else it.get("name", str(place))
        for place, it in enumerate(items)
    ]


def _in_order(sequences: list[list[str]]) -> list[str]:
    """Return all names once; each follows the name that it followed where it was first seen."""
    merged: list[str] = []
    for names in sequences:
        place = 0
        for name in names:
            if name in merged:
                place = merged.index(name) + 1
            else:
                merged.insert(place, name)
                place += 1
    return merged
