"""Accuracy of a search whose trials are charged: `python -m benchmarks.tuning`.

It is compared with one run of a recipe or of the advised settings, and with the best of the whole grid for free. Noise
is seeded, and the data are public. Rows already in the table are kept.
"""

import csv
import hashlib
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from algorithms.privacy.documents import PlanDocument
from algorithms.privacy.mechanisms.noise import Generator
from data import DatasetInfo
from data.card import data_card
from data.prepared import contents
from tasks import prepare
from tasks.calibrate import calibrate
from tasks.config import data_mirror, params
from tasks.config.overrides import recipe
from tasks.tuning.search import SearchTrial
from tasks.tuning.search_plan import SearchPlan, plan_search
from tasks.tuning.settings import READS, Draw, SearchObjective, Tuning, candidates

What = Literal["recipe", "advised", "tuned", "best of the grid for free"]
_COLUMNS = ("set", "epsilon", "seed", "what", "accuracy", "trial_epsilon", "trials")
_TABLES = {"algorithm.update.learning_rate": [0.5, 1.0, 2.0, 4.0, 8.0], "algorithm.clip_norm": [0.3, 1.0]}
_IMAGES = {"algorithm.update.learning_rate": [1.0, 2.0, 4.0, 8.0]}
SPACES: dict[str, tuple[dict[str, list[Any]], float]] = {
    "adult": (_TABLES, 8.0),
    "bank-marketing": (_TABLES, 8.0),
    "mnist": (_IMAGES, 4.0),
    "fashion-mnist": (_IMAGES, 4.0),
}
"""By data set: the search space and the mean number of trials."""


@dataclass(frozen=True)
class Job:
    """One row of the table."""

    dataset: str
    epsilon: float
    seed: int
    what: What

    def row(self, work: Path) -> list[Any]:
        """Run what the row needs; `work` holds the prepared data."""
        info = DatasetInfo.read(work / self.dataset)
        if self.what in ("recipe", "advised"):
            document = self._document(is_advised=self.what == "advised")
            plan = calibrate(params.parse(document, reads=READS), info)
            reached = [self._reached(document, plan, work, info, 0)]
            return [*self._about(), reached[0], self.epsilon, 1]
        space, mean = SPACES[self.dataset]
        search = Tuning.model_validate({"space": space, "epsilon": self.epsilon, "trials": Draw(mean=mean)})
        if self.what == "tuned":
            search_plan = plan_search(search, self._document(), info)
            picks, each = self._picks(search, search_plan), search_plan.epsilon_per_trial
            documents, plans = search_plan.documents, search_plan.plans
        else:
            documents = tuple(candidates(search, self._document()))
            plans = tuple(calibrate(params.parse(d, reads=READS), info) for d in documents)
            picks, each = list(range(len(plans))), self.epsilon
        reached = [self._reached(documents[i], plans[i], work, info, n) for n, i in enumerate(picks)]
        return [*self._about(), max(reached), round(each, 4), len(picks)]

    def _about(self) -> list[Any]:
        return [self.dataset, self.epsilon, self.seed, self.what]

    def _document(self, *, is_advised: bool = False) -> dict[str, Any]:
        chosen_recipe = recipe(
            data_card(self.dataset, Path("data/cards")), "dp_sgd", self.epsilon, by_numbers=is_advised
        )
        return {
            "data": {"dataset": self.dataset},
            "privacy": {"epsilon": self.epsilon, "delta": 1e-5, "noise": "seeded"},
            "algorithm": {"name": "dp_sgd", **chosen_recipe.settings},
            "model": {"name": chosen_recipe.model},
            "performance": {"threads": 1},
        }

    def _picks(self, search: Tuning, search_plan: SearchPlan) -> list[int]:
        drawn = Generator(hashlib.sha256(repr(("picks", *self._about())).encode()).digest(), private=False)
        number = search.trials.trials().number(float(drawn.stream(0).uniform(1)[0]))
        return [int(len(search_plan.plans) * u) for u in drawn.stream(1).uniform(number)]

    def _reached(
        self,
        document: dict[str, Any],
        plan: PlanDocument,
        work: Path,
        info: DatasetInfo,
        number: int,
    ) -> float:
        key = hashlib.sha256(repr((*self._about(), number)).encode()).digest()
        with tempfile.TemporaryDirectory(dir=work) as folder:
            trial_folder, prepared = Path(folder) / "trial", work / self.dataset
            secrets = contents(prepared), key, False
            SearchTrial(
                document, plan, SearchObjective(), prepared, info, *secrets, "measured", trial_folder
            ).run()
            return float(json.loads((trial_folder / "score.json").read_text()))


def main(
    datasets: Annotated[list[str], typer.Argument(help=f"Of {', '.join(SPACES)}.")],
    table: Annotated[Path, typer.Option(help="The rows, as CSV; those that are there are kept.")],
    work: Annotated[Path, typer.Option(help="Prepared data, and what trials leave.")],
    epsilons: Annotated[str, typer.Option(help="Comma-separated.")] = "1,3",
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    whats: Annotated[str, typer.Option(help="Comma-separated; all by default.")] = ",".join(get_args(What)),
    workers: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Measure the rows that the table lacks, one seed of everything before the next."""
    for dataset in datasets:
        if not (work / dataset).exists():
            settings = params.parse({"data": {"dataset": dataset}}, reads=prepare.READS)
            prepare.prepare(
                settings, mirror=data_mirror(), home=work, destination=work / dataset, root=Path.cwd()
            )
    known = table.read_text().splitlines() if table.exists() else []
    done = {tuple(row[:4]) for row in csv.reader(known)}
    jobs = [
        Job(dataset, float(at), seed, what)  # type: ignore[arg-type]
        for seed in range(seeds)
        for dataset in datasets
        for at in epsilons.split(",")
        for what in whats.split(",")
    ]
    todo = [job for job in jobs if tuple(map(str, job._about())) not in done]
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        table.open("a", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        if not done:
            writer.writerow(_COLUMNS)
        for finished in as_completed([pool.submit(job.row, work) for job in todo]):
            writer.writerow(finished.result())
            file.flush()


if __name__ == "__main__":
    typer.run(main)
