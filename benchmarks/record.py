"""The results of a workload as one record, and the file that stores it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Times = Mapping[str, Mapping[str, float]]


def ratios(times: Times) -> dict[str, dict[str, float]]:
    """How many times faster each method's median is than its peers', by method and then by peer.

    Peers are "plain" and "best opacus"; where Opacus also ran in channels-last order, "best opacus, given layout"
    excludes that.
    """
    peers = {"plain": ["plain"], "best opacus": [name for name in times if name.startswith("opacus")]}
    same_layout = [name for name in peers["best opacus"] if not name.endswith("channels_last")]
    if same_layout != peers["best opacus"]:
        peers["best opacus, given layout"] = same_layout
    medians = {name: spread["median"] for name, spread in times.items()}
    fastest = {
        peer: min(medians[name] for name in members if name in medians)
        for peer, members in peers.items()
        if any(name in medians for name in members)
    }
    return {
        name: {peer: round(best / median, 3) for peer, best in fastest.items()}
        for name, median in medians.items()
    }


def memory(growths: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Memory growth in MB by method, and its ratio to that of the plain step."""
    plain = growths.get("plain", 0.0)
    return {
        name: {"growth_mb": round(value, 2)} | ({"over_plain": round(value / plain, 3)} if plain > 0 else {})
        for name, value in growths.items()
    }


def save(kind: str, records: Mapping[str, Any]) -> Path:
    """Write records by workload to `results/<kind>.json`; other workloads keep their records."""
    path = RESULTS / f"{kind}.json"
    others = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**others, **records}, indent=2) + "\n")
    return path
