"""Tests that a nonsensical sequence ends once on the real engines, and harms no other one."""

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replica.drivers.openvino import load_openvino
from replica.drivers.sim import load_sim
from replica.engine.types import RefusedError
from replica.host.core import HostCore
from replica.host.frames import FrameEncoder
from sluice.wire.engine.v1 import engine_pb2 as wire
from tests.support.random_models import write_random_model

U32, U64 = 2**32 - 1, 2**64 - 1
counts = st.sampled_from([0, 1, 2, 3, 7, 100, 2**16, 2**31 - 1, 2**31, U32])
floats = st.sampled_from(
    [0.0, 0.5, 1.0, -1.0, 2.0, 1e-30, 3e38, math.inf, -math.inf, math.nan, 1000.0]
)
seeds = st.none() | st.sampled_from([0, 1, 2**63, U64])
token_ids = st.lists(st.sampled_from([0, 1, 5, 300, 470, 471, 2**31, U32]), max_size=4)
grammars = st.none() | st.builds(
    wire.Grammar,
    kind=st.sampled_from([0, 1, 2, 3, 4, 5, 6, 2**31 - 1]),
    text=st.sampled_from(["", "{", "[]", '["a"]', "a+", "(", 'start: "a"', "\x00", "{}"]),
)
samplings = st.none() | st.builds(
    wire.Sampling,
    temperature=floats,
    top_p=floats,
    top_k=counts,
    seed=seeds,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    bias_token=token_ids,
    logit_bias=st.lists(floats, max_size=4),
    tokens_min=counts,
    logprobs=st.none() | counts,
    grammar=grammars,
)
sequences = st.builds(
    wire.Sequence,
    id=st.sampled_from([1, 2, 3, 2**63, U64]),
    prompt=st.lists(st.sampled_from([5, 6, 7]), min_size=1, max_size=70) | token_ids,
    output_tokens_max=st.sampled_from([0, 1, 3, U32]) | st.integers(1, 4),
    stop_token_ids=token_ids,
    sampling=samplings,
    cache_root=st.sampled_from([b"", b"c" * 16, b"short", b"x" * 100]),
    adapter_digest=st.sampled_from(["", "", "", "a" * 64, "../x"]),
    priority=counts,
    ignore_eos=st.booleans(),
    forks=st.lists(
        st.builds(wire.Fork, id=st.sampled_from([1, 4, 5, U64]), seed=seeds), max_size=3
    ),
    resumed_tokens=st.sampled_from([0, 0, 1, 50, U32]),
    prompt_logprobs=st.none() | counts,
    draft_tokens_max=st.sampled_from([0, 0, 1, 4, U32]),
)


class Soon:
    """Runs the work of background threads between two steps."""

    def __init__(self) -> None:
        self.jobs = []

    def run(self, work, done) -> bool:
        self.jobs.append((work, done))
        return True

    def finish_all(self) -> None:
        jobs, self.jobs = self.jobs, []
        for work, done in jobs:
            try:
                outcome = work()
            except RefusedError as error:
                outcome = error
            done(outcome)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("garbage") / "base"
    write_random_model(directory)
    return directory


@pytest.fixture(scope="module", params=["sim", "openvino"])
def driver(request: pytest.FixtureRequest, directory: Path):
    if request.param == "sim":
        return load_sim(directory, "base", {"speed": 1e9, "blocks": 64})
    return load_openvino(directory, "base", {"blocks": 64, "precision": "f32"})


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(nonsense=st.lists(sequences, max_size=5))
def test_nonsense_ends_alone(driver, directory: Path, nonsense: list[wire.Sequence]) -> None:
    while driver.has_work:  # sequences of an example that failed
        driver.step()
    pool = Soon()
    core = HostCore(
        driver,
        "base",
        waiting_max=100,
        entropy=lambda: 7,
        background=pool,
        compilers=pool,
        artifacts_dir=directory.parent,
    )
    attachment, _ = core.attach(wire.Attach(router_id="r", epoch=1, credit_frames=10**6), 0.0)
    encoder = FrameEncoder(64)
    good = wire.Sequence(id=99, prompt=[5, 6, 7], output_tokens_max=3, ignore_eos=True)
    core.submit(1, nonsense, 0.0)
    core.submit(1, [good], 0.0)
    named = [message.id for message in nonsense]
    named += [fork.id for message in nonsense for fork in message.forks]
    owed = {message.id for message in nonsense} | {99}
    # A message with the id of a living sequence counts as its repetition, and its forks, too.
    unrepeated = (message for message in nonsense if named.count(message.id) == 1)
    owed |= {fork.id for message in unrepeated for fork in message.forks}
    finished: dict[int, wire.Finished] = {}
    brought: dict[int, int] = {}
    for number in range(5000):
        pool.finish_all()
        core.publish(core.step(), number * 1e-3)
        news, _ = attachment.outbox.take(0)
        if news is not None:
            frame = wire.HostFrame.FromString(encoder.encode(news)).step
            for sequence, count in zip(frame.sequence, frame.count, strict=True):
                brought[sequence] = brought.get(sequence, 0) + count
            finished |= {end.sequence: end for end in frame.finished}
        if not len(core.sequences):
            break
    assert owed <= finished.keys() <= {*named, 99}
    assert finished[99].reason == wire.FINISH_REASON_LENGTH
    assert brought[99] == 3
    for end in finished.values():
        is_explained = end.reason in (wire.FINISH_REASON_STOP, wire.FINISH_REASON_LENGTH)
        assert is_explained or (end.code and end.message)
