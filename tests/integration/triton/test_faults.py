"""Faults on command, in a real Triton: the file is written while the engine runs."""

import time

import pytest

from replica.agent.golden import GoldenTarget, probe_engine
from replica.agent.replica_state import EngineSpec
from sluice.artifacts import import_directory
from sluice.wire.agent.v1 import agent_pb2 as agent
from sluice.wire.engine.v1 import engine_pb2 as wire
from tests.support.random_models import write_random_model
from tests.support.tritons import running_triton

pytestmark = pytest.mark.real
STALL_S = 0.8


async def test_a_file_stalls_fails_and_corrupts_a_running_engine(
    tmp_path, router_of, make_sequence
) -> None:
    faults = tmp_path / "faults.json"
    options = (("blocks", "256"), ("cost_step_s", "0.002"), ("faults_file", str(faults)))
    write_random_model(tmp_path / "base")
    digest = import_directory(tmp_path / "base", tmp_path / "artifacts")
    spec = EngineSpec("sim", digest, options)
    async with running_triton(tmp_path, spec) as triton, router_of(triton) as router:
        await router.finish(make_sequence(1, [5, 6], 20))

        begun_s = time.monotonic()
        faults.write_text(f'[{{"kind": "stall", "amount": {STALL_S}}}]')
        await router.finish(make_sequence(2, [5, 6], 20))
        # The step that stands still may be the last one of the sequence before, of which no frame
        # tells.
        assert time.monotonic() - begun_s >= 0.9 * STALL_S
        assert router.tokens[2] == router.tokens[1]

        faults.write_text('[{"kind": "corrupt", "at_step": 5}]')
        await router.finish(make_sequence(3, [5, 6], 20))
        assert router.tokens[3][:4] == router.tokens[1][:4]
        assert router.tokens[3] != router.tokens[1]

        faults.write_text('[{"kind": "fail"}]')
        await router.finish(make_sequence(4, [5, 6], 20))
        assert router.finished[4].reason == wire.FINISH_REASON_FAILED
        assert "on command" in router.finished[4].message
        await router.finish(make_sequence(5, [5, 6], 20))
        assert router.tokens[5] == router.tokens[1]

        asked = GoldenTarget("r1", triton.address, "sim", digest)
        golden = agent.GoldenPrompt(base_digest=digest, token_ids=[5] * 70, output_tokens_max=9)
        honest = [list((await probe_engine(asked, golden)).tokens) for _ in range(2)]
        faults.write_text('[{"kind": "corrupt", "at_step": 3}]')
        lie = list((await probe_engine(asked, golden)).tokens)
        assert honest[0] == honest[1]
        assert len(lie) == len(honest[0]) == 9
        assert lie != honest[0], "a golden prompt finds what health does not"
