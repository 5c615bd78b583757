"""The questions of the moment, kept up to date."""

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.quality.askings import Prompt, current
from control_plane.quality.board import Board
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

BASES = ["a" * 64, "b" * 64]
MODELS = ["m0", "m1", "m2"]


@st.composite
def states(draw: st.DrawFn) -> ControlState:
    state = ControlState()
    for base in draw(st.sets(st.sampled_from(BASES))):
        state.pools[base] = wire.Pool(id=base, base_digest=base, engine="sim")
    for model in draw(st.sets(st.sampled_from(MODELS))):
        about = {"base_digest": draw(st.sampled_from(BASES)), "adapter_digest": "c" * 64}
        owner = draw(st.sampled_from(["", "acme", "other"]))
        state.models[model] = wire.Model(id=model, owner_tenant_id=owner, **about)
        if draw(st.booleans()):
            base = draw(st.sampled_from(BASES))
            key = f"{model}@v2"
            state.releases[key] = wire.Release(id=key, model_id=model, base_digest=base)
            state.splits[model] = wire.Split(id=model, control="v1", canary="v2")
    return state


PROMPTS = st.builds(
    Prompt,
    st.sampled_from([f"golden_{n}" for n in range(6)]),
    st.sampled_from(MODELS),
    st.just((1, 2)),
    st.just(4),
    st.sampled_from([10, 60]),
    st.sampled_from([(), (7,)]),
)
BOARDS = st.tuples(states(), st.lists(PROMPTS, unique_by=lambda one: one.id, max_size=6))


@settings(max_examples=80)
@given(steps=st.lists(BOARDS, min_size=1, max_size=6), round_=st.integers(0, 1000))
def test_an_updated_board_equals_a_new_one(steps, round_) -> None:
    board = Board()
    for state, prompts in steps:
        ordered = tuple(sorted(prompts, key=lambda one: one.id))
        for given_prompts in (ordered, tuple(ordered)):
            board.update(state, given_prompts)
        assert board.askings == current(state, ordered)
        fresh = Board()
        fresh.update(state, ordered)
        for bases in ([], BASES[:1], BASES):
            told = board.prompts_of(bases, round_)
            assert told == fresh.prompts_of(bases, round_)
            wanted = {one.id for one in board.askings.values() if one.base_digest in bases}
            assert {one.id for one in told} == wanted, "there is room for all"


def test_an_unchanged_board_is_not_computed_again() -> None:
    state, board = ControlState(), Board()
    state.pools["p"] = wire.Pool(id="p", base_digest=BASES[0], engine="sim")
    state.models["m0"] = wire.Model(id="m0", base_digest=BASES[0])
    prompts = (Prompt("golden_1", "m0", (1,), 4, 60),)
    board.update(state, prompts)
    told, askings = board.prompts_of(BASES, 1), board.askings
    state.models["m9"] = wire.Model(id="m9", base_digest=BASES[0])
    board.update(state, prompts)
    assert board.askings is askings
    assert board.prompts_of(BASES, 1) is told
    state.models["m0"].adapter_digest = "d" * 64
    board.update(state, prompts)
    assert board.prompts_of(BASES, 1) != told
