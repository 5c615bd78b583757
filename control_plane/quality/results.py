"""The latest answers of replicas compared with the right answers, as JSON for operators. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.quality.judgement import Truth, judge
from control_plane.quality.verdicts import Group, RecordedAnswer, shown

RESULT_FIELDS = (
    "id",
    "pool_id",
    "asking_id",
    "replica_id",
    "asked_at_unix_ms",
    "token_ids",
    "logprobs",
    "error",
    "differs_in",
    "deviations",
    "right",
    "source",
)


def results(
    kept: Mapping[Group, Sequence[RecordedAnswer]],
    truths: Mapping[Group, Truth],
    errors: Mapping[int, str],
) -> list[dict[str, Any]]:
    """Return one object per asking and replica, with the newest answer and its verdict.

    Args:
        kept: Answers by pool and asking, the newest first.
        truths: Stored right answers by pool and asking.
        errors: Reasons for missing answers, by number of the answer.
    """
    found: list[dict[str, Any]] = []
    for group, all_ in sorted(kept.items()):
        own: dict[str, list[RecordedAnswer]] = {}
        for one in all_:
            own.setdefault(one.replica_id, []).append(one)
        answers = {name: [one.answer for one in mine] for name, mine in own.items()}
        judgement = judge(answers, truths.get(group))
        deviating, truth = judgement.deviating or {}, judgement.truth
        for name, mine in sorted(own.items()):
            newest = mine[0].answer
            found.append(
                {
                    "id": f"{group[0]}/{group[1]}/{name}",
                    "pool_id": group[0],
                    "asking_id": group[1],
                    "replica_id": name,
                    "asked_at_unix_ms": mine[0].asked_at_unix_ms,
                    **shown(newest.text),
                    "error": errors.get(newest.number, ""),
                    "differs_in": deviating.get(newest.number),
                    "deviations": sum(one.answer.number in deviating for one in mine),
                    "right": None if truth is None else list(truth.text.token_ids),
                    "source": None if truth is None else str(truth.source),
                }
            )
    return found
