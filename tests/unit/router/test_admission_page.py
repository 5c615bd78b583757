"""docs/overload.md against the code: its codes, its order and its numbers."""

import re
from pathlib import Path

from router.core.decide import admission, forecast, preemption
from sluice.errors import ErrorCode

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "overload.md").read_text()
TEXT = " ".join(PAGE.split())  # whatever line a word is in


def test_the_table_has_the_codes_of_admission_with_their_statuses():
    rows = re.findall(r"^\| \d \| [^|]+\| (\d{3}) `(\w+)`[^|]*\|", PAGE, re.MULTILINE)
    source = Path(admission.__file__).read_text()
    assert {ErrorCode(code) for _, code in rows} == {
        ErrorCode[name] for name in re.findall(r"ErrorCode\.([A-Z_]+)", source)
    }
    assert all(ErrorCode(code).policy.status == int(status) for status, code in rows)


def test_the_numbers_equal_the_code():
    low, high = forecast.RETRY_AFTER_MIN_S, forecast.RETRY_AFTER_MAX_S
    assert f"Between {low:g} and {high:g} s" in TEXT
    assert f"{forecast.RETRY_AFTER_UNKNOWN_S:g} s when no replica is attached" in TEXT
    assert f"between {forecast.CORRECTION_MIN:g} and {forecast.CORRECTION_MAX:g};" in TEXT
    assert f"at most {preemption.PREEMPTIONS_MAX} times" in TEXT
    assert TEXT.count(f"{admission.COLD_SHARE:.0%}".replace("%", " %")) == 2
    assert f"| {admission.DRAINING_RETRY_S:g} s |" in TEXT
