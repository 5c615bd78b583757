"""Finds the parts of closed directories that engines of another user need.

A node's Python may be installed in a home directory that only its owner may enter. The home's
permissions stay unchanged. Instead, engines run in a mount namespace where the home contains only
the parts that they need (`engine_entry`).
"""

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Largest number of links followed for all paths together, because a cycle of links has no end
_LINKS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Closed:
    """A directory that a user may not enter, with the parts that the user needs.

    Attributes:
        trees: Files and directories in the directory that the user needs, with all their contents.
        links: Symbolic links on the way to these trees, with their targets.
    """

    trees: tuple[str, ...]
    links: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineView:
    """The closed directories on a user's paths, with the parts that the user needs.

    Attributes:
        closed: Closed directories by path, none of which is inside another.
        problem: Reason why the user cannot reach a path, and its remedy, or empty.
    """

    closed: Mapping[str, Closed] = field(default_factory=dict[str, Closed])
    problem: str = ""


def view_for(uid: int, paths: Iterable[Path]) -> EngineView:
    """Return the closed directories on the way to `paths`, for a user without further groups.

    Args:
        uid: User and group id.
        paths: Paths that the user needs. Links are followed, and missing paths are left out.
    """
    # Links stay in the paths, because engines open these very paths.
    waiting = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100
    trees: dict[str, set[str]] = {}
    links: dict[str, dict[str, str]] = {}
    followed = 0
    while waiting:
        way = _walk(waiting.pop(), uid)
        if way.link:
            followed += 1
            if followed > _LINKS_MAX:
                return EngineView(problem=f"{way.link} is a link of links without an end")
            waiting.append(way.end)
            if way.closed:
                links.setdefault(way.closed, {})[way.link] = way.target
        elif way.is_shut or way.closed == "/":
            return EngineView(problem=f"{way.end} is closed to user id {uid}: chmod o+x {way.end}")
        elif way.closed:
            trees.setdefault(way.closed, set()).add(str(way.end))
    return EngineView(
        {top: Closed(_outermost(found), links.get(top, {})) for top, found in trees.items()}
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """The result of following a path.

    Attributes:
        end: The path itself, or if it has a link, the path with the first link replaced by the
            link's target.
        closed: First directory on the path that the user may not enter, or empty.
        link: First symbolic link on the path, or empty.
        target: Target of the link.
        is_shut: Whether the whole path is a directory that the user may not enter.
    """

    end: Path
    closed: str = ""
    link: str = ""
    target: str = ""
    is_shut: bool = False


def _walk(path: Path, uid: int) -> _Way:
    closed, is_shut = "", False
    for part in (*reversed(path.parents), path):
        try:
            status = part.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return _Way(path)  # the program that creates a missing path makes it accessible
        if stat.S_ISLNK(status.st_mode):
            target = str(part.readlink())
            aim = os.path.normpath(part.parent / target)
            return _Way(Path(aim, path.relative_to(part)), closed, str(part), target)
        is_shut = stat.S_ISDIR(status.st_mode) and not _may_enter(status, uid)
        if is_shut and not closed:
            closed = str(part)
    return _Way(path, closed, is_shut=is_shut)


def _may_enter(status: os.stat_result, uid: int) -> bool:
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == uid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that are not inside another path."""
    kept: list[str] = []
    for path in sorted(paths):
        if not any(Path(path).is_relative_to(other) for other in kept):
            kept.append(path)
    return tuple(kept)
