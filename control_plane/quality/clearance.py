"""Decides when an accused replica has answered correctly often enough. Pure.

An asking is a golden prompt for one base and adapter (`Asking`).
"""

from collections.abc import Iterable, Mapping, Sequence

from control_plane.quality.askings import DEFAULT, Asking
from control_plane.quality.ejections import Ejection
from control_plane.quality.verdicts import AskingCase, Group, RecordedAnswer


def right_answers(
    cases: Mapping[Group, AskingCase],
    kept: Mapping[Group, Sequence[RecordedAnswer]],
    accused: Mapping[str, Ejection],
) -> dict[str, list[str]]:
    """Return the platform's askings that accused replicas have answered correctly.

    Only answers to prompts that were sent after the ejection count. The node's clock is compared
    with the router's clock, so a difference of the clocks clears a replica too late or too early.

    Args:
        cases: The judgements of a batch, by group.
        kept: The answers on which the judgements are based.
        accused: Replicas with an open ejection.

    Returns:
        Ids of the askings by replica.
    """
    found: dict[str, list[str]] = {}
    for group, case in cases.items():
        judgement = case.judgement
        if case.asking.prompt_id != DEFAULT or judgement.truth is None:
            continue
        deviating = judgement.deviating or {}
        for one in kept[group]:
            ejection, answer = accused.get(one.replica_id), one.answer
            if ejection is None or one.asked_at_unix_ms < ejection.ejected_at_unix_ms:
                continue
            if answer.is_new and answer.text is not None and answer.number not in deviating:
                found.setdefault(one.replica_id, []).append(case.asking.id)
    return found


def are_all_right(askings: Mapping[str, Asking], right: Iterable[str]) -> bool:
    """Return whether a replica with these right answers has answered all platform askings."""
    own = frozenset(right)
    bases = {askings[one].base_digest for one in own if one in askings}
    wanted = {
        one.id for one in askings.values() if one.prompt_id == DEFAULT and one.base_digest in bases
    }
    return bool(wanted) and wanted <= own
