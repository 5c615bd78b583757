"""A class name says one thing: no public class of the product has the name of another one."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "gateway",
    "router",
    "replica",
    "control_plane",
    "telemetry",
    "cli",
    "sim",
    "sluice",
    "benchmarks",
)
# Each service has one of these, under the same name on purpose.
SAME_IN_EACH_SERVICE = {"Settings", "MigrateSettings"}
# Names that are still there twice. The list only gets shorter.
STILL_DOUBLED = {
    *(
        "Accelerator",
        "Answer",
        "Api",
        "Attachment",
        "Batch",
        "Bench",
        "Body",
        "Budget",
        "Budgets",
        "By",
        "Case",
        "Cell",
        "Change",
        "Choice",
        "Client",
        "Confirmations",
        "Count",
        "Database",
        "Decision",
        "Delta",
        "Demand",
        "Dispatcher",
        "Embedding",
        "Ended",
        "Ending",
        "Engine",
        "Evidence",
        "Exchange",
        "Fault",
        "FetchError",
        "Fetcher",
        "Finish",
        "Fleet",
        "Forecast",
        "Fork",
        "Gateway",
        "Gone",
        "Granularity",
        "Held",
        "Home",
        "Identity",
        "Item",
        "Job",
        "Kept",
        "Kind",
        "Ledger",
        "Limits",
        "Line",
        "Listener",
        "Load",
        "Look",
        "Metrics",
        "News",
        "Node",
        "NodeArtifacts",
        "Observer",
        "OnExhausted",
        "Outcome",
        "Pace",
        "Peer",
        "Period",
        "Phase",
        "PinBody",
        "Place",
        "Placement",
        "Plan",
        "Pool",
        "PoolPlan",
        "Prediction",
        "Profile",
        "Progress",
        "Reader",
        "Readiness",
        "Reason",
        "Redacted",
        "RefusedError",
        "Release",
        "ReplicaState",
        "Report",
        "Result",
        "Role",
        "Room",
        "Route",
        "Router",
        "Row",
        "Rule",
        "Rules",
        "Run",
        "Scenario",
        "Scheduler",
        "Scope",
        "Scores",
        "Service",
        "Shelf",
        "Site",
        "Source",
        "SourceError",
        "Span",
        "Split",
        "Stack",
        "Stage",
        "Standing",
        "State",
        "Step",
        "StreamOptions",
        "Tally",
        "Target",
        "Tick",
        "TokenCounts",
        "Tokens",
        "Told",
        "Trace",
        "Verdict",
        "Worker",
        "Workers",
        "World",
    )
}


def _places() -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if "wire" in file.parts:  # generated
                continue
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(file.relative_to(ROOT)))
    return places


def test_a_class_name_is_unique() -> None:
    doubled = {
        name: files
        for name, files in _places().items()
        if len(files) > 1 and name not in SAME_IN_EACH_SERVICE | STILL_DOUBLED
    }
    assert not doubled, "rename one of each after the thing that it is, with its domain's noun"


def test_the_list_of_doubled_names_only_gets_shorter() -> None:
    places = _places()
    assert {name for name in STILL_DOUBLED if len(places[name]) < 2} == set()
