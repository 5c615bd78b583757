"""Time in which a sleeping replica of the CPU engine answers: `python -m benchmarks.load.wake`.

One operation: the first request to a pool whose only replica sleeps, from its submission to the
first token, through gateway and router of a running `sluice up`; before it, the pool is idle until
its replica sleeps. Figures: seconds to the first token asleep and awake, by round. Not measured: a
GPU engine, and a base larger than the shipped one, whose KV memory takes longer to get.
"""

import statistics
import time
from typing import Any

import httpx

from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.results import write_result

_ROUNDS = 10
_LIMIT_S = 120.0
_BOUNDS = {
    "replicas_min": 0,
    "replicas_max": 1,
    "sleepers_min": 1,
    "idle_s": 1.0,
    "hold_s": 1.0,
    "minute_worth": 0.0,
}
_BODY = {
    "model": "sluice-tiny",
    "messages": [{"role": "user", "content": "Wake up!"}],
    "max_tokens": 4,
    "ignore_eos": True,
    "stream": True,
}


class _Pool:
    """The stack's chat pool, within bounds that let it sleep."""

    def __init__(self, stack: BenchmarkStack) -> None:
        key = stack.env["OPENAI_API_KEY"]
        self._address = stack.env["OPENAI_BASE_URL"]
        self._client = httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=_LIMIT_S)
        self._admin = httpx.Client(
            base_url=stack.env["SLUICE_ADMIN_URL"],
            headers={"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"},
            timeout=60.0,
        )
        pools = self._admin.get("/v1/pools").json()["data"]
        self._id = next(it["id"] for it in pools if it["engine"] == "openvino")

    def first_token_s(self) -> float:
        """Return the seconds from the submission to the first byte of an answer."""
        began_s = time.perf_counter()
        path = f"{self._address}/chat/completions"
        with self._client.stream("POST", path, json=_BODY) as answer:
            answer.raise_for_status()
            first_s = 0.0
            for line in answer.iter_lines():
                if line and not first_s:
                    first_s = time.perf_counter() - began_s
        return first_s

    def bound(self) -> None:
        """Let the pool be scaled."""
        path = f"/v1/pools/{self._id}/scaling"
        self._admin.put(path, json=_BOUNDS).raise_for_status()

    def await_sleep(self) -> None:
        """Wait until the replica sleeps and no replica serves."""
        deadline_s = time.monotonic() + _LIMIT_S
        while True:
            rows = self._admin.get("/v1/scaling").json()["data"]
            row = next(it for it in rows if it["pool_id"] == self._id)
            if row["asleep"] == 1 and not row["ready"]:
                return
            assert time.monotonic() < deadline_s, f"the replica does not fall asleep: {row}"
            time.sleep(0.5)


def _spread(seconds: list[float]) -> dict[str, Any]:
    return {
        "median_s": round(statistics.median(seconds), 3),
        "longest_s": round(max(seconds), 3),
        "rounds_s": [round(it, 3) for it in seconds],
    }


def main() -> None:
    """Start a stack, and measure the first token of a replica that sleeps and of an awake one."""
    with started("openvino") as stack:
        pool = _Pool(stack)
        for _ in range(5):  # its speed is measured
            pool.first_token_s()
        pool.bound()
        asleep: list[float] = []
        awake: list[float] = []
        for _ in range(_ROUNDS):
            pool.await_sleep()
            asleep.append(pool.first_token_s())
            awake.append(pool.first_token_s())
            print(f"asleep {asleep[-1]:.3f} s, awake {awake[-1]:.3f} s", flush=True)
    figures = {"asleep": _spread(asleep), "awake": _spread(awake)}
    print(write_result("wake", "the first token of a replica that sleeps, and awake", figures))


if __name__ == "__main__":
    main()
