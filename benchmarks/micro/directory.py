"""Measures the gateway's CPU time to find the caller, its key's rights, and a model's target.

One operation is one call of `Directory`. It has 200,000 keys of 50,000 tenants, and 10,000 models,
100 of which all tenants share. One model has an alias and a release. The caller's key has a scope
and a list of models. "first" is the cost of a caller's first request after a change of the state,
and "kept" the cost of its second request. Figures are CPU time of one core in the best of five
rounds. Not measured: applying a change from the control plane, and HTTP.
Run: `python -m benchmarks.micro.directory`.
"""

import hashlib
import time
import timeit
from collections.abc import Callable
from contextlib import suppress

from benchmarks.results import write_result
from gateway.directory import Directory, Principal
from sluice.errors import PlatformError
from sluice.scopes import Scope
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

KEYS, TENANTS, MODELS, PUBLIC = 200_000, 50_000, 10_000, 100
BASE, ADAPTER = "a" * 64, "b" * 64
SECRET, UNKNOWN = f"sk-sluice-{'x' * 43}", f"sk-sluice-{'y' * 43}"
_ROUNDS, _CALLS = 5, 5_000


def large_state() -> ControlState:
    """Return a state of the control plane with the largest supported number of objects."""
    state = ControlState()
    objects = wire.Objects(
        tiers=[wire.Tier(id="gold", model_limits={"m1": wire.Limits(context_tokens_max=4096)})],
        tenants=[
            wire.Tenant(id=f"t{n}", tier_id="gold", cache_salt=bytes(16), fallbacks={"*": "m2"})
            for n in range(TENANTS)
        ],
        keys=[
            wire.ApiKey(
                id=f"key_{n:026}",
                tenant_id=f"t{n % TENANTS}",
                secret_sha256=hashlib.sha256((str(n) if n else SECRET).encode()).digest(),
                scopes=["chat"],
                models=["m*"],
            )
            for n in range(KEYS)
        ],
        bases=[wire.Base(digest=BASE, context_tokens_max=8192)],
        models=[
            wire.Model(
                id=f"m{n}",
                base_digest=BASE,
                adapter_digest=ADAPTER,
                pool_id="pool",
                owner_tenant_id="" if n < PUBLIC else f"t{n}",
            )
            for n in range(MODELS)
        ],
        pools=[wire.Pool(id="pool", engine="sim")],
        aliases=[wire.Alias(id="m-best", target="m1@1")],
        releases=[wire.Release(id="m1@1", model_id="m1", base_digest=BASE, pool_id="pool")],
    )
    state.apply(wire.WatchResponse(version=1, is_snapshot=True, upserts=objects))
    return state


def cost_us(call: Callable[[], object]) -> float:
    """Return the CPU time of one call in µs, best of the rounds."""
    rounds = timeit.repeat(call, timer=time.process_time, number=_CALLS, repeat=_ROUNDS)
    return round(min(rounds) / _CALLS * 1e6, 2)


def refused(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call that expects the gateway's refusal."""

    def refused_call() -> None:
        with suppress(PlatformError):
            call()

    return refused_call


def measure(directory: Directory, caller: Principal) -> dict[str, float]:
    """Return the cost of each lookup, in µs of CPU."""
    change = wire.WatchResponse(version=2, upserts=wire.Objects(bases=[wire.Base(digest="none")]))

    def first(call: Callable[[], object]) -> Callable[[], object]:
        def after_change() -> None:
            directory.update(change)
            call()

        return after_change

    def request() -> None:
        principal = directory.authenticate(SECRET, 1)
        directory.require_scope(principal, Scope.CHAT)
        directory.resolve(principal, "m1")

    questions: dict[str, Callable[[], object]] = {
        "change_alone": first(lambda: None),
        "request_kept": request,
        "request_first": first(request),
        "authenticate_kept": lambda: directory.authenticate(SECRET, 1),
        "authenticate_unknown": refused(lambda: directory.authenticate(UNKNOWN, 1)),
        "require_scope": lambda: directory.require_scope(caller, Scope.CHAT),
        "resolve_kept": lambda: directory.resolve(caller, "m1"),
        "resolve_alias_first": first(lambda: directory.resolve(caller, "m-best")),
        "resolve_missing": refused(lambda: directory.resolve(caller, "m-none")),
        "resolve_of_another_tenant": refused(lambda: directory.resolve(caller, "m500")),
        "fallback": lambda: directory.fallback(caller, "m1"),
        "list_of_101_names": lambda: directory.models(caller),
    }
    return {name: cost_us(call) for name, call in questions.items()}


def main() -> None:
    """Run all cases and write `benchmarks/results/directory.json`."""
    state = large_state()
    directory = Directory(state)
    caller = directory.authenticate(SECRET, 1)
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    parameters = {"keys": KEYS, "tenants": TENANTS, "models": MODELS, "public_models": PUBLIC}
    figures = {
        "parameters": parameters,
        "cost_us": measure(directory, caller),
    }
    print(write_result("directory", operation, figures).read_text())


if __name__ == "__main__":
    main()
