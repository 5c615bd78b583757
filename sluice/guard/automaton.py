"""Finds all matches of many rules in a text that arrives in pieces. Pure, in linear time.

A candidate is a position of the text at which a match may have begun. A state of the automaton is
the list of open candidates, in the order of the text. Each candidate has a set of places, which are
nodes of the compiled expressions (see `places`) that the candidate may have reached. States are
created on demand.

Two candidates at the same place match the same following texts. Only the earlier candidate is
retained, because it covers more text. In rules with a further check of the match (for example the
digits of a card number), both candidates are retained.

A step is a transition by one character, and a leap is a transition by a piece of text, for example
a token. Steps and leaps are cached, so that most pieces need one look-up. The cache is emptied when
it is full.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from sluice.guard.characters import UNSEEN, Before, before
from sluice.guard.dictionaries import Dictionary, Spelt
from sluice.guard.places import Eats, Ends, Holds, Places, Spells

REMEMBERED_MAX = 100_000  # most cached steps and leaps per automaton, about 30 MB
LEAP_CHARACTERS_MAX = 24  # longest cached piece, as most pieces are tokens, which are shorter

Node = int | Spelt


class Find(NamedTuple):
    """The match of a rule.

    Attributes:
        origin: Start of the match, as the index of an open candidate, or `~n` for the position n
            characters after the start of the piece.
        end: End of the match, in characters from the start of the piece.
        rule: Index of the rule.
    """

    origin: int
    end: int
    rule: int


class AutomatonStep(NamedTuple):
    """The transition of a state by a piece of text.

    Attributes:
        state: State after the piece.
        origins: Origins of the candidates of `state`, numbered as in `Find`.
        finds: Matches, in the order of their ends.
        is_same: Whether all candidates are still open, and none is new.
    """

    state: "OpenCandidates"
    origins: tuple[int, ...]
    finds: tuple[Find, ...]
    is_same: bool


class OpenCandidates:
    """A state of the automaton, which is the open candidates at a position of the text.

    Attributes:
        left: Kind of the character before the position.
        groups: Places of each open candidate, the earliest candidate first.
        steps: Cached steps by the next character.
        leaps: Cached leaps by the next piece.
    """

    __slots__ = ("groups", "leaps", "left", "steps")

    def __init__(self, left: Before, groups: tuple[frozenset[Node], ...]) -> None:
        """Create a state without cached transitions."""
        self.left = left
        self.groups = groups
        self.steps: dict[str, AutomatonStep] = {}
        self.leaps: dict[str, AutomatonStep] = {}


class Automaton:
    """The rules of one kind of text.

    Attributes:
        start: The state before a text.
        made: Number of steps and leaps computed so far, for tests and benchmarks.
        remembered: Number of cached steps and leaps.
    """

    def __init__(
        self,
        places: Places,
        starts: Sequence[int],
        dictionaries: Sequence[Dictionary],
        checked: frozenset[int],
    ) -> None:
        """Create an automaton without cached transitions.

        Args:
            places: Places of all rules.
            starts: First places of the rules.
            dictionaries: Dictionaries by their index in `Spells`.
            checked: Indices of the rules with a further check of each match.
        """
        self._places = places.all
        self._closures = {
            it.behind: places.closure(it.behind)
            for it in places.all
            if isinstance(it, Eats | Holds | Spells)
        }
        self._fresh = frozenset[Node](it for start in starts for it in places.closure(start))
        self._conditions = frozenset(
            [number for number, it in enumerate(places.all) if isinstance(it, Holds)]
        )
        self._beginnings: dict[tuple[Before, str], frozenset[Node]] = {}
        self._dictionaries = dictionaries
        self._checked = checked
        self._kept = _places_of(checked, places, starts)
        self.remembered = 0
        self.made = 0
        self._states: dict[tuple[Before, tuple[frozenset[Node], ...]], OpenCandidates] = {}
        self.start = self._state(Before.NOTHING, ())

    def step(self, state: OpenCandidates, character: str) -> AutomatonStep:
        """Return the transition by the next character."""
        known = state.steps.get(character)
        if known is None:
            known = state.steps[character] = self._made_step(state, character)
            self._note(state)
        return known

    def leap(self, state: OpenCandidates, piece: str) -> AutomatonStep:
        """Return the transition by a piece, which is cached if the piece is short."""
        origins, finds, at = [*range(len(state.groups))], list[Find](), state
        for number, character in enumerate(piece):
            step = at.steps.get(character) or self.step(at, character)
            for it in step.finds:
                origin = origins[it.origin] if it.origin >= 0 else ~number
                finds.append(Find(origin, number + it.end, it.rule))
            if not step.is_same:
                origins = [origins[it] if it >= 0 else ~number for it in step.origins]
            at = step.state
        is_same = origins == [*range(len(state.groups))]
        result = AutomatonStep(at, tuple(origins), tuple(finds), is_same)
        if len(piece) <= LEAP_CHARACTERS_MAX:
            state.leaps[piece] = result
            self._note(state)
        return result

    def end(self, state: OpenCandidates) -> tuple[Find, ...]:
        """Return the matches that are complete only at the end of the text."""
        finds = list[Find]()
        for origin, group in enumerate(state.groups):
            finds += self._ended(self._resolved(group, state.left, None) - group, origin, 0)
        return self._visible_finds(finds)

    # --- transitions ------------------------------------------------------------------------

    def _made_step(self, state: OpenCandidates, character: str) -> AutomatonStep:
        if character in UNSEEN:
            return AutomatonStep(state, tuple(range(len(state.groups))), (), is_same=True)
        finds, groups, origins = list[Find](), list[frozenset[Node]](), list[int]()
        taken = set[Node]()
        for origin, group in enumerate(state.groups):
            resolved = self._resolved(group, state.left, character)
            if resolved is not group:
                finds += self._ended(resolved - group, origin, 0)
            moved = self._moved(resolved, character)
            finds += self._ended(moved, origin, 1)
            self._add(origin, moved, taken, groups, origins)
        moved = self._begun(state.left, character)
        finds += self._ended(moved, -1, 1)  # the origin -1 is ~0, a start at this character
        self._add(-1, moved, taken, groups, origins)
        is_same = origins == [*range(len(state.groups))]
        following = self._state(before(character), tuple(groups))
        return AutomatonStep(following, tuple(origins), self._visible_finds(finds), is_same)

    def _add(
        self,
        origin: int,
        moved: Collection[Node],
        taken: set[Node],
        groups: list[frozenset[Node]],
        origins: list[int],
    ) -> None:
        """Add a candidate that is still open, without places that earlier candidates have."""
        alive = frozenset([it for it in moved if it not in taken and not self._is_end(it)])
        if alive:
            groups.append(alive)
            origins.append(origin)
            taken |= alive - self._kept

    def _begun(self, left: Before, character: str) -> Collection[Node]:
        """Return the cached places of a new candidate that starts with a character."""
        known = self._beginnings.get((left, character))
        if known is None:
            moved = self._moved(self._resolved(self._fresh, left, character), character)
            known = self._beginnings[left, character] = frozenset(moved)
        return known

    def _resolved(self, group: frozenset[Node], left: Before, right: str | None) -> frozenset[Node]:
        """Return a group of places, extended by all places that follow fulfilled conditions."""
        waiting = [it for it in group if it in self._conditions]
        if not waiting:
            return group
        found = set(group)
        while waiting:
            node = waiting.pop()
            place = self._places[node] if isinstance(node, int) else None
            if isinstance(place, Holds) and place.condition.holds(left, right):
                new = [it for it in self._closures[place.behind] if it not in found]
                found.update(new)
                waiting += new
        return frozenset(found)

    def _moved(self, group: frozenset[Node], character: str) -> set[Node]:
        found = set[Node]()
        for node in group:
            if isinstance(node, Spelt):
                self._spell(node, character, found)
                continue
            place = self._places[node]
            if isinstance(place, Eats) and place.has(character):
                found.update(self._closures[place.behind])
            elif isinstance(place, Spells):
                words = self._dictionaries[place.dictionary].words
                self._spell(Spelt(node, 0, len(words), 0), character, found)
        return found

    def _spell(self, at: Spelt, character: str, found: set[Node]) -> None:
        place = self._places[at.spells]
        assert isinstance(place, Spells), "only words are spelt"
        dictionary = self._dictionaries[place.dictionary]
        following = dictionary.next(at, character)
        if following is None:
            return
        if dictionary.is_whole(following):
            found.update(self._closures[place.behind])
        if dictionary.is_open(following):
            found.add(following)

    def _ended(self, nodes: Iterable[Node], origin: int, end: int) -> list[Find]:
        places = [self._places[it] for it in nodes if isinstance(it, int)]
        return [Find(origin, end, it.rule) for it in places if isinstance(it, Ends)]

    def _is_end(self, node: Node) -> bool:
        return isinstance(node, int) and isinstance(self._places[node], Ends)

    def _visible_finds(self, finds: list[Find]) -> tuple[Find, ...]:
        """Return matches by their end. For rules without a check, only the earliest is returned."""
        if not finds:
            return ()
        told, seen = list[Find](), set[tuple[int, int]]()
        for it in sorted(finds, key=lambda it: it.end):
            if it.rule in self._checked:
                told.append(it)
            elif (it.end, it.rule) not in seen:
                seen.add((it.end, it.rule))
                told.append(it)
        return tuple(told)

    # --- cache ------------------------------------------------------------------------------

    def _state(self, left: Before, groups: tuple[frozenset[Node], ...]) -> OpenCandidates:
        known = self._states.get((left, groups))
        if known is None:
            known = self._states[left, groups] = OpenCandidates(left, groups)
        return known

    def _note(self, state: OpenCandidates) -> None:
        """Count a cached transition, and empty the cache when it is full.

        A text in progress still refers to its state object. This object is no longer shared with
        new texts, until the text reaches a newly created state.
        """
        self.made += 1
        self.remembered += 1
        if self.remembered > REMEMBERED_MAX:
            for it in [*self._states.values()]:
                it.steps.clear()
                it.leaps.clear()
            self._states.clear()
            self._beginnings.clear()
            self._states[self.start.left, self.start.groups] = self.start
            self._states[state.left, state.groups] = state
            self.remembered = 0


def _places_of(checked: frozenset[int], places: Places, starts: Sequence[int]) -> frozenset[Node]:
    """Return the places of rules with a check, at which several candidates are retained."""
    kept = set[Node]()
    for start in starts if checked else ():
        reached = _reached(places, start)
        if any(it.rule in checked for it in _ends(places, reached)):
            kept |= reached
    return frozenset(kept)


def _reached(places: Places, start: int) -> set[int]:
    found, waiting = set[int](), [start]
    while waiting:
        number = waiting.pop()
        if number in found:
            continue
        found.add(number)
        behind = getattr(places.all[number], "behind", ())
        waiting += behind if isinstance(behind, tuple) else (behind,)
    return found


def _ends(places: Places, numbers: Iterable[int]) -> list[Ends]:
    return [it for it in map(places.all.__getitem__, numbers) if isinstance(it, Ends)]
