"""Tests what `init` gives on made-up files as people have them: `python -m comparisons.tables_from_csv FOLDER`.

Twelve columns of numbers, counts, categories, days and answers have missing values, and some hold numbers far beyond
their declared bounds, as does a number to predict. They say something of the target, or nothing. The table's schema
goes through what `init` does, and the records through prepare, calibrate and training with seeded noise; a bound on
their number is public, and the number itself is released, as `init` has it. tables-from-csv.csv has the gain on what
says the exact frequencies of the training records to all, or their exact mean, without privacy: in log loss and
accuracy, in R2, or in the share of the deviance; by 4,000 rows that were held out.
"""

import hashlib
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
import typer
from numpy.typing import NDArray
from scipy.special import xlogy

from comparisons.tables import prepared_from, settings_for, train_and_predict
from data.card import DataCard
from tasks.config import new_project as project
from tasks.config.overrides import recipe

HELD_OUT = 4000
Target = Literal["2 classes", "5 classes", "26 classes", "number", "count"]
CITIES = [f"city {number}" for number in range(40)]
GRADES = ["low", "middle", "high"]
RANGE = {"number": (0.0, 100.0), "count": (0.0, 30.0)}
BOUNDS = {
    "income": (0, 200),
    "age": (18, 100),
    "score": (-5, 5),
    "paid": (0, 100),
    "visits": (0, 50),
    "weight": (0, 200),
}


def made_up(target: Target, rows: int, seed: int, *, says: bool) -> pd.DataFrame:
    """The rows of a file. says: whether the columns say something of `y`."""
    draw = np.random.default_rng([seed, rows])
    cities = 1.0 / np.arange(1, 41)
    frame = pd.DataFrame(
        {
            "income": draw.lognormal(3, 1, rows).round(2),
            "age": draw.integers(18, 95, rows),
            "score": draw.normal(size=rows).round(3),
            "paid": (draw.lognormal(1, 1, rows) * (draw.random(rows) < 0.3)).round(2),
            "visits": draw.poisson(2, rows),
            "weight": draw.normal(75, 12, rows).round(1),
            "kind": draw.choice(list("pqrst"), rows),
            "city": draw.choice(CITIES, rows, p=cities / cities.sum()),
            "grade": draw.choice(GRADES, rows, p=[0.5, 0.3, 0.2]),
            "member": draw.choice(["yes", "no"], rows, p=[0.2, 0.8]),
            "since": pd.Timestamp("2015-01-01") + pd.to_timedelta(draw.integers(0, 3650, rows), unit="D"),
            "answer": draw.choice(["a", "b"], rows),
        }
    )
    frame["since"] = frame["since"].dt.strftime("%Y-%m-%d")
    score = (
        np.log(frame["income"])
        - 3
        + (frame["kind"] == "p")
        + (frame["age"] > 60)
        - (frame["member"] == "yes")
    )
    frame["y"] = labels(target, ((score - score.mean()) / score.std()).to_numpy() * says, draw)
    for name, share in (("score", 0.1), ("income", 0.05), ("weight", 0.6), ("kind", 0.03), ("since", 0.02)):
        frame.loc[draw.random(rows) < share, name] = np.nan
    frame.loc[draw.random(rows) < 0.002, "income"] = 1e7
    frame.loc[draw.random(rows) < 0.002, "visits"] = 99_999
    if target == "number":
        frame.loc[draw.random(rows) < 0.002, "y"] = 1e6
    return frame


def labels(target: Target, score: NDArray[np.float64], draw: np.random.Generator) -> NDArray[Any]:
    """What is to be predicted, by a score with deviation 1, or 0 for all."""
    rows = len(score)
    if target == "number":
        return (50 + 5 * score + draw.normal(0, 10, rows)).round(2)
    if target == "count":
        return draw.poisson(np.exp(0.5 * score)) * (draw.random(rows) < 0.6)
    count = int(target.split()[0])
    chances = np.outer(score, np.linspace(1, -1, count)) - np.log(np.arange(1, count + 1))
    chosen: NDArray[Any] = (chances + draw.gumbel(size=chances.shape)).argmax(1)
    return np.char.add("k", np.char.zfill(chosen.astype(str), 2))


def schema(target: Target, frame: pd.DataFrame) -> dict[str, Any]:
    """What an owner knows of the file without looking: bounds and categories."""

    def of_number(name: str, bounds: tuple[float, float]) -> dict[str, Any]:
        return {"name": name, "type": "number", "constraints": {"minimum": bounds[0], "maximum": bounds[1]}}

    lists = {
        "kind": list("pqrst"),
        "city": CITIES,
        "grade": GRADES,
        "member": ["yes", "no"],
        "answer": ["a", "b"],
    }
    fields = [of_number(name, bounds) for name, bounds in BOUNDS.items()]
    fields += [{"name": name, "constraints": {"enum": listed}} for name, listed in lists.items()]
    days = {"minimum": "2014-01-01", "maximum": "2026-12-31"}
    fields.append({"name": "since", "type": "date", "constraints": days})
    if target in RANGE:
        fields.append(of_number("y", RANGE[target]))
    else:
        fields.append({"name": "y", "constraints": {"enum": sorted(frame["y"].unique())}})
    return {"fields": fields}


def card_by_init(target: Target, frame: pd.DataFrame, rows: int, root: Path) -> dict[str, Any]:
    """The card that `init` writes for a file of these rows, of which the last ones test the model."""
    (root / "schema.json").write_text(json.dumps(schema(target, frame)))
    columns, predicts = project.of_schema(root / "schema.json", ["y"])
    predicts = project.of_number(predicts, counts=target == "count", quantile=None)
    files = {}
    for part, held in (("train", frame[:-HELD_OUT]), ("test", frame[-HELD_OUT:])):
        path = root / f"{part}.csv"
        held.to_csv(path, index=False)
        files[part] = {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    reader = project.table_of(columns, root / "train.csv", predicts, {}, rows)
    return {
        "name": "made-up", "title": "Made up", "source": "made up", "licence": "none", "citation": "none",
        "public": True, "unit": "one person", "population": "made-up", "cap": {"epsilon": 1e6, "delta": 1.0},
        "holdout": "public", "records": {"at_most": rows}, **predicts, "files": files, "reader": reader,
    }  # fmt: skip


def gains(
    target: Target, scores: NDArray[Any], real: NDArray[Any], trained_on: NDArray[Any]
) -> dict[str, float]:
    """By how much a model is better than the frequencies or the mean of what it was trained on."""
    if target in RANGE:
        mean = float(trained_on.mean(dtype=float))
        if target == "number":
            lost = [float(np.square(predicted - real).mean()) for predicted in (scores[:, 0], mean)]
            return {"r2": 1 - lost[0] / lost[1]}
        low, high = RANGE[target]
        rates, counts = ((part + 1) / 2 * (high - low) + low for part in (scores[:, 0].clip(-1, 1), real))
        of_mean = np.full(len(real), (mean + 1) / 2 * (high - low) + low)
        lost = [deviance(predicted, counts) for predicted in (rates, of_mean)]
        return {"deviance": 1 - lost[0] / lost[1]}
    shares = np.bincount(trained_on, minlength=scores.shape[1]) / len(trained_on)
    likelihoods = scores[np.arange(len(real)), real]
    return {
        "log_loss": float(
            np.log(likelihoods).mean() - np.log(shares.clip(min=0.5 / len(trained_on))[real]).mean()
        ),
        "accuracy": float((scores.argmax(1) == real).mean() - (shares.argmax() == real).mean()),
    }


def deviance(rates: NDArray[Any], counts: NDArray[Any]) -> float:
    """Half the Poisson deviance of a record."""
    return float((xlogy(counts, counts) - xlogy(counts, rates) - counts + rates).mean())


def main(
    folder: Path,
    rows: str = "500,2000,10000,100000",
    seeds: Annotated[str, typer.Option(help="Of each number of rows.")] = "4,3,2,1",
    targets: str = ",".join(get_args(Target)),
    epsilon: float = 1.0,
) -> None:
    """Write tables-from-csv.csv into FOLDER, a row after the other."""
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    sizes = zip(rows.split(","), seeds.split(","), strict=True)
    for (count, many), target, says in product(list(sizes), targets.split(","), (False, True)):
        for seed in range(int(many)):
            with tempfile.TemporaryDirectory() as folder_name:
                root, trained_on = Path(folder_name), round(0.8 * int(count))  # a fifth is held out
                frame = made_up(target, trained_on + HELD_OUT, seed, says=says)  # type: ignore[arg-type]
                card = card_by_init(target, frame, int(count), root)  # type: ignore[arg-type]
                chosen = recipe(DataCard.model_validate_json(json.dumps(card)), "dp_sgd", epsilon)
                more = card | {"records": {"at_most": int(count) + HELD_OUT}}  # of the rows of both files
                _, info, held = prepared_from(more, root, "prepared")
                settings = settings_for(chosen, epsilon, {"name": chosen.model})
                seconds, evaluation = train_and_predict(settings, info, held, seed)
                parts = (np.array(part) for part in (held.test_labels, held.train_labels))
                table.append(
                    {
                        "target": target,
                        "rows": count,
                        "says": says,
                        "seed": seed,
                        "seconds": round(seconds, 1),
                    }
                    | gains(target, np.array(evaluation.scores), *parts)  # type: ignore[arg-type]
                )
                typer.echo(str(table[-1]))
        pd.DataFrame(table).to_csv(folder / "tables-from-csv.csv", index=False, float_format="%.5g")


if __name__ == "__main__":
    typer.run(main)
