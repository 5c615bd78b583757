"""Says which tests run in which ring: `make test` runs ring one, `make test-all` both.

Ring one proves each promise at the cheapest level that can fail. Ring two repeats them on whole
stacks, with real processes killed, frozen and upgraded, and takes three times as long. A file with
less than 10 s of tests belongs to ring one.
"""

from tests.stacks import file_of

ONE, TWO, ALL = "one", "two", "all"
RINGS = (ONE, TWO, ALL)
# Hypothesis examples per test in ring one; ring two and a run of all use its default of 100.
EXAMPLES_OF_ONE = 25
_SHARE_OF_ONE = 4  # a test with a number of its own looks at a quarter of it

_E2E_OF_ONE = frozenset({"test_openai_sdk.py", "test_promises.py"})
_TWO = frozenset(
    {
        "tests/contract/test_golden_mutations.py",
        "tests/contract/test_pool_service.py",
        "tests/contract/test_scores.py",
        "tests/integration/agent/test_adoption.py",
        "tests/integration/agent/test_agent.py",
        "tests/integration/agent/test_cordon.py",
        "tests/integration/gateway/test_absence.py",
        "tests/integration/gateway/test_base_files.py",
        "tests/integration/gateway/test_batches.py",
        "tests/integration/gateway/test_churn.py",
        "tests/integration/gateway/test_embedding_faults.py",
        "tests/integration/gateway/test_failover.py",
        "tests/integration/gateway/test_http2_behaviour.py",
        "tests/integration/gateway/test_limits_shared.py",
        "tests/integration/gateway/test_processes.py",
        "tests/integration/gateway/test_saturation.py",
        "tests/integration/gateway/test_stream_chaos.py",
        "tests/integration/gateway/test_worker_signals.py",
        "tests/integration/gateway/test_workers.py",
        "tests/integration/test_bases_ahead.py",
        "tests/integration/test_cli_artifacts.py",
        "tests/integration/test_compiled_core.py",
        "tests/integration/test_control_plane_accusations.py",
        "tests/integration/test_control_plane_adapters.py",
        "tests/integration/test_control_plane_artifacts_cli.py",
        "tests/integration/test_control_plane_artifacts_faults.py",
        "tests/integration/test_control_plane_artifacts_garbage.py",
        "tests/integration/test_control_plane_artifacts_import.py",
        "tests/integration/test_control_plane_artifacts_versions.py",
        "tests/integration/test_control_plane_cells.py",
        "tests/integration/test_control_plane_leader.py",
        "tests/integration/test_control_plane_consolidation.py",
        "tests/integration/test_control_plane_outage.py",
        "tests/integration/test_control_plane_rollouts.py",
        "tests/integration/test_control_plane_rollouts_bases.py",
        "tests/integration/test_control_plane_rollouts_faults.py",
        "tests/integration/test_control_plane_rollouts_gone.py",
        "tests/integration/test_control_plane_scaling.py",
        "tests/integration/test_disaggregation.py",
        "tests/integration/test_distribution.py",
        "tests/integration/test_stack.py",
        "tests/integration/test_telemetry_closings.py",
        "tests/integration/test_telemetry_events.py",
        "tests/integration/test_telemetry_rollups.py",
        "tests/integration/test_telemetry_service.py",
        "tests/integration/test_telemetry_texts.py",
        "tests/integration/test_triton_embed.py",
        "tests/integration/test_wheel.py",
        "tests/integration/triton/test_wire.py",
        "tests/simulation/test_tier_gate.py",
        "tests/unit/test_extras.py",
        "tests/unit/test_images.py",
        "tests/unit/training/test_chat.py",
    }
)


def ring_of(nodeid: str) -> str:
    """Return the ring of a test."""
    file = file_of(nodeid)
    if file.startswith("tests/e2e/"):
        return ONE if file.removeprefix("tests/e2e/") in _E2E_OF_ONE else TWO
    return TWO if file in _TWO else ONE


def is_of(ring: str, file: str) -> bool:
    """Return whether a run of a ring takes this file's tests."""
    return ring in {ALL, ring_of(file)}


def examples_of_one(full: int) -> int:
    """Return how many examples ring one looks at, of what a test looks at in a run of all."""
    return max(min(full, EXAMPLES_OF_ONE), full // _SHARE_OF_ONE)


def named_files() -> frozenset[str]:
    """Return the files that this module names."""
    return _TWO | {f"tests/e2e/{name}" for name in _E2E_OF_ONE}
