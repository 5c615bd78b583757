"""Reads accelerators through NVIDIA's management library (optional package `nvidia-ml-py`).

The code follows the library's documentation and is tested against a simulated library. It has not
run on hardware yet. Errors that are reported while no agent runs are lost. Counters still show some
of them (ECC, failed remapping, a lost GPU).
"""

import importlib
import time
from dataclasses import replace
from typing import Any

import structlog

from replica.agent.hardware import GpuReading, Readings, Xid

log = structlog.get_logger(__name__)

_EVENTS_MAX = 64  # largest number of errors per reading, because a broken GPU can report thousands


class NvmlReader:
    """Reads all NVIDIA GPUs of the node in one thread, because a read blocks and may hang."""

    def __init__(self, nvml: Any) -> None:
        """Subscribe to the errors that the initialized module `pynvml` reports.

        Raises:
            NVMLError: The library does not work here.
        """
        self._nvml = nvml
        self._events = nvml.nvmlEventSetCreate()
        # (handle of a GPU, the fields that never change)
        self._gpus: list[tuple[Any, GpuReading]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                self._gpus.append((handle, self._identity(index, handle)))
            except nvml.NVMLError as error:
                log.warning("gpu_unreadable", index=index, error=str(error))
                continue
            wanted = nvml.nvmlEventTypeXidCriticalError
            if self._read("nvmlDeviceGetSupportedEventTypes", handle, otherwise=0) & wanted:
                self._read("nvmlDeviceRegisterEvents", handle, wanted, self._events, otherwise=None)

    @classmethod
    def open(cls) -> "NvmlReader | None":
        """Return a reader. On a node without GPUs, log the reason and return None."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            log.info("gpus_not_watched", reason="the package nvidia-ml-py is not installed")
            return None
        try:
            nvml.nvmlInit()
            if nvml.nvmlDeviceGetCount():
                return cls(nvml)
            log.info("gpus_not_watched", reason="NVML finds none")
        except nvml.NVMLError as error:
            log.info("gpus_not_watched", reason=f"NVML: {error}")
        return None

    def read(self, wait_s: float) -> Readings:
        """Wait up to `wait_s` seconds for an error, and return the readings of all GPUs."""
        xids = self._xids(wait_s)
        return Readings(tuple(self._reading(handle, known) for handle, known in self._gpus), xids)

    def _identity(self, index: int, handle: Any) -> GpuReading:
        name = _text(self._read("nvmlDeviceGetName", handle, otherwise=""))
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        return GpuReading(index, uuid, name, int(memory.total))

    def _reading(self, handle: Any, known: GpuReading) -> GpuReading:
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            return replace(known, is_lost=error.value == nvml.NVML_ERROR_GPU_IS_LOST)
        celsius = self._read(
            "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU, otherwise=0
        )
        milliwatts = self._read("nvmlDeviceGetPowerUsage", handle, otherwise=0)
        uncorrected = self._read(
            "nvmlDeviceGetTotalEccErrors",
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
            otherwise=0,
        )
        # (corrected rows, uncorrected rows, is a remapping pending, has a remapping failed)
        remapped = self._read("nvmlDeviceGetRemappedRows", handle, otherwise=(0, 0, 0, 0))
        return replace(
            known,
            memory_used_bytes=int(memory.used),
            temperature_c=int(celsius),
            power_w=milliwatts / 1000,
            ecc_uncorrected=int(uncorrected),
            has_remap_failure=bool(remapped[3]),
        )

    def _xids(self, wait_s: float) -> tuple[Xid, ...]:
        """Wait for an error, and return it together with all errors that are already queued."""
        nvml = self._nvml
        found: list[Xid] = []
        timeout_ms = round(wait_s * 1000)
        while len(found) < _EVENTS_MAX:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    log.warning("gpu_errors_unreadable", error=str(error))
                    time.sleep(timeout_ms / 1000)
                break
            # A GPU that has fallen off the bus may not even report its name.
            uuid = _text(self._read("nvmlDeviceGetUUID", event.device, otherwise=""))
            found.append(Xid(uuid, int(event.eventData)))
            timeout_ms = 0
        return tuple(found)

    def _read(self, function: str, *arguments: Any, otherwise: Any) -> Any:
        """Return a value, or the default if the GPU lacks it, as many consumer cards do."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError:
            return otherwise


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # old versions return bytes
