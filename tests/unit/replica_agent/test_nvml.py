"""Tests the use of NVML as documented, and that a missing value of a card has a default."""

import sys
from types import SimpleNamespace

import pytest

from replica.agent.hardware import GpuReading, Xid
from replica.agent.nvml import NvmlReader

NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST, NOT_FOUND = 3, 10, 15, 12
XID_EVENT = 8


class FakeNvmlError(Exception):
    """The error of pynvml, with the library's return value in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """The used part of `pynvml`. Each card is a dict of the values that it can report."""

    NVMLError = FakeNvmlError
    NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = TIMEOUT, GPU_IS_LOST
    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = XID_EVENT  # noqa: N815 - a name of pynvml

    def __init__(self, *cards: dict[str, object], init_error: int = 0) -> None:
        self.cards = list(cards)
        self.events: list[SimpleNamespace] = []
        self.registered: list[object] = []
        self.waits_ms: list[int] = []
        self._init_error = init_error

    def __getattr__(self, name: str) -> object:
        key = name.removeprefix("nvmlDeviceGet")
        if key == name:
            raise AttributeError(name)

        def ask(card: dict[str, object], *_: object) -> object:
            answer = card.get(key, NOT_SUPPORTED if "lost" not in card else GPU_IS_LOST)
            if isinstance(answer, int) and answer in (NOT_SUPPORTED, GPU_IS_LOST):
                raise FakeNvmlError(answer)
            return answer

        return ask

    def nvmlInit(self) -> None:  # noqa: N802 - the names here and below are pynvml's
        if self._init_error:
            raise FakeNvmlError(self._init_error)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, object]:  # noqa: N802
        if self.cards[index].get("gone"):
            raise FakeNvmlError(GPU_IS_LOST)
        return self.cards[index]

    def nvmlEventSetCreate(self) -> list[SimpleNamespace]:  # noqa: N802
        return self.events

    def nvmlDeviceRegisterEvents(self, card: object, mask: int, events: object) -> None:  # noqa: N802
        assert (mask, events) == (XID_EVENT, self.events)
        self.registered.append(card)

    def nvmlEventSetWait_v2(self, events: list[SimpleNamespace], wait_ms: int) -> SimpleNamespace:  # noqa: N802
        self.waits_ms.append(wait_ms)
        if not events:
            raise FakeNvmlError(TIMEOUT)
        return events.pop(0)


def datacenter_card() -> dict[str, object]:
    return {
        "UUID": "GPU-a",
        "Name": b"NVIDIA H100",
        "MemoryInfo": SimpleNamespace(total=80 << 30, used=5 << 30),
        "Temperature": 41,
        "PowerUsage": 123_400,
        "TotalEccErrors": 0,
        "RemappedRows": (0, 0, 0, 0),
        "SupportedEventTypes": XID_EVENT | 2,
    }


def consumer_card() -> dict[str, object]:
    return {
        "UUID": "GPU-b",
        "Name": "GeForce",
        "MemoryInfo": SimpleNamespace(total=10 << 30, used=0),
        "SupportedEventTypes": 0,
    }


def test_cards_report_their_available_readings() -> None:
    nvml = FakeNvml(datacenter_card(), consumer_card())
    readings = NvmlReader(nvml).read(1.5)
    assert readings.gpus == (
        GpuReading(0, "GPU-a", "NVIDIA H100", 80 << 30, 5 << 30, 41, 123.4),
        GpuReading(1, "GPU-b", "GeForce", 10 << 30),
    )
    assert (readings.xids, nvml.waits_ms) == ((), [1500])
    assert nvml.registered == [nvml.cards[0]]


def test_counters_and_failures_are_read() -> None:
    card = datacenter_card() | {"TotalEccErrors": 7, "RemappedRows": (0, 1, 0, 1)}
    (gpu,) = NvmlReader(FakeNvml(card)).read(0).gpus
    assert (gpu.ecc_uncorrected, gpu.has_remap_failure, gpu.is_lost) == (7, True, False)


def test_xids_come_with_their_gpu_as_long_as_it_can_be_named() -> None:
    nvml = FakeNvml(datacenter_card())
    reader = NvmlReader(nvml)
    nvml.events += [
        SimpleNamespace(device=nvml.cards[0], eventData=94),
        SimpleNamespace(device={"lost": True}, eventData=79),
    ]
    assert reader.read(2.0).xids == (Xid("GPU-a", 94), Xid("", 79))
    assert nvml.waits_ms == [2000, 0, 0], "those that wait already are taken at once"


def test_a_flood_of_xids_is_cut() -> None:
    nvml = FakeNvml(datacenter_card())
    reader = NvmlReader(nvml)
    nvml.events += [SimpleNamespace(device=nvml.cards[0], eventData=13)] * 1000
    assert 0 < len(reader.read(0).xids) < 1000


def test_a_gpu_that_is_lost_later_keeps_its_name() -> None:
    nvml = FakeNvml(datacenter_card())
    reader = NvmlReader(nvml)
    nvml.cards[0].clear()
    nvml.cards[0]["lost"] = True
    (gpu,) = reader.read(0).gpus
    assert gpu == GpuReading(0, "GPU-a", "NVIDIA H100", 80 << 30, is_lost=True)


def test_a_card_that_is_gone_from_the_start_does_not_hide_the_others() -> None:
    reader = NvmlReader(FakeNvml({"gone": True}, consumer_card()))
    assert [gpu.uuid for gpu in reader.read(0).gpus] == ["GPU-b"]


def test_nodes_without_gpus_have_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type] - as if not installed
    assert NvmlReader.open() is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=NOT_FOUND))  # type: ignore[arg-type]
    assert NvmlReader.open() is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    assert NvmlReader.open() is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(datacenter_card()))  # type: ignore[arg-type]
    assert NvmlReader.open() is not None
