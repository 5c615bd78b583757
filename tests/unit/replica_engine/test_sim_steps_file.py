from replica.drivers.sim import load_sim
from replica.engine.types import SequenceRequest


def test_every_step_leaves_a_line_with_its_end(clock, tmp_path) -> None:
    path = tmp_path / "steps"
    options = {"cost_step_s": 1.0, "cost_decode_row_s": 0, "cost_prefill_token_s": 0}
    options |= {"cost_context_token_s": 0, "steps_file": str(path)}
    engine = load_sim(None, "base", options, clock=clock, sleep=clock.sleep)
    began_s = clock.now_s
    engine.add(SequenceRequest(1, [5], 3))
    while engine.has_work:
        engine.step()
    ends = [float(line) - began_s for line in path.read_text().splitlines()]
    assert ends == [1.0, 2.0, 3.0]
