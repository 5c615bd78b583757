from sluice.errors import (
    POLICIES,
    EngineRefusal,
    ErrorCode,
    ErrorEvidence,
    PlatformError,
    policy_of,
)


def test_every_code_has_a_policy() -> None:
    assert POLICIES.keys() == set(ErrorCode)
    assert all(policy_of(str(code)) is code.policy for code in ErrorCode)
    assert policy_of("stop") is None


def test_a_retried_code_is_no_fault_of_the_caller() -> None:
    for code in ErrorCode:
        policy = code.policy
        assert not policy.moves or policy.is_asked_again
        assert not policy.is_asked_again or policy.status == 503
        assert not (policy.lets_stand_in and policy.is_passed_over), "one says both"
        assert not policy.goes_to_control or policy.release is ErrorEvidence.FAULT
        assert not policy.is_of_engine or 400 <= policy.status < 500
        assert not policy.is_costly_again or policy.is_asked_again
        assert not policy.is_tried_elsewhere or policy.status >= 500
        assert not policy.is_failure or policy.is_abort, "a failed request is not whole"
        assert policy.from_engine is EngineRefusal.REQUEST or policy.status >= 500


def test_a_client_that_hangs_up_aborts_its_request_and_is_no_failure() -> None:
    assert {code for code in ErrorCode if code.policy.is_abort and not code.policy.is_failure} == {
        ErrorCode.CLIENT_CLOSED
    }
    assert [code for code in ErrorCode if not code.policy.is_abort] == [ErrorCode.CONTENT_FILTER]


def test_only_limits_of_the_caller_are_429_and_only_ours_are_503() -> None:
    assert {code for code in ErrorCode if code.policy.status == 429} == {
        ErrorCode.RATE_LIMIT_REQUESTS,
        ErrorCode.RATE_LIMIT_TOKENS,
        ErrorCode.RATE_LIMIT_CONCURRENCY,
        ErrorCode.INSUFFICIENT_QUOTA,
        ErrorCode.TENANT_QUEUE_FULL,
    }
    assert ErrorCode.QUEUE_FULL.policy.status == ErrorCode.NO_CAPACITY.policy.status == 503


def test_an_error_knows_its_status() -> None:
    error = PlatformError(ErrorCode.QUEUE_FULL, "try later", retry_after_s=2)
    assert (error.status, str(error), error.retry_after_s) == (503, "try later", 2)
