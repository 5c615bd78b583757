"""A tool that fails again and again is left alone, and tried by one call later."""

from gateway.tools.breaker import ToolBreakers


def test_five_failures_in_a_row_open_it_and_one_call_tries_later() -> None:
    breakers = ToolBreakers()
    for _ in range(5):
        assert not breakers.refused_for_s("a", 0.0)
        breakers.note("a", 0.0, has_failed=True)
    assert breakers.refused_for_s("a", 5.0) == 10.0
    assert not breakers.refused_for_s("b", 5.0)
    assert not breakers.refused_for_s("a", 15.0)  # this one tries
    assert breakers.refused_for_s("a", 15.0)  # others wait for it
    breakers.note("a", 16.0, has_failed=True)
    assert breakers.refused_for_s("a", 16.0) == 15.0
    assert not breakers.refused_for_s("a", 31.0)
    breakers.note("a", 32.0, has_failed=False)
    assert not breakers.refused_for_s("a", 32.0)


def test_a_success_ends_the_row() -> None:
    breakers = ToolBreakers()
    for _ in range(20):
        for _ in range(4):
            breakers.note("a", 0.0, has_failed=True)
        breakers.note("a", 0.0, has_failed=False)
        assert not breakers.refused_for_s("a", 0.0)
