"""The present golden prompts, and their messages for each node. Pure, updated incrementally.

An asking is a golden prompt for one base and adapter (`Asking`). The state changes frequently, and
thousands of models may have prompts. So only models whose releases or prompts have changed are
recomputed. Nodes with the same bases share one list per round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from control_plane.quality.askings import About, Asking, Prompt, about_model, defaults, put
from control_plane.quality.messages import Messages
from control_plane.quality.shares import Item, chosen, item_of
from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2 as wire

Prompts = tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class _Model:
    """The askings of a model, with the prompts and facts from which they are derived."""

    about: About | None
    prompts: Prompts
    askings: tuple[Asking, ...]
    items: tuple[Item, ...]


class Board:
    """The askings of all models.

    Attributes:
        askings: All askings, by id.
    """

    def __init__(self) -> None:
        self.askings: dict[str, Asking] = {}
        self._prompts: Prompts = ()
        self._of_model: dict[str, Prompts] = {}
        self._models: dict[str, _Model] = {}
        self._defaults: list[Asking] = []
        self._items: dict[str, dict[str, list[Item]]] = {}  # items by base and owner
        self._messages = Messages()

    def update(
        self,
        state: ControlState,
        prompts: Prompts,
        token_ids: Mapping[str, Sequence[tuple[int, ...]]] = MappingProxyType({}),
    ) -> None:
        """Recompute the askings of changed models. `askings.defaults` describes `token_ids`."""
        if prompts is not self._prompts:
            self._prompts, self._of_model = prompts, _by_model(prompts, self._of_model)
        models: dict[str, _Model] = {}
        for model_id, own in self._of_model.items():
            about, known = about_model(state, model_id), self._models.get(model_id)
            if known is None or known.about != about or known.prompts is not own:
                known = _model(about, own)
            models[model_id] = known
        ordinary = defaults(state, token_ids)
        before, self._models = self._models, models
        is_same = before.keys() == models.keys() and all(
            before[model_id] is one for model_id, one in models.items()
        )
        if not is_same or ordinary != self._defaults:
            changed = {one.base_digest for one in {*ordinary} ^ {*self._defaults}}
            for model_id in before.keys() | models.keys():
                old, new = before.get(model_id), models.get(model_id)
                if old is not new:
                    changed |= _bases(old) | _bases(new)
            self._defaults = ordinary
            self._messages.forget(changed)
            self._arrange()

    def prompts_of(self, bases: Iterable[str], round_: int) -> list[wire.GoldenPrompt]:
        """Return the askings of a round for a node whose replicas have the given bases.

        Without a change, repeated calls return the same list object, which callers must not change.
        """
        key = frozenset(bases)

        def choose() -> list[Asking]:
            ordinary = [one for one in self._defaults if one.base_digest in key]
            return chosen(ordinary, self._owned(sorted(key)), round_)

        return self._messages.of(key, round_, choose)

    def _owned(self, bases: Sequence[str]) -> dict[str, list[Item]]:
        if len(bases) == 1:
            return self._items.get(bases[0], {})
        found: dict[str, list[Item]] = {}
        for base in bases:
            for owner, items in self._items.get(base, {}).items():
                found.setdefault(owner, []).extend(items)
        return {owner: sorted(items, key=_name) for owner, items in found.items()}

    def _arrange(self) -> None:
        """Sort the askings of all models by owner and prompt."""
        self._items = {}
        self.askings = {one.id: one for one in self._defaults}
        for model in self._models.values():
            for asking in model.askings:
                self.askings[asking.id] = asking
            for item in model.items:
                of_base = self._items.setdefault(item.askings[0].base_digest, {})
                of_base.setdefault(item.askings[0].owner, []).append(item)
        for of_base in self._items.values():
            for items in of_base.values():
                items.sort(key=_name)


def _bases(model: _Model | None) -> set[str]:
    return set() if model is None else {one.base_digest for one in model.askings}


def _model(about: About | None, prompts: Prompts) -> _Model:
    askings: list[Asking] = []
    items: list[Item] = []
    for prompt in prompts:
        own = [] if about is None else sorted(put(prompt, about), key=lambda one: one.id)
        askings += own
        for base in dict.fromkeys(one.base_digest for one in own):
            item = item_of([one for one in own if one.base_digest == base])
            items += () if item is None else (item,)
    return _Model(about, prompts, tuple(askings), tuple(items))


def _by_model(prompts: Iterable[Prompt], before: dict[str, Prompts]) -> dict[str, Prompts]:
    """Return the prompts of each model. An unchanged tuple is the same object as before."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.model_id, []).append(prompt)
    new = {model_id: tuple(own) for model_id, own in found.items()}
    return {m: before[m] if before.get(m) == own else own for m, own in new.items()}


def _name(item: Item) -> str:
    return item.askings[0].id
