"""Projects the backlog of a pool until the replicas that already boot are ready. Pure.

Replicas that were requested a while ago come sooner than replicas that are requested now. So the
projection includes the boots that are under way. Otherwise each round of a long queue would request
more replicas, of which the last come when the queue is gone.
"""

from bisect import bisect_right

from control_plane.scaling.model import PoolState

_STEP_S = 5.0  # seconds of one step of the projection


def owed_work_s(state: PoolState, demand: float, wait_s: float, now: float) -> float:
    """Return the most work that will wait at once, in work-seconds.

    Args:
        state: The pool at present.
        demand: Work-seconds per second that arrive.
        wait_s: Seconds until replicas that are requested now would be ready.
        now: Time on the clock of `plan`.
    """
    facts, known = state.facts, sorted(state.known_boots_s())
    boots = [
        (now - at, ended, count / (len(known) - ended))
        for at, count in under_way(state, now)
        # A boot that takes longer than all measured boots may never end, so it does not count.
        if (ended := bisect_right(known, now - at)) < len(known)
    ]
    short = demand - facts.ready
    waiting = most = facts.backlog_work_s
    ahead_s = 0.0
    while ahead_s < wait_s and waiting > 0:
        step_s = min(_STEP_S, wait_s - ahead_s)
        ahead_s += step_s
        come = 0.0
        for age_s, ended, each in boots:
            come += each * (bisect_right(known, age_s + ahead_s) - ended)
        waiting += (short - come) * step_s
        most = max(most, waiting)
    return most


def under_way(state: PoolState, now: float) -> list[tuple[float, int]]:
    """Return the boots that have not ended, as pairs (time of the request, replicas)."""
    booting = state.facts.booting
    found: list[tuple[float, int]] = []
    for at, count in reversed(state.boots):
        if (kept := min(count, booting)) > 0:
            found.append((at, kept))
            booting -= kept
    if booting > 0:
        found.append((now, booting))
    found.reverse()
    return found
