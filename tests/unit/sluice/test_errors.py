from sluice.errors import STATUS, ErrorCode, PlatformError


def test_every_code_has_a_status() -> None:
    assert STATUS.keys() == set(ErrorCode)


def test_only_limits_of_the_caller_are_429_and_only_ours_are_503() -> None:
    assert {code for code in ErrorCode if STATUS[code] == 429} == {
        ErrorCode.RATE_LIMIT_REQUESTS,
        ErrorCode.RATE_LIMIT_TOKENS,
        ErrorCode.RATE_LIMIT_CONCURRENCY,
        ErrorCode.INSUFFICIENT_QUOTA,
        ErrorCode.TENANT_QUEUE_FULL,
    }
    assert STATUS[ErrorCode.QUEUE_FULL] == STATUS[ErrorCode.NO_CAPACITY] == 503


def test_an_error_knows_its_status() -> None:
    error = PlatformError(ErrorCode.QUEUE_FULL, "try later", retry_after_s=2)
    assert (error.status, str(error), error.retry_after_s) == (503, "try later", 2)
