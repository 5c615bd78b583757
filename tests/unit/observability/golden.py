"""The golden file of all metrics; run it to write the file anew."""

from pathlib import Path

from cli.reference import declared_metrics

GOLDEN = Path(__file__).with_name("metrics.golden")


def lines() -> list[str]:
    """One line per metric: process, name, type, labels, bounds of the buckets."""
    return [
        " ".join(
            (
                it.process.replace(" ", "-"),
                it.name,
                it.kind,
                "{" + ",".join(it.labels) + "}",
                *(f"{edge:g}" for edge in it.edges),
            )
        )
        for it in declared_metrics()
    ]


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n")
