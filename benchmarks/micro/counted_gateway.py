"""A gateway that counts its function calls by layer, started by `benchmarks.micro.request_calls`.

The first SIGUSR2 starts the count, and the second writes the counts to a file. This module must not
import gRPC, even indirectly, because the gateway has to set gRPC's polling mode before the import.
"""

import gc
import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

_ROOT = Path(__file__).parents[2]
KINDS = ("python", "c", "objects")


class CallCounts:
    """The interpreter's profile function, which counts calls and created objects."""

    def __init__(self) -> None:
        """Start with all counts at zero."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self._layers: dict[CodeType, str] = {}
        self._layer, self._objects = "libraries", 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count one event of the interpreter."""
        made = gc.get_count()[0] - self._objects - (event == "call")  # minus the call's frame
        if made > 0:
            self.calls[self._layer, "objects"] += made
        self._layer = self._layer_of(frame)
        if event == "call":
            self.calls[self._layer, "python"] += 1
        elif event == "c_call":
            self.calls[self._layer, "c"] += 1
        self._objects = gc.get_count()[0]

    def _layer_of(self, frame: FrameType | None) -> str:
        while frame is not None:
            layer = self._layers.get(frame.f_code)
            if layer is None:
                layer = self._layers[frame.f_code] = _layer_in(frame.f_code.co_filename)
            if layer:
                return layer
            frame = frame.f_back
        return "libraries"

    def told(self) -> dict[str, dict[str, int]]:
        """Return the counts by layer."""
        layers = sorted({layer for layer, _ in self.calls})
        return {layer: {kind: self.calls[layer, kind] for kind in KINDS} for layer in layers}


def _layer_in(file: str) -> str:
    """Return the layer of a file, or an empty text for libraries and for this program."""
    path = Path(file)
    if not path.is_relative_to(_ROOT) or ".venv" in path.parts:
        return ""
    parts = path.relative_to(_ROOT).as_posix().split("/")
    if parts[0] == "benchmarks" or parts == ["gateway", "__main__.py"]:
        return ""
    return "/".join(parts[:2]) if parts[0] == "gateway" and len(parts) > 2 else parts[0]


def main() -> None:
    """Run the gateway. The argument is the file for the counts."""
    target = Path(sys.argv.pop())
    counts = CallCounts()

    def turn(_: int, __: object) -> None:
        if sys.getprofile() is None:
            gc.disable()  # a garbage collection would reset the count of objects
            sys.setprofile(counts)
        else:
            sys.setprofile(None)
            target.with_suffix(".new").write_text(json.dumps(counts.told()))
            target.with_suffix(".new").rename(target)

    signal.signal(signal.SIGUSR2, turn)
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)
