"""Computes the order in which processes start and stop from their dependencies, without I/O."""

from collections.abc import Collection, Mapping


def waves(waits_for: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the names in layers, in which each name is later than all its dependencies.

    Within a layer the names have the order of the mapping.

    Raises:
        ValueError: There is a cycle, or an undefined name.
    """
    unknown = {other for others in waits_for.values() for other in others} - waits_for.keys()
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    left = dict(waits_for)
    done: set[str] = set()
    layers: list[list[str]] = []
    while left:
        layer = [name for name, others in left.items() if done.issuperset(others)]
        if not layer:
            raise ValueError(f"cycle among {', '.join(sorted(left))}")
        layers.append(layer)
        done.update(layer)
        left = {name: others for name, others in left.items() if name not in done}
    return layers


def users(uses: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Return for each name the names that use it and must stop before it.

    Raises:
        ValueError: A name is undefined.
    """
    used_by: dict[str, set[str]] = {name: set() for name in uses}
    for name, others in uses.items():
        for other in others:
            if other not in used_by:
                raise ValueError(f"unknown: {other}")
            used_by[other].add(name)
    return used_by
