"""Sealed texts open with an installation's secrets, at the place that they were sealed for."""

import pytest

from sluice.sealing import Sealer, SealError
from sluice.shared_secret import SharedSecret

OLD, NEW = "o" * 32, "n" * 32
HEADERS = "headers of tools"


def sealer(*secrets: str, purpose: str = HEADERS) -> Sealer:
    return Sealer(SharedSecret(secrets), purpose)


def test_a_sealed_text_opens_at_its_place_alone() -> None:
    sealed = sealer(OLD).seal("Bearer sk-1", "t\0https://a")
    assert "sk-1" not in sealed
    assert sealer(OLD).opened(sealed, "t\0https://a") == "Bearer sk-1"
    for other, place in (
        (sealer(OLD), "t\0https://b"),
        (sealer(NEW), "t\0https://a"),
        (sealer(OLD, purpose="else"), "t\0https://a"),
    ):
        with pytest.raises(SealError):
            other.opened(sealed, place)


def test_two_seals_of_one_text_differ() -> None:
    assert sealer(OLD).seal("a", "p") != sealer(OLD).seal("a", "p")


def test_a_replaced_secret_still_opens_texts_sealed_by_the_old_one() -> None:
    sealed = sealer(OLD).seal("a", "p")
    both = sealer(NEW, OLD)
    assert both.opened(sealed, "p") == "a"
    assert sealer(NEW).opened(both.seal("b", "p"), "p") == "b"


@pytest.mark.parametrize("text", ["", "1.", "1.%%%", "1.AAAA", "é", "1." + "A" * 40])
def test_garbage_is_none(text: str) -> None:
    with pytest.raises(SealError):
        sealer(OLD).opened(text, "p")
