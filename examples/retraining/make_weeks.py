"""python examples/retraining/make_weeks.py: cuts the made-up visits into six weeks, as files of a folder."""

from itertools import pairwise
from pathlib import Path

WEEKS = 6
VISITS = Path(__file__).parents[1] / "own_data" / "visits.csv"
FOLDER = Path("data/raw/visits-weekly")


def main() -> None:
    """Write the weeks below the current folder."""
    header, *lines = VISITS.read_text(encoding="utf-8").splitlines()
    FOLDER.mkdir(parents=True, exist_ok=True)
    bounds = [round(week * len(lines) / WEEKS) for week in range(WEEKS + 1)]
    for number, (start, stop) in enumerate(pairwise(bounds), start=1):
        text = "\n".join([header, *lines[start:stop]]) + "\n"
        (FOLDER / f"2026-W{number:02}.csv").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
