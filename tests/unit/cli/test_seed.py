"""The tiers of a fresh stack, and the deadline of the first token with which admission counts."""

from cli.stack.seed import TIERS
from sluice.deadlines import DEADLINE_MS_MAX, admission_ms


def test_people_wait_at_most_one_and_a_half_seconds_and_batch_work_has_no_deadline():
    told = {
        name: admission_ms(
            tier.get("ttft_deadline_ms", 0), is_preemptible=tier.get("is_preemptible", False)
        )
        for name, tier in TIERS.items()
    }
    assert told == {"standard": 1_500, "free": 1_500, "batch": DEADLINE_MS_MAX}
    assert "ttft_deadline_ms" not in TIERS["batch"]
