"""The control plane knows what engines refuse."""

import pytest

from replica.drivers.openvino import OpenvinoOptions
from replica.drivers.options import parse_options
from replica.drivers.sim import SimOptions
from replica.drivers.trtllm_options import TrtllmOptions
from sluice.adapter_ranks import adapter_rank_max

ENGINES = {"openvino": OpenvinoOptions, "sim": SimOptions, "trtllm": TrtllmOptions}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [{}, {"adapter_rank": "128"}, {"adapter_slots": "0"}, {"adapter_slots": "4"}],
)
def test_the_limit_equals_the_engines_reading_of_its_options(engine, options) -> None:
    engines = parse_options(ENGINES[engine], options)
    expected = engines.adapter_rank if engines.adapter_slots else 0
    assert adapter_rank_max(engine, options) == expected


def test_of_other_engines_nothing_is_known() -> None:
    assert adapter_rank_max("embed", {"adapter_rank": "8"}) is None
