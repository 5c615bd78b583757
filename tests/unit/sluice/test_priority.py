"""One scale of priorities: tiers in their order, and within each tier its classes."""

from sluice.priority import CLASSES, TIER_PRIORITY_MAX, queue_priority


def test_classes_of_a_tier_go_before_all_lower_tiers() -> None:
    order = [queue_priority(tier, below) for tier in (9, 5, 4, 0) for below in range(CLASSES)]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == len(order)
    assert order[-1] == 0


def test_it_fits_the_wire() -> None:
    assert queue_priority(TIER_PRIORITY_MAX) == (1 << 32) - 1
    assert queue_priority((1 << 32) - 1) == (1 << 32) - 1
