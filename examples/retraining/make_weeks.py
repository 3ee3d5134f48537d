"""python examples/retraining/make_weeks.py: six weeks of made-up visits, as files of a folder.

Made as those of examples/own_data are, but other ones: a person whom two populations hold would have two budgets.
"""

import csv
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "own_data"))

from make_visits import HEADER, patient

WEEKS, VISITS = 6, 200
FOLDER = Path("datasets/raw/visits-weekly")


def main() -> None:
    """Write the weeks below the current folder, the same at every call."""
    rng = random.Random(2026)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(1, WEEKS + 1):
        with (FOLDER / f"2026-W{number:02}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(patient(rng) for _ in range(VISITS))


if __name__ == "__main__":
    main()
