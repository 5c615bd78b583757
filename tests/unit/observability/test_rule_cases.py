"""The platform's own evaluator comes to what promtool's cases expect of each rule."""

import re

import pytest

from control_plane.alerts.rules import ActiveAlert
from tests.support.rule_cases import RuleCase, rule_cases, series_of
from tests.unit.observability.known import PROMETHEUS

CASES = rule_cases(PROMETHEUS)


def told(alert: ActiveAlert) -> tuple[dict[str, str], dict[str, str]]:
    labels = {name: it for name, it in alert.labels.items() if name != "alertname"}
    return labels, dict(alert.annotations)


@pytest.mark.parametrize("case", CASES, ids=[re.sub(r"\W+", "-", case.name) for case in CASES])
def test_the_evaluator_agrees_with_promtool(case: RuleCase):
    looked = 0
    for wanted, found in case.run():
        looked += 1
        if "alertname" in wanted:
            expected = [
                (it.get("exp_labels", {}), it.get("exp_annotations", {}))
                for it in wanted.get("exp_alerts") or ()
            ]
            alerts = sorted(map(told, found), key=repr)
            assert len(alerts) == len(expected), (wanted["eval_time"], alerts)
            for labels, annotations in expected:
                assert (labels, annotations) in alerts, (wanted["eval_time"], alerts)
        else:
            expected = {series_of(it["labels"])[1]: it["value"] for it in wanted["exp_samples"]}
            assert found == pytest.approx(expected)
    assert looked
