"""Checks of numbers that look like the number of a payment card or an IBAN. Pure."""

from collections.abc import Callable

from sluice.guard.characters import UNSEEN, lookalike


def is_card(text: str) -> bool:
    """Return whether a text has a card's digits, with a valid Luhn sum and different digits."""
    digits = [int(it) for it in map(lookalike, text) if it.isdecimal()]
    doubled = [sum(divmod(2 * it, 10)) for it in digits[-2::-2]]
    return len(set(digits)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_account(text: str) -> bool:
    """Return whether a text is an IBAN, whose remainder by 97 is 1 (ISO 7064)."""
    signs = [lookalike(it) for it in text if it not in UNSEEN and not it.isspace()]
    signs = [it for it in signs if it != "-"]
    moved = signs[4:] + signs[:4]
    try:
        return int("".join([str(int(it, 36)) for it in moved])) % 97 == 1
    except ValueError:
        return False


CHECKS: dict[str, Callable[[str], bool]] = {"card": is_card, "iban": is_account}
