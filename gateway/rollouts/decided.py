"""Counts the decisions of pins and splits, and logs decisions that had no effect."""

import structlog

from gateway.metrics import GatewayMetrics
from gateway.rollouts.decision import KINDS, ReleaseDecision

log = structlog.get_logger(__name__)

_LOGGED_MAX = 1024


class Decided:
    """Counts and logs one worker's decisions on releases."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        """`metrics` counts each kind of decision separately."""
        self._count = {kind: metrics.decided.labels(kind).inc for kind in KINDS}
        self._logged: set[tuple[str, str, str]] = set()

    def note(self, tenant_id: str, model_id: str, decision: ReleaseDecision) -> None:
        """Count one accepted request, and log each kind of problem once."""
        self._count[decision.kind]()
        release = decision.missed or decision.unready or decision.unloaded
        if not release:
            return
        case = (tenant_id, model_id, release)
        if case in self._logged:
            return
        if len(self._logged) >= _LOGGED_MAX:
            self._logged.clear()
        self._logged.add(case)
        event = f"release_{decision.kind}"
        log.warning(event, tenant_id=tenant_id, model=model_id, release=release)
