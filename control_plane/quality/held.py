"""Who is held, so that each is told once; pure."""

from control_plane.quality.verdicts import Alert, Group, Held, Ruling

ALERT_S = 900.0  # one that is not found again for so long is over
_GROUPS_MAX = 8192  # remembered; the oldest go first


class HeldCases:
    """Replicas that are not quarantined because of a budget, by the group that accuses them.

    A replica is held until each group that accused it was judged without doing so again.
    """

    def __init__(self) -> None:
        self._of_group: dict[Group, tuple[float, frozenset[Held]]] = {}

    def news(self, ruling: Ruling, now_s: float) -> list[Held]:
        """Take what was judged; return who was not held before, by pool and replica."""
        while self._of_group:  # the oldest is the first
            group, (at_s, _) = next(iter(self._of_group.items()))
            if now_s - at_s <= ALERT_S and len(self._of_group) <= _GROUPS_MAX:
                break
            del self._of_group[group]
        before = {one for _, held in self._of_group.values() for one in held}
        by_pool: dict[str, list[Held]] = {}
        for one in ruling.held:
            by_pool.setdefault(one.pool_id, []).append(one)
        for group, alerts in ruling.alerts.items():
            self._of_group.pop(group, None)
            names = frozenset(alerts.get(Alert.HELD, ()))
            if names:
                held = (one for one in by_pool.get(group[0], ()) if one.replica_id in names)
                self._of_group[group] = now_s, frozenset(held)
        new = {*ruling.held} - before
        return sorted(new, key=lambda one: (one.pool_id, one.replica_id))
