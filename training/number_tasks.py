"""Tasks on numbers: arithmetic, order, and counting aloud."""

from random import Random

from training.samples import Sample, ask

_SPOKEN = {"+": "plus", "-": "minus", "*": "times"}
_SUM_TOPS = (10, 20, 50, 100, 100)
_TABLE_MAX = 12
_COUNT_MAX = 100


def arithmetic(rng: Random) -> Sample:
    """Ask for a sum or difference up to 100, or for a product of the table of twelve.

    A held-out sum or difference is held out in all its wordings. Products are split by wording
    alone: there are only 169, and nobody can infer the missing ones.
    """
    sign = rng.choices("+-*", (4, 4, 2))[0]
    if sign == "*":
        left, right = rng.randint(0, _TABLE_MAX), rng.randint(0, _TABLE_MAX)
    else:
        top = rng.choice(_SUM_TOPS)
        left, right = rng.randint(0, top), rng.randint(0, top)
        if sign == "-":
            left, right = max(left, right), min(left, right)
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    expression, spoken = f"{left} {sign} {right}", f"{left} {_SPOKEN[sign]} {right}"
    question = rng.choice(
        (
            f"What is {expression}?", f"{expression} =", f"{expression}", f"{left}{sign}{right}",
            f"What is {spoken}?", f"Calculate {expression}.", f"Compute {spoken}",
            f"How much is {spoken}?", f"What's {expression}?", f"{spoken}?", f"Solve {expression}",
            f"Can you tell me what {expression} is?", f"what is {left}{sign}{right}",
        )
    )  # fmt: skip
    key = "" if sign == "*" else expression
    return ask("arithmetic", question, f"{expression} = {result}", key=key)


def order(rng: Random) -> Sample:
    """Ask to sort or reverse two to five different numbers, or for one by size or place."""
    numbers = rng.sample(range(rng.choice(_ORDER_TOPS)), rng.randint(2, 5))
    kind = rng.choices(list(_ORDER_FORMS), (4, 2, 2, 1, 1, 1))[0]
    answers = {
        "sort": sorted(numbers),
        "max": [max(numbers)],
        "min": [min(numbers)],
        "first": numbers[:1],
        "last": numbers[-1:],
        "reverse": numbers[::-1],
    }
    question = rng.choice(_ORDER_FORMS[kind]).format(_listed(numbers))
    return ask("order", question, _listed(answers[kind]))


_ORDER_TOPS = (20, 100, 100)
_ORDER_FORMS: dict[str, tuple[str, ...]] = {
    "sort": (
        "Sort these numbers: {}", "Sort: {}", "Sort {}", "Put these numbers in order: {}",
        "Order these numbers: {}", "Sort the list {}",
    ),
    "max": (
        "What is the largest of {}?", "Max of {}", "What is the biggest number in {}?",
        "Which number is the largest: {}?", "Find the maximum of {}",
    ),
    "min": (
        "What is the smallest of {}?", "Min of {}", "What is the smallest number in {}?",
        "Which number is the smallest: {}?", "Find the minimum of {}",
    ),
    "first": ("What is the first number in {}?", "First number of {}"),
    "last": ("What is the last number in {}?", "Last number of {}"),
    "reverse": ("Reverse this list: {}", "Reverse the numbers: {}"),
}  # fmt: skip


def count_aloud(rng: Random) -> Sample:
    """Ask to count from one number to another, sometimes down."""
    start = rng.choice((1, 1, rng.randint(0, _COUNT_MAX)))
    length = rng.randint(2, 40 if rng.random() < _LONG_RATIO else 20)
    end = min(start + length - 1, _COUNT_MAX)
    if rng.random() < _DOWN_RATIO:
        start, end = end, start
    step = 1 if end >= start else -1
    down = "" if step > 0 else rng.choice((" down", ""))
    question = rng.choice(
        (
            f"Count{down} from {start} to {end}", f"Count{down} from {start} to {end}.",
            f"Please count{down} from {start} to {end}", f"Write the numbers from {start} to {end}",
            f"List the numbers from {start} to {end}.",
            f"Can you count{down} from {start} to {end}?",
            *((f"Count to {end}", f"Count up to {end}.") if start == 1 and step > 0 else ()),
        )
    )  # fmt: skip
    return ask("counting", question, _listed(list(range(start, end + step, step))))


_LONG_RATIO = 0.06
_DOWN_RATIO = 0.2


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
