"""A search for settings that is private as a whole: only the winner is released, for one price that its card states.

The number of trials and the settings of each are drawn from the run's secret key, so a resumed search has the same
trials. The ledger reserves the price of the whole search before the first trial, and a killed search is charged only
once, whenever it is resumed. The settings, number and scores of the other trials are deleted with the key.
"""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from ruamel.yaml import YAML

from algorithms.core import checkpoint
from algorithms.core.learned_features import LearnedFeatures, learn_shared_features
from algorithms.core.plan import Plan
from algorithms.core.private_evaluation import EvaluationPlan, release_evaluation
from algorithms.core.receipt import reserved_events
from algorithms.core.training import ResumableRun, train
from algorithms.core.user_level import user_level_barrier, user_level_model
from algorithms.errors import EmptySearchError, RefusedError
from algorithms.evaluation import ReleasedHistogram, sum_of_scores
from algorithms.evaluation import metrics_of as released_metrics
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.models.feature_transforms import buffers
from algorithms.privacy.accounting import Budget, rounded_up
from algorithms.privacy.accounting.epsilon import adjacency_named, epsilon
from algorithms.privacy.accounting.events import Schedule, trials_of
from algorithms.privacy.accounting.filters import ScheduleFilter
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.importance_sampling import LastNorms
from algorithms.privacy.barrier.trace import ReleaseRow, Trace
from algorithms.privacy.card import PrivacyCard, RunRecord, build, verify
from algorithms.privacy.card.build import Columns
from algorithms.privacy.documents import PlanDocument, Receipt, RunIdentity, SearchFacts
from algorithms.privacy.ledger import WHOLE_POPULATION, Ledger
from algorithms.privacy.mechanisms.noise import Generator
from data import DatasetInfo
from data.documents import Document, load_yaml
from data.files import read_json, write_text, write_whole
from data.prepared import HeldOut, changed_records_error, contents, load_as, load_held_out
from data.readers.records import RecordBatch
from tasks.calibrate import check_plan
from tasks.config import data_mirror, home, ledger_url, params
from tasks.config.overrides import value_at
from tasks.config.own_code import names_in
from tasks.csv_files import write_csv
from tasks.evaluate import load_model, metrics_of
from tasks.evaluation_counts import count_held_out, passes_alone
from tasks.model_building import features_for, model_for
from tasks.model_file import save_model, shrinkage_of
from tasks.preflight.consent import confirm_repeat
from tasks.preflight.rehearsal import rehearse
from tasks.prepare import prepare
from tasks.report import RunResults, data_facts_of
from tasks.reporting import environment
from tasks.runs import store
from tasks.runs.charge import ChargedRun, claim_run
from tasks.runs.dvc_stages import EXISTING_RESULT, checkout_lock
from tasks.runs.ledger import bind, holdout_note, open_newest, register
from tasks.runs.metrics import format_metric, headline_metric, metric_name, placeholder_metrics
from tasks.runs.reservations import noting_what_was_spent
from tasks.runs.signing import signing_key
from tasks.runs.software import reuse_note
from tasks.runs.store import EVALUATION
from tasks.tracking.runs import log_winner
from tasks.train import compute_config
from tasks.tuning.earlier_searches import SEARCH, earlier_search_plan, search_to_json
from tasks.tuning.scoring import record_of_zeros, score_statistic
from tasks.tuning.search_plan import (
    SearchPlan,
    distinct_models,
    plan_search,
    score_release,
    trial_schedule,
    without_evaluation,
)
from tasks.tuning.settings import READS, Range, SearchObjective, Tuning

SCORE = "score.json"
FOLDER = Path("tuned")
PAGE = "tune.html"
_TRIALS, _SHARED = "trials", "shared"
_SCORES = {
    "public": "The best was the one that did best on held-out records that the data card declares public; of the best"
    " of several, its metrics there are a little too good.",
    "private": "The best was the one with the highest noised sum of how right it was on each of a share of the records,"
    " which is charged.",
    "held_out": "The best was the one with the highest noised sum of how right it was on each of the records held out,"
    " from a release of them like that of an evaluation, evaluation.json, which is charged. They are other people than"
    " those trained on, so the search costs the larger of the two. As the best of several, its metrics there are a"
    " little too good. Their intervals are so much wider that they hold in at least 95% of searches, whichever trial"
    " wins; a run with these settings has narrower ones of its own.",
}
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchTrial:
    """One trial, as a value that can be sent to another process; its results are in its folder.

    document: of params.yaml. plan: its document. contents: the digest of the charged records. key: of its own noise.
    shared: run id and folder of the features that were learned for all trials, if there are any.
    """

    document: Document
    plan: PlanDocument
    objective: SearchObjective
    prepared: Path
    info: DatasetInfo
    contents: str = field(repr=False)
    key: bytes = field(repr=False)
    private_noise: bool
    run_id: str
    folder: Path
    shared: tuple[str, Path] | None = None

    def run(self) -> None:
        """Train and score, unless that is done; a killed trial is resumed with the same noise."""
        if (self.folder / SCORE).exists():
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = params.parse(self.document, reads=READS)
        plan = Plan.from_document(self.plan)
        # The loop's filter has the releases of the training; that of the score follows it, with noise of its own.
        planned = plan.evaluation
        plan = replace(plan, evaluation=None)
        to_score, to_train = self.records()
        start = model_for(settings, self.info)
        before = None if self.shared is None else load_shared(start, *self.shared)
        if self.shared is not None and before is None:  # a trial must not learn it again
            raise RefusedError(
                "{path} has nothing of what all trials share; run them where that folder can be read.",
                code="missing_file",
                path=self.shared[1],
            )
        state, trace, model = train(
            settings.algorithm,
            plan,
            start,
            open_records=lambda: to_train,
            run=ResumableRun(
                run_id=self.run_id,
                generator=self._generator("training"),
                folder=self.folder,
                checkpoint_seconds=settings.performance.checkpoint_seconds,
            ),
            compute=compute_config(settings.performance),
            features=features_for(settings, self.info),
            shared_features=before,
        )
        released = settings.algorithm.released(state)
        file = self.folder / "model.safetensors"
        save_model(
            file,
            model,
            released,
            self.info,
            self.plan.algorithm,
            prepared=self.prepared,
            shrinkage=shrinkage_of(state),
        )
        if planned is not None:
            score = self._held_out_score(planned, plan, trace, file)
        elif to_score is not None:
            score = self._private_score(to_score, plan, trace, file)
        else:
            score = headline_metric(metrics_of(file, self.prepared, allow_code=[*names_in(self.document)]))
        trace.write(self.folder / "trace.parquet")
        write_text(self.folder / SCORE, json.dumps(score), mode=0o600)

    def _generator(self, purpose: str) -> Generator:
        return derive_generator(self.key, purpose, private=self.private_noise)

    def records(self) -> tuple[RecordBatch | None, RecordBatch]:
        """The records to score, None for a public objective, and those to train on, divided by their content alone."""
        data = load_as(self.prepared, self.info)
        if contents(self.prepared) != self.contents:  # read after the arrays are mapped, as in `load_as`
            raise changed_records_error(self.prepared)
        if self.objective.on != "private":
            return None, RecordBatch(data.train_features, data.train_labels)
        rows = zip(data.train_features, data.train_labels, strict=True)
        is_scored = np.array([_is_scored(x, y, self.objective.share) for x, y in rows])
        features, labels = np.asarray(data.train_features), np.asarray(data.train_labels)
        return RecordBatch(features[is_scored], labels[is_scored]), RecordBatch(
            features[~is_scored], labels[~is_scored]
        )

    def _private_score(self, records: RecordBatch, plan: Plan, trace: Trace, file: Path) -> float:
        """The noisy sum of the scores, through a separate barrier; its row is added to the trial's trace."""
        model, parameters = load_model(file, allow_code=[*names_in(self.document)])
        release, delta = score_release(self.objective), plan.target.budget.delta
        schedule = [(release.event(), 1)]
        score_trace = Trace()
        score_trace.step = plan.steps
        rows = self.info.rows_per_user
        barrier = Barrier(
            records,
            user_level_model(model, rows),
            privacy_filter=ScheduleFilter(
                schedule, Budget(epsilon(schedule, delta, accountant="rdp"), delta)
            ),
            generator=self._generator("score"),
            delta=delta,
            trace=score_trace,
            compute=ComputeConfig(),
        )

        size, *_ = passes_alone(model, self.info)
        of_record = score_statistic(self.info, model, parameters, size=size)
        scorer = user_level_barrier(barrier, rows)
        score = float(scorer.total(of_record, bound=L2(1.0), noise=release.noise)[0])
        so_far = epsilon(
            [*plan.schedule, *schedule],
            delta,
            accountant=plan.accountant,
            adjacency=adjacency_named(plan.adjacency),
        )
        row = asdict(score_trace.rows[0]) | {"release": len(trace.rows), "epsilon": so_far}
        trace.rows.append(ReleaseRow(**row))
        return score

    def _held_out_score(self, planned: EvaluationPlan, plan: Plan, trace: Trace, file: Path) -> float:
        """The noisy sum of the scores of the people held out, by a release of them that is the trial's last.

        NaN where it fails: the trial is charged, so it stays, and is the worst. That it failed is not logged, as the
        number of lines would reveal that of the trials, nor why, which may reveal a record; see `_public_failure`.
        """
        data, released_before = load_held_out(self.prepared), len(trace.rows)
        if contents(self.prepared) != self.contents:  # read after the arrays are mapped, as in `load_as`
            raise changed_records_error(self.prepared)
        once, delta = planned.schedule_of_trial, plan.target.budget.delta
        alone = replace(planned, trials=None, epsilon=epsilon(once, delta, accountant=plan.accountant))
        try:
            trained = load_model(file, allow_code=[*names_in(self.document)])
            released = release_evaluation(
                alone,
                count_held_out(alone.spec, trained, data),
                generator=self._generator("score"),
                trace=trace,
                step=plan.steps,
            )
            write_text(self.folder / EVALUATION, released.to_json() + "\n", mode=0o600)
        except Exception:
            del trace.rows[released_before:]
            (self.folder / EVALUATION).unlink(missing_ok=True)
            return math.nan
        return sum_of_scores(released)


def _is_scored(features: NDArray[Any], label: NDArray[Any], share: float) -> bool:
    """A coin that depends only on the record's content, so that no other record decides on which side it is."""
    digest = hashlib.sha256(np.asarray(features).tobytes() + np.asarray(label).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64  # a hash as a number in [0, 1)


def derive_generator(key: bytes, *purpose: object, private: bool) -> Generator:
    """A generator of the search's key for one purpose, such as the noise of a trial, independent of those of others."""
    return Generator(hashlib.sha256(repr(("search", *purpose)).encode() + key).digest(), private=private)


def load_shared(model: Model, run_id: str, folder: Path) -> tuple[LearnedFeatures, Trace] | None:
    """What all trials share, as `_share_features` wrote it into `folder`; None if it is not there."""
    form = LearnedFeatures(buffers(model), model.initial_parameters())
    loaded = checkpoint.load(folder, form, run_id=run_id, last_norms=LastNorms())
    return None if loaded is None else (loaded[0], loaded[2])


@dataclass(frozen=True)
class Search:
    """A search: its settings, its price, and the records."""

    tuning: Tuning
    search_plan: SearchPlan
    prepared: Path
    info: DatasetInfo
    blocks: tuple[str, ...] = (WHOLE_POPULATION,)

    @property
    def mean_trials(self) -> float:
        """How many trials there are, on average where their number is drawn."""
        return float(
            len(self.search_plan.plans) if self.search_plan.releases_all else self.tuning.trials.mean
        )

    def digest(self, home: Path) -> str:
        """A digest of everything that decides the result; see `store.digest`."""
        decides = [
            self.tuning.model_dump(),
            [plan.to_json() for plan in self.search_plan.plans],
            list(self.search_plan.documents),
            self.blocks,
            *store.counted_columns(self.search_plan.documents, self.info),
        ]
        return store.digest(decides, self.info, self.prepared, home=home)

    @property
    def charged_plan(self) -> Plan:
        """The plan that is charged, which is the same whichever candidate wins, but for that candidate's numbers."""
        return self.plan_if_won(0)[0]

    def plan_if_won(self, candidate: int) -> tuple[Plan, PlanDocument]:
        """The plan of the whole search with the numbers of this candidate, by its index, and its document."""
        search_plan = self.search_plan
        document = search_plan.plans[candidate]
        alone = Plan.from_document(document)
        budget = Budget(self.tuning.epsilon, alone.target.budget.delta)
        target = replace(alone.target, budget=budget, accountant=search_plan.accountant, prior_events=())
        plan = replace(alone, target=target, schedule=search_plan.schedule, epsilon=search_plan.costs)
        search = SearchFacts(
            shows_all=search_plan.releases_all,
            each=search_plan.epsilon_per_trial,
            shares=search_plan.shares_features,
            space=len(search_plan.plans),
        )
        return plan, document.model_copy(update=dict(plan.to_document()) | {"attack": None, "search": search})

    def to_json(self) -> str:
        """What is kept of it for a later version."""
        return search_to_json(self.tuning, self.search_plan)

    def check(self) -> None:
        """Raise RefusedError if the plan of the search or of a trial does not hold today."""
        self.charged_plan.check()
        for document, plan in zip(self.search_plan.documents, self.search_plan.plans, strict=True):
            trained = plan.model_copy(update={"evaluation": None})
            check_plan(trained, params.parse(document, reads=READS), without_evaluation(self.info))

    def or_earlier(self, home: Path) -> "Search":
        """The search, or the one on the same private records that asked for the same and was planned otherwise."""
        plan = None
        if not self.info.is_public:
            plan = earlier_search_plan(
                self.tuning,
                self.search_plan,
                digest_of=lambda plan: replace(self, search_plan=plan).digest(home),
                check=lambda plan: replace(self, search_plan=plan).check(),
                home=home,
            )
        return self if plan is None else replace(self, search_plan=plan)


Runs = Callable[[Sequence[SearchTrial]], None]
"""Runs trials, in parallel or not."""


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keep what trials log below an error from everybody, since the number of lines would reveal that of the trials.

    Their models were logged before the charge. It holds for the process, so threads need it around all of them.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def one_by_one(trials: Sequence[SearchTrial]) -> None:
    """Run trials one after the other."""
    with _without_logs():  # a worker may be a process of its own
        for trial in trials:
            trial.run()


def tune(search: Search, *, ledger: Ledger, home: Path, root: Path, run_all: Runs = one_by_one) -> Receipt:
    """Reserve the whole search, run its trials, settle, and write the winner into `tuned`; returns its receipt.

    A finished search is returned at no cost, and a killed one is resumed. Raises BudgetRefusedError if the population
    cannot pay, and RefusedError if nobody agrees to spend again; nothing is spent then. Raises EmptySearchError for a
    search that drew no trial, which is charged and has no result. A search that asked for the same and was planned by
    another version, with more noise, is the same search.
    """
    search, info = search.or_earlier(home), search.info

    def confirm_search(run_id: str, has_result: bool) -> bool:
        return confirm_repeat(f"search {run_id}", "searching", search.search_plan.cost, has_result=has_result)

    first = search.search_plan.documents[0]
    noise, seed = first["privacy"].get("noise", "secure"), first["model"].get("seed", 0)
    with claim_run(
        search.digest(home),
        ledger,
        info,
        noise=noise,
        seed=seed,
        confirm_repeat=confirm_search,
        home=home,
        root=root,
    ) as (run, software):
        result = run.result
        if result is None:
            with run.abandon_if_refused(ledger.status):
                register(ledger, info, home=home, prepared=search.prepared, plan=lambda: search.charged_plan)
                charged_run = ChargedRun(
                    ledger, run, software, info, search.prepared, search.blocks, home, root
                )
                run.keep_plan(search.to_json().encode(), SEARCH)
                _reserve(search, charged_run)
            bind(ledger, info, home=home, prepared=search.prepared)
            result = _run_search(search, charged_run, run_all)
        run.forget_secrets()
        return _hand_out(search, result, root, home)


def deliver_search(
    tuning: Tuning,
    root: Path,
    *,
    say: Callable[[str], object],
    run_all: Runs,
    publish: Callable[[str], object] = lambda _: None,
) -> str:
    """Prepare, plan and run a search in the locked checkout at `root`; returns the outcome as a sentence.

    say: called if this waits for another run. run_all: runs the trials, such as `in_threads` with a number of threads.
    publish: called with the sentence before another search may replace the result.
    Raises what `tune` raises, and ParamsRefusedError or DataRefusedError for invalid settings and data.
    """
    with checkout_lock(root, say=say), noting_what_was_spent(root):
        settings, folder = params.load(root / "params.yaml", reads=READS), home()
        prepared = root / "datasets" / "prepared"
        cards = root / "data" / "cards"
        info = prepare(
            settings, mirror=data_mirror(), home=folder, destination=prepared, root=root, cards=cards
        )
        base = load_yaml((root / "params.yaml").read_text(encoding="utf-8"))
        search_plan = plan_search(tuning, base, info)
        work = Search(tuning, search_plan, prepared, info, info.blocks or (WHOLE_POPULATION,))
        ledger = open_newest(ledger_url(settings.ledger.url), home=folder, root=root)
        # A ledger that has not moved was not charged: the search was done before.
        head = ledger.head()
        receipt = tune(work, ledger=ledger, home=folder, root=root, run_all=run_all)
        is_done = ledger.head() == head
        log_winner(root / FOLDER, settings.tracking, root=root)
        note = reuse_note(receipt, is_public=info.is_public) if is_done else None
        each = read_json(root / FOLDER / "plan.json")["search"]["each"]
        cost = "without a bound" if receipt.cost is None else rounded_up(receipt.cost)
        reused = f"; {EXISTING_RESULT}{f'; {note}' if note else ''}." if is_done else ""
        sentence = (
            f"the winner of search {receipt.run_id} is in {FOLDER}; all of it cost epsilon"
            f" {cost}, a trial by itself {rounded_up(each)}{reused}"
        )
        publish(sentence)
    return sentence


def shares(trials: Sequence[SearchTrial], workers: int) -> list[Sequence[SearchTrial]]:
    """Divide trials into a share per worker, possibly empty, since a task per trial would reveal their number."""
    return [trials[start::workers] for start in range(workers)]


def in_threads(workers: int, trials: Sequence[SearchTrial]) -> None:
    """Run trials in this number of threads."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one_by_one, shares(trials, workers)))


def _reserve(search: Search, charged_run: ChargedRun) -> None:
    plan, document = search.plan_if_won(0)
    if charged_run.run.ledger_status is None:
        # A model that cannot be trained is refused before the charge.
        for settings in distinct_models(search.search_plan.documents):
            model = user_level_model(model_for(settings, search.info), search.info.rows_per_user)
            compute = compute_config(settings.performance)
            engine = compute.engine(model, record_of_zeros(search.info))
            compute.check_rounding(engine, private=charged_run.run.private_noise)
        _rehearse(search, charged_run)  # a charged search must end with a card, whichever trial wins
    methods = sorted({plan.algorithm for plan in search.search_plan.plans})
    notes = document.ledger_notes | {"algorithm": ", ".join(methods)} | holdout_note(search.info)
    charged_run.reserve(plan, notes)


def _rehearse(search: Search, charged_run: ChargedRun) -> None:
    """Make the card of each possible winner; raises RefusedError if that fails.

    Only the first is verified and gets a page, since all have the same events.
    """

    def report(candidate: int, results: RunResults) -> None:
        card = _card(search, results.plan, results.receipt, results.trace)
        if candidate == 0:
            settings = search.search_plan.documents[candidate]
            _page(search, results.plan, results.receipt, settings, ("accuracy", "100%"))
            for check in verify(card, unsigned=True).failures:
                raise RefusedError(
                    "{check}: {detail}", code="card_broken", check=check.name, detail=check.detail
                )

    for candidate, trial_plan in enumerate(search.search_plan.plans):
        _, document = search.plan_if_won(candidate)
        rehearse(
            document,
            search.info,
            _identity(search, charged_run, document),
            trial=_winner_schedule(trial_plan, search.tuning.objective),
            report=partial(report, candidate),
        )


def _winner_schedule(plan: PlanDocument, objective: SearchObjective) -> Schedule:
    """The releases in a winner's trace, those of people held out being the last."""
    trained = trial_schedule(plan, objective)
    if plan.evaluation is None:
        return trained
    return [*trained, *EvaluationPlan.from_document(plan.evaluation).schedule_of_trial]


def _identity(search: Search, charged_run: ChargedRun, document: PlanDocument) -> RunIdentity:
    device = compute_config(params.parse(search.search_plan.documents[0], reads=READS).performance).device
    return charged_run.identity(document.algorithm, device)


def trials_of_run(search: Search, run: store.RunAttempt) -> list[tuple[int, SearchTrial]]:
    """Draw the trials from the run's key, each with the index of its candidate; every call gives the same trials."""
    key, size, of_records = run.generator(), len(search.search_plan.plans), contents(search.prepared)
    # Each draw has a stream of its own, which is the same for every call: a search that goes on has the same trials.
    candidates = list(range(size))
    if not search.search_plan.releases_all:
        number = search.tuning.trials.trials().number(float(key.stream(0).uniform(1)[0]))
        candidates = [int(size * u) for u in key.stream(1).uniform(max(1, number))[:number]]
    return [
        (
            candidate,
            SearchTrial(
                search.search_plan.documents[candidate],
                search.search_plan.plans[candidate],
                search.tuning.objective,
                search.prepared,
                search.info,
                of_records,
                derive_generator(key.key, "trial", index, private=run.private_noise).key,
                run.private_noise,
                f"{run.run_id}-trial-{index}",
                run.folder / _TRIALS / str(index),
                (run.run_id, run.folder / _TRIALS / _SHARED) if search.search_plan.shares_features else None,
            ),
        )
        for index, candidate in enumerate(candidates)
    ]


def _share_features(run: store.RunAttempt, trial: SearchTrial) -> None:
    """Learn and release the features once for all trials; a resumed search gives the same release."""
    assert trial.shared is not None
    run_id, folder = trial.shared
    settings, plan = params.parse(trial.document, reads=READS), Plan.from_document(trial.plan)
    model = model_for(settings, trial.info)
    features = features_for(settings, trial.info)
    if features is None or load_shared(model, run_id, folder) is not None:
        return
    learned, trace = learn_shared_features(
        features,
        plan,
        model,
        records=trial.records()[1],
        generator=derive_generator(run.generator().key, _SHARED, private=run.private_noise),
        compute=compute_config(settings.performance),
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    checkpoint.save(folder, learned, run_id=run_id, step=0, trace=trace, last_norms=LastNorms())


def _run_search(search: Search, charged_run: ChargedRun, run_all: Runs) -> Path:
    """Run the trials, choose the best, and settle the search with its result; returns the result's folder."""
    run, trials = charged_run.run, trials_of_run(search, charged_run.run)
    # The trials and their noise are for these records and no others.
    if run.run_id.rpartition("-")[0] != search.digest(charged_run.home):
        raise changed_records_error(search.prepared)
    if not trials:
        _settle_empty(search, charged_run)
    if search.search_plan.shares_features:
        _share_features(run, trials[0][1])
    with _without_logs():
        run_all([trial for _, trial in trials])
    scores = [float(json.loads((trial.folder / SCORE).read_text(encoding="utf-8"))) for _, trial in trials]
    best = int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))
    candidate, winner = trials[best]
    plan, document = search.plan_if_won(candidate)
    is_evaluated = (winner.folder / EVALUATION).exists()
    if plan.evaluation is not None and not is_evaluated:
        _LOG.warning(
            "The held-out records could not be evaluated, so the best trial is an arbitrary one. %s",
            _public_failure(winner, plan.evaluation),
        )
        plan = plan.without_evaluation()
    folder = run.make_result_folder()
    _write_winner(winner, document, folder, is_evaluated=is_evaluated)
    _write_search(search, scores, best, folder)
    return charged_run.settle(plan, _identity(search, charged_run, document), folder, plan.reserved_schedule)


def _settle_empty(search: Search, charged_run: ChargedRun) -> NoReturn:
    """Settle a search that drew no trial at its whole price; raises EmptySearchError."""
    run, plan = charged_run.run, search.charged_plan
    charged_run.ledger.settle(run.run_id, plan.cost, events=reserved_events(plan))
    run.forget_secrets()
    another = "ask again" if run.private_noise else "set another model.seed"
    raise EmptySearchError(
        "search {run_id} drew 0 trials (possible with `distribution: poisson`). Its budget is spent;"
        " {another} for a new search, which is charged again, or set distribution to negative_binomial,"
        " which draws at least one.",
        code="no_trials",
        run_id=run.run_id,
        another=another,
    )


def _write_winner(winner: SearchTrial, document: PlanDocument, folder: Path, *, is_evaluated: bool) -> None:
    """Copy what the best trial released, beside its plan and its settings."""
    for name in ("model.safetensors", "trace.parquet", *([EVALUATION] if is_evaluated else [])):
        shutil.copyfile(winner.folder / name, folder / name)
    (folder / "plan.json").write_text(document.to_text(sort_keys=True), encoding="utf-8")
    YAML().dump(winner.document, folder / "winner.yaml")


def _write_search(search: Search, scores: Sequence[float], best: int, folder: Path) -> None:
    """Write what is kept of the search for a later version, and the scores that may be shown."""
    (folder / SEARCH).write_text(search.to_json(), encoding="utf-8")
    if search.tuning.objective.on == "public":  # whoever has the winner and these records knows it
        write_text(folder / SCORE, json.dumps(scores[best]))
    if search.search_plan.releases_all:
        # Every trial is paid for.
        points = [
            {key: value_at(document, key) for key in search.tuning.space}
            for document in search.search_plan.documents
        ]
        write_csv(pd.DataFrame(points).assign(score=scores), folder / "trials.csv")


def _public_failure(trial: SearchTrial, planned: EvaluationPlan) -> str:
    """How the winner fails on a record of zeros, which reveals nothing of the people held out."""
    record = record_of_zeros(trial.info)
    synthetic_records = HeldOut(
        trial.info,
        record.features,
        record.labels,
        test_groups=np.zeros((1, len(trial.info.unseen_groups)), np.int16),
    )
    try:
        model = load_model(trial.folder / "model.safetensors", allow_code=[*names_in(trial.document)])
        count_held_out(planned.spec, model, synthetic_records)
    except Exception as error:
        return f"The evaluation of a record of zeros fails, too: {type(error).__name__}."
    return "A record of zeros can be evaluated; why others cannot is withheld, as it could reveal a record."


def _hand_out(search: Search, result: Path, root: Path, home: Path) -> Receipt:
    """Copy the result into `tuned`, with its card and its page, which are made before what is there is deleted."""
    receipt, plan = Receipt.read(result / "receipt.json"), PlanDocument.read(result / "plan.json")
    winner = YAML(typ="safe", pure=True).load(result / "winner.yaml")
    card = _card(search, plan, receipt, pd.read_parquet(result / "trace.parquet"), signing_key(home))
    page = _page(search, plan, receipt, winner, _winner_score(result, search))
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    for path in (path for path in result.iterdir() if path.name != SEARCH):
        write_whole(folder / path.name, partial(shutil.copyfile, path))
    (folder / "privacy_card.json").write_bytes(card.to_bytes())
    (folder / PAGE).write_text(page, encoding="utf-8")
    return receipt


def _winner_score(folder: Path, search: Search) -> tuple[str, str] | None:
    """The winner's headline metric and its name; None without one.

    It is of public held-out records, or with an interval by the release of private ones. As many releases as there were
    trials, on average, could have won, which the interval counts. How many there were is secret.
    """
    if (folder / SCORE).is_file():
        score: float = json.loads((folder / SCORE).read_text(encoding="utf-8"))
        name = metric_name(placeholder_metrics(search.info.label_type.kind))
        return name, format_metric(score, name)
    if not (folder / EVALUATION).is_file():
        return None
    released = ReleasedHistogram.from_json((folder / EVALUATION).read_text(encoding="utf-8"))
    metrics = released_metrics(replace(released, best_of=search.mean_trials))
    shown = [(name, metrics[name]) for name in ("accuracy", "r2", "score") if name in metrics]
    name, estimate = shown[0]
    if estimate is None:
        return None
    value, low, high = (format_metric(end, name) for end in (estimate.value, estimate.low, estimate.high))
    return name, f"{value} ({low} to {high})"


def _card(
    search: Search,
    plan: PlanDocument,
    receipt: Receipt,
    trace: Columns,
    key: Ed25519PrivateKey | None = None,
) -> PrivacyCard:
    return build(RunRecord(plan, receipt, data_facts_of(search.info), trace), key)


def _page(
    search: Search,
    plan: PlanDocument,
    receipt: Receipt,
    winner: Document,
    score: tuple[str, str] | None = None,
) -> str:
    """The page about the winner and its price, compared with one run and with showing all trials.

    score: the name of the winner's metric and its text, where it may be shown.
    """
    tuning, public_plan = search.tuning, Plan.from_document(plan)
    trials = trials_of(public_plan.schedule) or []
    number = round(search.mean_trials)
    adjacency = adjacency_named(plan.adjacency)
    dearest = max(trials, key=lambda trial: epsilon(trial, receipt.delta, adjacency=adjacency))
    naive = [*dearest] * number  # one after the other, as the steps of correlated noise follow their first
    facts = {
        "trials": number,
        "space": {
            key: value.values() if isinstance(value, Range) else value for key, value in tuning.space.items()
        },
        "drawn": f"{tuning.trials.mean:g} on average ({tuning.trials.distribution.replace('_', ' ')})",
        "objective": _SCORES[tuning.objective.on],
        "score": None,
        "held_out": "private, noised" if tuning.objective.on == "held_out" else "public",
        "has_interval": tuning.objective.on == "held_out",
    }
    if score is not None:
        facts |= {"metric": score[0], "score": score[1]}
    return (
        environment()
        .get_template("tune.html.j2")
        .render(
            plan=plan,
            receipt=receipt,
            winner={key: value_at(winner, key) for key in tuning.space},
            cost=receipt.cost,
            naive=epsilon(naive, receipt.delta, adjacency=adjacency),
            facts=facts,
        )
    )
