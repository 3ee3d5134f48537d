"""Writes visits.csv, a made-up table of patients: nobody in it exists.

python examples/own_data/make_visits.py examples/own_data/visits.csv
"""

import csv
import random
import sys
from math import exp
from pathlib import Path

RECORDS = 1200
HEADER = ["age", "distance_km", "insurance", "reason", "returned"]


def patient(rng: random.Random) -> list[str]:
    """One line: age, distance, insurance, reason, and whether the patient came back."""
    age = rng.randint(18, 95)
    distance = round(rng.expovariate(1 / 12), 1)
    insurance = rng.choice(["public", "private", "none", "employer"])
    reason = rng.choice(["pain", "check-up", "injury", "vaccination"])
    score = (age - 50) / 12 - distance / 15 + {"pain": 1.5, "injury": 0.5}.get(reason, -1.0) + 0.4
    returned = rng.random() < 1 / (1 + exp(-2 * score))
    known = rng.random() > 0.03
    return [str(age), str(distance) if known else "", insurance, reason, "yes" if returned else "no"]


def main(path: Path) -> None:
    """Write the table, the same at every call."""
    rng = random.Random(2024)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(patient(rng) for _ in range(RECORDS))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
