"""A workload's record as a table for the terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

Record = Mapping[str, Any]


def table(record: Record) -> Table:
    """One row per method: median milliseconds per step, speed relative to others, memory growth.

    If both allocator settings were measured, a cell holds both.
    """
    shown = Table(
        title=f"{record['workload']}: {record['about']}; {record['batch']:,} records a step, {record['device']}",
        caption=_caption(record),
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("method", no_wrap=True)
    shown.add_column("ms", justify="right", no_wrap=True)
    for peer in _peers(record):
        shown.add_column(f"vs {peer}", justify="right", min_width=13)
    if record["memory"]:
        shown.add_column("growth MB", justify="right")
        shown.add_column("growth vs plain", justify="right")
    for method in record["methods"]:
        shown.add_row(method, *_cells(record, method))
    return shown


def remarks(record: Record) -> list[str]:
    """A line with the reason for each method that has no time."""
    missing: dict[str, str] = {}
    for measured in record["speed"].values():
        missing |= {name: f"not available: {why}" for name, why in measured["not_available"].items()}
        missing |= {name: f"failed: {why}" for name, why in measured["failed"].items()}
    return [f"{name} {why}" for name, why in missing.items()]


def _cells(record: Record, method: str) -> Iterator[str]:
    settings = [s for s in record["speed"].values() if method in s["times_ms"]]
    yield " / ".join(f"{s['times_ms'][method]['median']:.2f}" for s in settings) or "-"
    for peer in _peers(record):
        yield " / ".join(f"{s['ratios'][method][peer]:.2f}x" for s in settings) or "-"
    if record["memory"]:
        grown = record["memory"].get(method, {})
        yield f"{grown['growth_mb']:.1f}" if grown else "-"
        yield f"{grown['over_plain']:.2f}x" if "over_plain" in grown else "-"


def _peers(record: Record) -> list[str]:
    """The peers that methods are compared with."""
    some = [ratios for s in record["speed"].values() for ratios in s["ratios"].values()]
    return sorted(some[0]) if some else []


def _caption(record: Record) -> str:
    settings = record["speed"].values()
    times = [spread for s in settings for spread in s["times_ms"].values()]
    widest = max(((t["upper_quartile"] - t["lower_quartile"]) / t["median"] for t in times), default=0.0)
    largest = max((value for s in settings for value in s["difference"].values()), default=0.0)
    return (
        f"allocator: {' / '.join(record['speed'])}; quartiles at most {widest:.0%} of the median apart;"
        f" sums of the private methods at most {largest:.0e} apart"
    )
