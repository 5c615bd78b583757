"""Draws plots of comparisons with matplotlib, a development dependency imported only when used."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # one result, as `sim.routing` writes it
_OURS = "sluice"
_OURS_COLOUR, _BOUND_COLOUR = "#c0392b", "#7f8c8d"


def compare(records: Sequence[Record], path: Path) -> None:
    """Draw goodput and TTFT of results, over the load or as bars for a single load.

    Args:
        records: Records in the form of `sim.routing`.
        path: Path of the picture, whose suffix determines the file format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    loads = sorted({record["load"] for record in records})
    policies = list(dict.fromkeys(record["policy"] for record in records))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 1.6 + 0.26 * max(8, len(policies))))
    first = records[0]
    figure.suptitle(f"{first['trace']}, {first['replicas']} replicas, {first['settings']['cost']}")
    draw = _lines if len(loads) > 1 else _bars
    draw(left, records, policies, _goodput, "goodput")
    draw(right, records, policies, _ttft_p99_s, "TTFT p99 (s)")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _goodput(record: Record) -> float:
    return record["goodput_mean"]


def _ttft_p99_s(record: Record) -> float:
    return record["ttft_s"]["p99"]


def _colour(policy: str) -> str | None:
    if policy == _OURS:
        return _OURS_COLOUR
    return _BOUND_COLOUR if policy.startswith("oracle") else None


def _lines(
    axes: Any,
    records: Sequence[Record],
    policies: Sequence[str],
    value: Callable[[Record], float],
    label: str,
) -> None:
    for policy in policies:
        points = [
            (record["load"], value(record)) for record in records if record["policy"] == policy
        ]
        style = "--" if policy.startswith("oracle") else "-"
        width = 2.5 if policy == _OURS else 1.2
        axes.plot(
            *zip(*sorted(points), strict=True),
            style, marker="o", markersize=3, linewidth=width, label=policy, color=_colour(policy),
        )  # fmt: skip
    axes.set_xlabel("load")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def _bars(
    axes: Any,
    records: Sequence[Record],
    policies: Sequence[str],
    value: Callable[[Record], float],
    label: str,
) -> None:
    values = {record["policy"]: value(record) for record in records}
    order = list(reversed(policies))
    colours = [_colour(policy) or "#2e6da4" for policy in order]
    bars = axes.barh(order, [values[policy] for policy in order], color=colours)
    axes.bar_label(bars, fmt="%.3g", fontsize="small", padding=2)
    axes.margins(x=0.12)
    axes.set_xlabel(label)
