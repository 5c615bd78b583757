"""Docs are short sentences about nouns: see docs/style.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS_MAX = 25
# Sentences of a page that are still longer. A number only gets smaller.
STILL_LONG: dict[str, int] = {
    "CONTRIBUTING.md": 5,
    "README.md": 1,
    "docs/adapters.md": 11,
    "docs/admin-api.md": 7,
    "docs/agent.md": 10,
    "docs/alerts.md": 11,
    "docs/api.md": 12,
    "docs/architecture.md": 7,
    "docs/artifacts.md": 15,
    "docs/budgets.md": 6,
    "docs/cells.md": 8,
    "docs/clients.md": 3,
    "docs/compose.md": 9,
    "docs/config.md": 1,
    "docs/console.md": 1,
    "docs/cost.md": 14,
    "docs/decisions/0005-late-binding.md": 1,
    "docs/decisions/0009-every-request-ends-once.md": 1,
    "docs/distribution.md": 5,
    "docs/engines.md": 19,
    "docs/failures.md": 6,
    "docs/fairness.md": 15,
    "docs/fleet.md": 8,
    "docs/keys-and-names.md": 11,
    "docs/kubernetes.md": 8,
    "docs/limits.md": 14,
    "docs/local-stack.md": 7,
    "docs/messages.md": 2,
    "docs/operations.md": 6,
    "docs/overload.md": 5,
    "docs/quality.md": 6,
    "docs/responses.md": 1,
    "docs/retention.md": 6,
    "docs/rollouts.md": 25,
    "docs/routing-study.md": 13,
    "docs/routing.md": 6,
    "docs/runbooks/BasesMissing.md": 1,
    "docs/runbooks/CertificateExpires.md": 1,
    "docs/runbooks/ClosingsDropped.md": 1,
    "docs/runbooks/GoodputLow.md": 1,
    "docs/runbooks/PrefixHitDrop.md": 3,
    "docs/runbooks/QualityAlert.md": 1,
    "docs/runbooks/RolloutHeld.md": 1,
    "docs/runbooks/RollupsBehind.md": 1,
    "docs/runbooks/adding-a-region.md": 2,
    "docs/runbooks/backup.md": 4,
    "docs/runbooks/capacity.md": 1,
    "docs/runbooks/disaster.md": 1,
    "docs/runbooks/install.md": 2,
    "docs/scaling.md": 9,
    "docs/security.md": 12,
    "docs/style.md": 1,
    "docs/texts.md": 16,
    "docs/tools.md": 7,
    "docs/tracing.md": 16,
    "docs/tutorial.md": 1,
    "docs/upgrade.md": 7,
    "docs/usage.md": 9,
    "docs/wrong-answers.md": 1,
}
# Pages with sentences whose subject is no noun. The list only gets shorter.
STILL_WITHOUT_NOUN: set[str] = {
    "CONTRIBUTING.md",
    "docs/adapters.md",
    "docs/admin-api.md",
    "docs/agent.md",
    "docs/api.md",
    "docs/artifacts.md",
    "docs/benchmarking.md",
    "docs/budgets.md",
    "docs/cells.md",
    "docs/clients.md",
    "docs/coming-from.md",
    "docs/cost.md",
    "docs/decisions/README.md",
    "docs/engines.md",
    "docs/failures.md",
    "docs/fairness.md",
    "docs/keys-and-names.md",
    "docs/kubernetes.md",
    "docs/limits.md",
    "docs/messages.md",
    "docs/metrics.md",
    "docs/retention.md",
    "docs/routing-study.md",
    "docs/runbooks/AbortSpike.md",
    "docs/runbooks/AcceleratorCordoned.md",
    "docs/runbooks/AgentDisconnected.md",
    "docs/runbooks/BasesMissing.md",
    "docs/runbooks/BudgetExhausted.md",
    "docs/runbooks/BudgetSoft.md",
    "docs/runbooks/BudgetsStale.md",
    "docs/runbooks/CertificateExpires.md",
    "docs/runbooks/CertificateStale.md",
    "docs/runbooks/ClosingsDropped.md",
    "docs/runbooks/ControlStateStale.md",
    "docs/runbooks/DatabaseAway.md",
    "docs/runbooks/EngineStuck.md",
    "docs/runbooks/EventSpoolGrowing.md",
    "docs/runbooks/EventsDropped.md",
    "docs/runbooks/GatewayLoopLag.md",
    "docs/runbooks/GatewayWorkersEnd.md",
    "docs/runbooks/GoldenPromptsUnanswered.md",
    "docs/runbooks/GoodputLow.md",
    "docs/runbooks/ItlHigh.md",
    "docs/runbooks/KvCacheFull.md",
    "docs/runbooks/LedgerMismatch.md",
    "docs/runbooks/LedgerNotCompared.md",
    "docs/runbooks/LimitsDegraded.md",
    "docs/runbooks/NoRouter.md",
    "docs/runbooks/PrefixHitDrop.md",
    "docs/runbooks/PrefixHitLow.md",
    "docs/runbooks/ProcessDown.md",
    "docs/runbooks/QualityAlert.md",
    "docs/runbooks/QueueBacklog.md",
    "docs/runbooks/ReplicaLost.md",
    "docs/runbooks/ReplicaQuarantined.md",
    "docs/runbooks/ReplicasUnplaced.md",
    "docs/runbooks/RolloutEvidenceOld.md",
    "docs/runbooks/RolloutHeld.md",
    "docs/runbooks/RolloutRolledBack.md",
    "docs/runbooks/RolloutUnreadable.md",
    "docs/runbooks/RollupsBehind.md",
    "docs/runbooks/ScalingWithoutEffect.md",
    "docs/runbooks/TelemetryLag.md",
    "docs/runbooks/TelemetryMessagesLost.md",
    "docs/runbooks/TelemetryNotReady.md",
    "docs/runbooks/TextsNotSent.md",
    "docs/runbooks/TokenCountMismatch.md",
    "docs/runbooks/TtftHigh.md",
    "docs/runbooks/ValkeyAway.md",
    "docs/runbooks/adding-a-region.md",
    "docs/runbooks/backup.md",
    "docs/runbooks/install.md",
    "docs/scaling.md",
    "docs/security.md",
    "docs/status.md",
    "docs/texts.md",
    "docs/tools.md",
    "docs/tracing.md",
    "docs/wrong-answers.md",
}
# Made by `make docs`, or rows of a table alone.
MADE = {"docs/promises.md", "docs/benchmarks.md"}
NO_NOUN = re.compile(r"\W*(What|Who|Whoever|Whatever|Nobody|Those)\b")
PAGES = sorted(
    str(it.relative_to(ROOT))
    for it in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if str(it.relative_to(ROOT)) not in MADE and "reference" not in it.parts
)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose: no code, no tables, no headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(\||#|    ).*$", "", text, flags=re.MULTILINE)
    found = list[str]()
    for part in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text):
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", part))
        found += re.split(r"(?<=[.!?:])\s+(?=[A-Z*`\[])", " ".join(words.split()))
    return [it for it in found if it]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    long = [it for it in sentences((ROOT / page).read_text()) if len(it.split()) > WORDS_MAX]
    allowed = STILL_LONG.get(page, 0)
    text = "\n".join(long)
    assert len(long) <= allowed, f"more than {WORDS_MAX} words; {allowed} may be left:\n{text}"


@pytest.mark.parametrize("page", PAGES)
def test_the_subject_of_a_sentence_is_a_noun(page: str) -> None:
    found = [it for it in sentences((ROOT / page).read_text()) if NO_NOUN.match(it)]
    questions = [it for it in found if not it.endswith("?")]
    assert not questions or page in STILL_WITHOUT_NOUN, "\n".join(questions)


def test_the_lists_only_get_shorter() -> None:
    texts = {page: sentences((ROOT / page).read_text()) for page in PAGES}
    assert set(STILL_LONG) | STILL_WITHOUT_NOUN <= set(PAGES)
    done = {
        page
        for page in STILL_WITHOUT_NOUN
        if not any(NO_NOUN.match(it) and not it.endswith("?") for it in texts[page])
    }
    assert not done, "take these pages off the list"
