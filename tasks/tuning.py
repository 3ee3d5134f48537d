"""A search for settings that is private as a whole: only the winner leaves, for one price that is stated.

How many trials there are and which settings each takes is drawn from the run's secret key, so that a search that is
resumed does the same. The ledger holds the price of the whole search before the first trial; a search that is killed
is charged once, whenever it goes on. What the other trials were, how many and how good, is deleted with the key.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from pydantic import Field, JsonValue, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from algorithms.core import training
from algorithms.core.method import Plan, by_accountants
from algorithms.core.people import asked_of_rows, of_people
from algorithms.core.receipt import account_of, cost_of, reserved_events
from algorithms.core.software import software
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.models.feature_transforms import buffers
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.accounting.epsilon import Accountant, adjacency_named, epsilon
from algorithms.privacy.accounting.events import Schedule, schedule_from_json, schedule_to_json
from algorithms.privacy.accounting.filters import ScheduleFilter
from algorithms.privacy.accounting.selection import Trials, after_shared, all_shown, trials_of
from algorithms.privacy.barrier.barrier import Barrier, Performance
from algorithms.privacy.barrier.importance import LastNorms
from algorithms.privacy.barrier.statistics import Statistic, shape_of
from algorithms.privacy.barrier.trace import Row, Trace
from algorithms.privacy.card import PrivacyCard, RunRecord, build, verify
from algorithms.privacy.card.trace import Columns
from algorithms.privacy.ledger import WHOLE_POPULATION, Ledger
from algorithms.privacy.mechanisms.mechanisms import Gaussian
from algorithms.privacy.mechanisms.noise import Generator, secure_generator, seeded_generator
from algorithms.privacy.mechanisms.release import total_release
from data import PublicDescription
from data.prepare.files import write_whole
from data.prepare.prepared import load_as
from data.readers.records import Records
from tasks.calibrate import calibrate, model_for
from tasks.config import params
from tasks.config.environment import SPEND_AGAIN, data_mirror, home, ledger_url, may_spend_again
from tasks.config.params import Group, Params, ParamsRefusedError
from tasks.evaluate import load_model, metrics_of, record_scores
from tasks.prepare import prepare
from tasks.report import Run
from tasks.reporting.page import environment
from tasks.reporting.rehearsal import rehearse
from tasks.runs import preflight, store
from tasks.runs.ledger import open_newest, remember
from tasks.runs.population import bind, digests_of, register
from tasks.runs.quality import quality
from tasks.runs.signing import signer, signing_key
from tasks.runs.stages import checkout_lock
from tasks.runs.store import described
from tasks.tracking.runs import log_winner
from tasks.train import save_model

FOLDER = Path("tuned")
READS = ("data", *("privacy", "features", "algorithm", "model", "performance", "tracking", "ledger"))
PAGE = "tune.html"
_SCORE, _TRIALS, _SHARED = "score.json", "trials", "shared"
_LARGEST_SPACE, _TRIES, _NEAR = 512, 16, 0.98


class Range(Group):
    """Numbers from low to high, both included, as so many points apart equally or by equal factors."""

    low: float
    high: float
    points: int = Field(ge=2, le=64)
    scale: Literal["linear", "log"] = "log"

    @model_validator(mode="after")
    def _is_a_range(self) -> "Range":
        if not self.low < self.high or (self.scale == "log" and self.low <= 0):
            raise ValueError("a range needs low < high, and low above 0 on a log scale")
        return self

    def values(self) -> list[float]:
        """The points, rounded to six digits."""
        between = np.geomspace if self.scale == "log" else np.linspace
        return [float(f"{value:.6g}") for value in between(self.low, self.high, self.points)]


class Draw(Group):
    """How the number of trials is drawn. mean: of it. shape: of the truncated negative binomial; 1 is geometric."""

    distribution: Literal["negative_binomial", "poisson"] = "negative_binomial"
    mean: float = Field(default=8.0, ge=1, le=1e4)
    shape: float = Field(default=1.0, ge=0, le=100)

    def trials(self) -> Trials:
        """As the accounting has it."""
        return Trials(self.mean, math.inf if self.distribution == "poisson" else self.shape)


class Objective(Group):
    """What is maximised: accuracy, or what else models for the target are compared by, on records that the card
    declares public, or a noised sum of `record_scores`, which of classes are the right answers.

    on: "private" takes a share of the records to train on, each by a coin of its own, and adds up what is said of them
    with noise of this multiplier; that is charged with the trial.
    """

    on: Literal["public", "private"] = "public"
    share: float = Field(default=0.1, gt=0, lt=1)
    noise_multiplier: float = Field(default=20.0, gt=0)


class Tuning(Group):
    """tune.yaml; all else about a trial is in params.yaml.

    space: values by dotted key of params.yaml, as lists or ranges. epsilon, delta: of the whole search; delta as in
    params.yaml where it is left out. show_all: shows all trials, each settings once, and pays for all; "cheaper" takes
    it where it leaves a trial more epsilon.
    """

    space: dict[str, list[JsonValue] | Range] = Field(min_length=1)
    epsilon: float = Field(gt=0)
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    trials: Draw = Field(default_factory=Draw)
    objective: Objective = Field(default_factory=Objective)
    show_all: bool | Literal["cheaper"] = False


EXAMPLE = "{space: {algorithm.clip_norm: [0.3, 1.0]}, epsilon: 3.0}"


def load(path: Path) -> Tuning:
    """The settings in a file; raises ParamsRefusedError for what they cannot be."""
    if not path.exists():
        raise ParamsRefusedError(f"There is no file {path}; write one, such as {EXAMPLE}.")
    try:
        document = YAML(typ="safe", pure=True).load(path)
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ParamsRefusedError(
            f"{path} cannot be read as YAML ({type(error).__name__}); correct it."
        ) from None
    if not isinstance(document, Mapping):
        raise ParamsRefusedError(
            f"{path.name} must hold space, epsilon and what else a search needs; correct it."
        )
    try:
        return Tuning.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise ParamsRefusedError(f"{path.name}: {key}: {first['msg']}; correct it.") from None


Document = dict[str, Any]


def candidates(tuning: Tuning, base: Document) -> list[Document]:
    """params.yaml with each point of the space in its place; what a run is named by is never in a space."""
    lists = [value.values() if isinstance(value, Range) else value for value in tuning.space.values()]
    for key, values in zip(tuning.space, lists, strict=True):
        if key.partition(".")[0] not in ("algorithm", "model", "features") or not values:
            raise ParamsRefusedError(
                f"the space has {key}; give values of keys of algorithm, model or features, at least one each."
            )
    if (size := math.prod(map(len, lists))) > _LARGEST_SPACE:
        raise ParamsRefusedError(
            f"the space has {size} settings, at most {_LARGEST_SPACE} are searched; coarsen it."
        )
    return [_with(base, dict(zip(tuning.space, point, strict=True))) for point in product(*lists)]


def _with(base: Document, values: Mapping[str, Any]) -> Document:
    document: Document = json.loads(json.dumps(base))
    for key, value in values.items():
        *parents, last = key.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return document


@dataclass(frozen=True)
class Priced:
    """What a search costs and what a trial may: the plan's document of each candidate, and the event of the whole.

    shows_all: whether every trial may be shown. each: epsilon of one trial by itself. costs: of the whole, by
    accountant; the least one is its cost. schedule: what is charged, what is learned once for all trials and then the
    search. shares: whether anything is.
    """

    shows_all: bool
    each: float
    costs: Mapping[str, float]
    schedule: Schedule
    shares: bool
    documents: tuple[Document, ...]
    plans: tuple[Document, ...]

    @property
    def accountant(self) -> Accountant:
        """By which the whole costs least."""
        return cast(Accountant, min(self.costs, key=self.costs.__getitem__))

    @property
    def cost(self) -> float:
        """Epsilon of the whole."""
        return self.costs[self.accountant]


def price(tuning: Tuning, base: Document, public: PublicDescription) -> Priced:
    """The largest epsilon of a trial with which the whole fits; plans alone, nothing is spent.

    Raises RefusedError where a trial's releases are not fixed in advance, or none fits.
    """
    if tuning.show_all == "cheaper":
        return max(filter(None, both_ways(tuning, base, public)), key=lambda way: way.each)
    base = _with(base, {"privacy.target": None, "privacy.delta": tuning.delta or base["privacy"]["delta"]})
    if tuning.objective.on == "public" and not public.public and public.holdout != "public":
        raise RefusedError(
            f"the card of {public.dataset!r} declares no public held-out records; set objective.on to private."
        )
    every = candidates(tuning, base)
    if tuning.objective.on == "private":
        _check_scored(every, public)
    return _priced(tuning, every, public, shows_all=tuning.show_all)


def both_ways(tuning: Tuning, base: Document, public: PublicDescription) -> "list[Priced | None]":
    """The price with the winner alone, then with all trials shown; None for one that does not fit.

    Raises RefusedError, of the first, where neither fits.
    """
    ways: list[Priced | None] = []
    refusals = []
    for shows_all in (False, True):
        try:
            ways.append(price(tuning.model_copy(update={"show_all": shows_all}), base, public))
        except RefusedError as refusal:
            ways.append(None)
            refusals.append(refusal)
    if len(refusals) == len(ways):
        raise refusals[0]
    return ways


def _check_scored(every: Sequence[Document], public: PublicDescription) -> None:
    """That each model can be asked about a record by itself, on made-up zeros; an error would come after the charge."""
    asked = {json.dumps({group: d[group] for group in ("model", "features") if group in d}): d for d in every}
    example = Records(
        np.zeros((1, *public.input_shape), np.float32 if public.tokens is None else np.int32),
        np.zeros((1, *public.label_shape), public.known.label_dtype),
    )
    for document in asked.values():
        model = model_for(params.parse(document, reads=READS), public)
        try:
            shape_of(_scored(public, model, model.published(model.initial_parameters())), example, model)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise RefusedError(
                f"the model {model.name!r} cannot be asked about one record by itself ({why}); set objective.on to"
                " public."
            ) from None


def _scored(public: PublicDescription, model: Model, parameters: Mapping[str, torch.Tensor]) -> Statistic:
    """How good what the model says of a record is, [1], as a barrier sums it up."""

    def of_batch(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return record_scores(public.known, model.scores(model.outputs(parameters, features)), labels)[:, None]

    return lambda features, label: _OfBatch.apply(of_batch, features, label)  # type: ignore[no-untyped-call]


class _OfBatch(torch.autograd.Function):
    """A function of a batch, record by record, as one of a record: vmap asks it of the whole batch.

    Models of libraries look into their inputs, which vmap forbids.
    """

    @staticmethod
    def forward(run: Statistic, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return run(features[None], label[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept, since no gradient is taken."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Statistic, features: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        return run(features, labels), 0


def _priced(tuning: Tuning, every: list[Document], public: PublicDescription, *, shows_all: bool) -> Priced:
    delta = every[0]["privacy"]["delta"]

    def at(each: float) -> Priced:
        documents = [_with(d, {"privacy.epsilon": each, "privacy.accountant": "pld"}) for d in every]
        plans = [calibrate(params.parse(d, reads=READS), public) for d in documents]
        shared = schedule_from_json(plans[0]["prior_events"]) if shares_features(tuning, documents[0]) else []
        schedules = [after_shared(_trial_schedule(plan, tuning.objective), shared) for plan in plans]
        adjacencies = {plan["adjacency"] for plan in plans}
        if len(adjacencies) > 1:
            raise RefusedError("the space has methods under different adjacencies; search each by itself.")
        whole = all_shown(schedules) if shows_all else tuning.trials.trials().event(schedules)
        charged = [*shared, (whole, 1)]
        costs = by_accountants(charged, delta, adjacency_named(adjacencies.pop()))
        if not costs:
            raise RefusedError("no accountant has a bound for a search of this method; take another method.")
        return Priced(shows_all, each, costs, charged, bool(shared), tuple(documents), tuple(plans))

    # Between an epsilon of a trial that is too low, or fits, and one that is too dear, each with what the whole costs.
    each, low, high, best = tuning.epsilon, (0.0, 0.0), (tuning.epsilon, math.inf), None
    for tried in range(_TRIES):
        try:
            found = at(each)
        except RefusedError:  # as where features alone cost more than that
            if tried == 0:
                raise
            low = each, each
        else:
            if found.cost > tuning.epsilon:
                high = each, found.cost
            else:
                low, best = (each, found.cost), found
        if best is not None and (best.cost > _NEAR * tuning.epsilon or best.each == tuning.epsilon):
            break
        share = ((1 + _NEAR) / 2 * tuning.epsilon - low[1]) / (high[1] - low[1])
        if not 0 < share < 1 or tried >= _TRIES / 2:
            share = 0.5
        each = low[0] + share * (high[0] - low[0])
    if best is None:
        raise RefusedError(
            f"no trial is cheap enough for a search of epsilon {tuning.epsilon:g}; ask for more, or fewer trials."
        )
    return best


def shares_features(tuning: Tuning, document: Document) -> bool:
    """Whether what is learned about the features is the same for every trial, so that it is released once for all.

    Where training starts is learned with them, and is the model's; so neither may be in the space.
    """
    name = (document.get("features") or {}).get("name", "none")
    return name != "none" and {"features", "model"}.isdisjoint(key.partition(".")[0] for key in tuning.space)


def _trial_schedule(plan: Document, objective: Objective) -> Schedule:
    if plan["filter"]["kind"] != "schedule":
        raise RefusedError(
            f"the method {plan['algorithm']!r} chooses its releases on the way, and a search prices fixed ones;"
            " take another method."
        )
    schedule = schedule_from_json(plan["schedule"])
    if objective.on == "public":
        return schedule
    if any("WithoutReplacement" in type(event).__name__ for event, _ in schedule):
        raise RefusedError(
            "samples without replacement need the exact number of records, and a private objective takes some away;"
            " set objective.on to public."
        )
    return [*schedule, (_score_release(objective).event(), 1)]


def _score_release(objective: Objective) -> Any:
    return total_release(L2(1.0), Gaussian(objective.noise_multiplier))


# The trials.


@dataclass(frozen=True)
class Trial:
    """One trial, as a value that another process can be given; its folder has what it left.

    document: of params.yaml. plan: its document. key: of its noise alone. shared: the run and the folder of what was
    learned about the features for all trials, if anything was.
    """

    document: Document
    plan: Document
    objective: Objective
    prepared: Path
    public: PublicDescription
    key: bytes
    private_noise: bool
    run_id: str
    folder: Path
    shared: tuple[str, Path] | None = None

    def run(self) -> None:
        """Trains and scores, unless that is done; a trial that was killed goes on with the same noise."""
        if (self.folder / _SCORE).exists():
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = params.parse(self.document, reads=READS)
        plan = Plan.from_json(self.plan)
        held, taught = self.records()
        start = model_for(settings, self.public)
        state, trace, model = training.train(
            settings.algorithm,
            plan,
            start,
            open_records=lambda: taught,
            generator=self._generator("training"),
            run_id=self.run_id,
            folder=self.folder,
            performance=_limits(settings),
            checkpoint_seconds=settings.performance.checkpoint_seconds,
            on_step=lambda *_: None,
            features=settings.features,
            learned_before=None if self.shared is None else _shared(start, *self.shared),
        )
        released = settings.algorithm.released(state)
        file = self.folder / "model.safetensors"
        save_model(file, model, released, self.public, self.plan["algorithm"], prepared=self.prepared)
        score = (
            quality(metrics_of(file, self.prepared))
            if held is None
            else self._counted(held, plan, trace, file)
        )
        trace.write(self.folder / "trace.parquet")
        write_whole(
            self.folder / _SCORE, lambda new: new.write_text(json.dumps(score), encoding="utf-8"), mode=0o600
        )

    def _generator(self, purpose: str) -> Generator:
        return _derived(self.key, purpose, private=self.private_noise)

    def records(self) -> tuple[Records | None, Records]:
        """Those that the score is of, where it is private, and those to train on: each by its content alone."""
        data = load_as(self.prepared, self.public)
        if self.objective.on == "public":
            return None, Records(data.train_features, data.train_labels)
        rows = zip(data.train_features, data.train_labels, strict=True)
        inside = np.array([_is_held(x, y, self.objective.share) for x, y in rows])
        features, labels = np.asarray(data.train_features), np.asarray(data.train_labels)
        return Records(features[inside], labels[inside]), Records(features[~inside], labels[~inside])

    def _counted(self, held: Records, plan: Plan, trace: Trace, file: Path) -> float:
        """The noised sum of the scores, through a barrier of its own; its row joins the trial's trace."""
        model, parameters = load_model(file)
        release, delta = _score_release(self.objective), plan.target.budget.delta
        schedule = [(release.event(), 1)]
        own = Trace()
        own.step = plan.steps
        rows = self.public.pooled
        barrier = Barrier(
            held,
            of_people(model, rows),
            spend=ScheduleFilter(schedule, Budget(epsilon(schedule, delta, accountant="rdp"), delta)),
            generator=self._generator("score"),
            delta=delta,
            trace=own,
            performance=Performance(),
        )

        of_record = _scored(self.public, model, parameters)
        asked = asked_of_rows(barrier, rows)
        score = float(asked.total(of_record, bound=L2(1.0), noise=release.noise)[0])
        so_far = epsilon(
            [*plan.schedule, *schedule],
            delta,
            accountant=plan.accountant,
            adjacency=adjacency_named(plan.adjacency),
        )
        row = asdict(own.rows[0]) | {"release": len(trace.rows), "epsilon": so_far}
        trace.rows.append(Row(**row))
        return score


def _is_held(features: NDArray[Any], label: NDArray[Any], share: float) -> bool:
    """A coin of a record's own content, so that no other record decides on which side it is."""
    digest = hashlib.sha256(np.asarray(features).tobytes() + np.asarray(label).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def _derived(key: bytes, *purpose: object, private: bool) -> Generator:
    return Generator(hashlib.sha256(repr(("search", *purpose)).encode() + key).digest(), private=private)


def _shared(model: Model, run_id: str, folder: Path) -> tuple[training.Learned, Trace]:
    """What `_share_features` wrote; raises RefusedError where it is not there, since a trial must not learn it anew."""
    form = training.Learned(buffers(model), model.initial_parameters())
    found = training.load(folder, form, run_id=run_id, last_norms=LastNorms())
    if found is None:
        raise RefusedError(
            f"{folder} has nothing of what all trials share; run them where that folder can be read."
        )
    return found[0], found[2]


def _limits(settings: Params) -> Performance:
    from algorithms.core.training import device_of

    wanted = settings.performance
    return Performance(device_of(wanted.device), wanted.memory_mb, wanted.physical_batch)


# The search.


@dataclass(frozen=True)
class Search:
    """What is searched: the settings, what they cost, and the records."""

    tuning: Tuning
    priced: Priced
    prepared: Path
    public: PublicDescription
    blocks: tuple[str, ...] = (WHOLE_POPULATION,)

    def digest(self, home: Path) -> str:
        """All that decides the result; see `store.digest`."""
        decides = [
            self.tuning.model_dump(),
            list(self.priced.plans),
            list(self.priced.documents),
            self.blocks,
        ]
        return store.digest(decides, self.public, self.prepared, home=home)

    def plan(self, winner: int) -> tuple[Plan, Document]:
        """The plan of the whole with the numbers of the winner, and its document."""
        own, priced = self.priced.plans[winner], self.priced
        alone = Plan.from_json(own)
        budget = Budget(self.tuning.epsilon, alone.target.budget.delta)
        target = replace(alone.target, budget=budget, accountant=priced.accountant, prior_events=())
        plan = replace(alone, target=target, schedule=priced.schedule, epsilon=priced.costs)
        told = ("shows_all", "each", "shares")
        search = {name: getattr(priced, name) for name in told} | {"space": len(priced.plans)}
        return plan, own | plan.to_json() | {"attack": None, "search": search}


Runs = Callable[[Sequence[Trial]], None]
"""Runs trials, side by side or not."""


def one_by_one(trials: Sequence[Trial]) -> None:
    """Runs trials one after the other."""
    for trial in trials:
        trial.run()


def tune(search: Search, *, ledger: Ledger, home: Path, root: Path, run_all: Runs = one_by_one) -> Document:
    """Reserves the whole search, runs its trials, settles, and writes the winner into `tuned`; returns its receipt.

    A search that is done is handed out for nothing, one that was killed goes on. Raises BudgetRefusedError where the
    population cannot pay and RefusedError where nobody agrees to spend again; nothing is spent then. Raises
    RefusedError for a search that drew no trial, which is spent and has no result, too.
    """
    public = search.public

    def anew(run_id: str, is_whole: bool) -> bool:
        return not is_whole if public.public else _spends_again(search, run_id, is_whole)

    is_secure = search.priced.documents[0]["privacy"].get("noise", "secure") == "secure"
    seed = search.priced.documents[0]["model"].get("seed", 0)
    fresh = secure_generator() if is_secure else seeded_generator(seed)
    with store.claimed(
        home, search.digest(home), ledger.status, checkout=root, fresh=fresh, anew=anew
    ) as run:
        result = run.result
        if result is None:
            with run.abandoned_if_refused(unless=lambda: ledger.status(run.run_id) is not None):
                register(ledger, public, home=home, prepared=search.prepared)
                _reserve(search, run, ledger, home)
            bind(ledger, public, home=home, prepared=search.prepared)
            result = _searched(search, run, ledger, home, root, run_all)
        run.forget_secrets()
        return _hand_out(search, result, root, home)


def deliver(
    asked: Tuning, root: Path, *, say: Callable[[str], object], workers: int = 1, run_all: Runs | None = None
) -> str:
    """Prepares, prices and runs a search in the checkout at `root`, alone there; returns the outcome in a sentence.

    say: gets what there is to wait for. workers: threads that share the trials, unless `run_all` runs them.
    Raises what `tune` raises, and ParamsRefusedError or DataRefusedError for settings and data that cannot be.
    """
    with checkout_lock(root, say=say):
        settings, folder = params.load(root / "params.yaml", reads=READS), home()
        prepared = root / "datasets" / "prepared"
        cards = root / "data" / "cards"
        public = prepare(
            settings, mirror=data_mirror(), home=folder, destination=prepared, root=root, cards=cards
        )
        base = YAML(typ="safe", pure=True).load(root / "params.yaml")
        priced = price(asked, base, public)
        work = Search(asked, priced, prepared, public, public.blocks or (WHOLE_POPULATION,))
        url = ledger_url(settings.ledger.url)
        ledger = open_newest(url, home=folder, root=root)
        receipt = tune(
            work, ledger=ledger, home=folder, root=root, run_all=run_all or partial(in_threads, workers)
        )
        remember(ledger, url, home=folder)
    log_winner(receipt, root / FOLDER, settings.tracking, root=root)
    return (
        f"the winner of search {receipt['run_id']} is in {FOLDER}; all of it cost epsilon {priced.cost:.4g},"
        f" a trial by itself {priced.each:.4g}"
    )


def shares(trials: Sequence[Trial], workers: int) -> list[Sequence[Trial]]:
    """As many shares as there are workers, empty ones included: a task a trial would tell how many there are."""
    return [trials[start::workers] for start in range(workers)]


def in_threads(workers: int, trials: Sequence[Trial]) -> None:
    """Runs trials in so many threads."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one_by_one, shares(trials, workers)))


def _spends_again(search: Search, run_id: str, is_whole: bool) -> bool:
    cost = f"epsilon {search.priced.cost:g}"
    if may_spend_again() or preflight.agrees(
        f"search {run_id} did just this; again it spends {cost}. Spend it? [y/N] "
    ):
        return True
    if is_whole:
        return False
    raise RefusedError(
        f"search {run_id} did just this, and searching again would spend {cost} again; set {SPEND_AGAIN}=yes for that."
    )


def _reserve(search: Search, run: store.Run, ledger: Ledger, home: Path) -> None:
    if (
        ledger.status(run.run_id) == "settled"
    ):  # killed before its result was whole: repeated, not charged again
        return
    plan, document = search.plan(0)
    if ledger.status(run.run_id) is None:  # what is charged ends with a card, whichever trial wins
        _rehearse(search, run)
    about = {name: document[name] for name in ("dataset", "adjacency", "noise")} | signer(home)
    about["algorithm"] = ", ".join(sorted({plan["algorithm"] for plan in search.priced.plans}))
    held = digests_of(search.public, search.prepared)
    ledger.reserve(
        run.run_id,
        search.public.population,
        plan.cost,
        events=reserved_events(plan),
        about=about,
        blocks=search.blocks,
        held=held,
    )


def _rehearse(search: Search, run: store.Run) -> None:
    """Makes the card of each winner that there may be; of one, it verifies it and makes the page: events are the same.

    Raises RefusedError where that fails.
    """

    def report(pick: int, made: Run) -> None:
        card = _card(search, made.plan, made.receipt, made.trace)
        if pick == 0:
            _page(search, made.plan, made.receipt, search.priced.documents[pick])
            for check in verify(card, unsigned=True).failures:
                raise RefusedError(f"{check.name}: {check.detail}")

    for pick, own in enumerate(search.priced.plans):
        _, document = search.plan(pick)
        rehearse(
            document,
            search.public,
            _identity(search, run, document),
            trial=_trial_schedule(own, search.tuning.objective),
            report=partial(report, pick),
        )


def _identity(search: Search, run: store.Run, document: Document) -> Document:
    return {
        "run_id": run.run_id,
        "algorithm": document["algorithm"],
        **described(search.public),
        "blocks": list(search.blocks),
        "private_noise": run.private_noise,
        "diagnostics": False,
        "device": _limits(params.parse(search.priced.documents[0], reads=READS)).device.type,
    }


def trials_of_run(search: Search, run: store.Run) -> list[tuple[int, Trial]]:
    """The trials that the run's key draws, with the candidate that each takes; the same whenever they are asked for."""
    key, size = run.generator(), len(search.priced.plans)
    picks = list(range(size))
    if not search.priced.shows_all:
        number = search.tuning.trials.trials().number(float(key.stream(0).uniform(1)[0]))
        picks = [int(size * u) for u in key.stream(1).uniform(max(1, number))[:number]]
    return [
        (
            pick,
            Trial(
                search.priced.documents[pick],
                search.priced.plans[pick],
                search.tuning.objective,
                search.prepared,
                search.public,
                _derived(key.key, "trial", index, private=run.private_noise).key,
                run.private_noise,
                f"{run.run_id}-trial-{index}",
                run.folder / _TRIALS / str(index),
                (run.run_id, run.folder / _TRIALS / _SHARED) if search.priced.shares else None,
            ),
        )
        for index, pick in enumerate(picks)
    ]


def _share_features(run: store.Run, trial: Trial) -> None:
    """Releases what is learned about the features once, for all trials; the same whenever a search goes on."""
    assert trial.shared is not None
    run_id, folder = trial.shared
    settings, plan = params.parse(trial.document, reads=READS), Plan.from_json(trial.plan)
    if settings.features is None or (folder / training.CHECKPOINT).exists():
        return
    found, trace = training.learn(
        settings.features,
        plan,
        model_for(settings, trial.public),
        records=trial.records()[1],
        generator=_derived(run.generator().key, _SHARED, private=run.private_noise),
        performance=_limits(settings),
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    training.save(folder, found, run_id=run_id, step=0, trace=trace, last_norms=LastNorms())


def _searched(search: Search, run: store.Run, ledger: Ledger, home: Path, root: Path, run_all: Runs) -> Path:
    trials = trials_of_run(search, run)
    if not trials:
        plan, _ = search.plan(0)
        ledger.settle(run.run_id, plan.cost, events=reserved_events(plan))
        run.forget_secrets()
        another = "ask again" if run.private_noise else "set another model.seed"
        raise RefusedError(
            f"search {run.run_id} drew no trial, as a Poisson number may be 0: it is charged and releases nothing;"
            f" {another} for a new search, which is charged anew, or take the negative binomial, which is at least 1."
        )
    if search.priced.shares:
        _share_features(run, trials[0][1])
    run_all([trial for _, trial in trials])
    scores = [float(json.loads((trial.folder / _SCORE).read_text(encoding="utf-8"))) for _, trial in trials]
    pick, winner = trials[int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))]
    plan, document = search.plan(pick)
    written = run.emptied("written")
    for name in ("model.safetensors", "trace.parquet"):
        shutil.copyfile(winner.folder / name, written / name)
    (written / "plan.json").write_text(
        json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    YAML().dump(winner.document, written / "winner.yaml")
    if search.priced.shows_all:
        _write_table(search, scores, written / "trials.csv")
    sums = {
        name: hashlib.sha256((written / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "trace.parquet", "plan.json")
    }
    events = schedule_to_json(plan.schedule)
    ledger.settle(run.run_id, plan.cost, events=events, model=sums["model.safetensors"])
    import pandas as pd

    receipt = _identity(search, run, document) | {
        **cost_of(plan, events),
        "releases": len(pd.read_parquet(written / "trace.parquet")),
        **account_of(ledger, search.public.population, run.run_id),
        "software": software(root, recorded="training"),
        "sha256": sums,
    }
    (written / "receipt.json").write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(run.folder / _TRIALS)
    return run.finish(written)


def _write_table(search: Search, scores: Iterable[float], path: Path) -> None:
    """What every trial was and reached: only where all of them are paid for."""
    import pandas as pd

    rows = []
    for document, score in zip(search.priced.documents, scores, strict=True):
        rows.append({key: value_at(document, key) for key in search.tuning.space} | {"score": score})
    pd.DataFrame(rows).to_csv(path, index=False)


def value_at(document: Document, key: str) -> Any:
    """The value under a dotted key."""
    value: Any = document
    for part in key.split("."):
        value = value[part]
    return value


def _hand_out(search: Search, result: Path, root: Path, home: Path) -> Document:
    """Copies the result into `tuned`, with its card and what its model reaches on the held-out records."""
    import pandas as pd

    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    for path in result.iterdir():
        write_whole(folder / path.name, lambda new, path=path: shutil.copyfile(path, new))  # type: ignore[misc]
    receipt: Document = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
    plan: Document = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    frame = pd.read_parquet(folder / "trace.parquet")
    winner = YAML(typ="safe", pure=True).load(folder / "winner.yaml")
    card = _card(search, plan, receipt, frame, signing_key(home))
    (folder / "privacy_card.json").write_bytes(card.to_bytes())
    (folder / PAGE).write_text(_page(search, plan, receipt, winner), encoding="utf-8")
    return receipt


def _card(
    search: Search,
    plan: Mapping[str, Any],
    receipt: Mapping[str, Any],
    trace: Columns,
    key: Ed25519PrivateKey | None = None,
) -> PrivacyCard:
    public = json.loads(search.public.to_json())
    return build(RunRecord(plan, receipt, public, trace, receipt["software"]), key)


_SCORES = {
    "public": "The best was the one that did best on held-out records that the data card declares public; of the best"
    " of several, its metrics there are a little too good.",
    "private": "The best was the one with the highest noised sum of how right it was on each of a share of the records,"
    " which is charged.",
}


def _page(search: Search, plan: Mapping[str, Any], receipt: Mapping[str, Any], winner: Document) -> str:
    """What the winner is and cost, beside one run and beside showing all; nothing of the other trials."""
    tuning, public_plan = search.tuning, Plan.from_json(plan)
    trials = trials_of(public_plan.schedule) or []
    number = len(trials) if search.priced.shows_all else round(tuning.trials.mean)
    adjacency = adjacency_named(plan["adjacency"])
    dearest = max(trials, key=lambda one: epsilon(one, receipt["delta"], adjacency=adjacency))
    naive = [(event, count * number) for event, count in dearest]
    told = {
        "trials": number,
        "space": {
            key: value.values() if isinstance(value, Range) else value for key, value in tuning.space.items()
        },
        "drawn": f"{tuning.trials.mean:g} on average ({tuning.trials.distribution.replace('_', ' ')})",
        "objective": _SCORES[tuning.objective.on],
    }
    return (
        environment()
        .get_template("tune.html.j2")
        .render(
            plan=plan,
            receipt=receipt,
            winner={key: value_at(winner, key) for key in tuning.space},
            cost=receipt["epsilon"][receipt["accountant"]],
            naive=epsilon(naive, receipt["delta"], adjacency=adjacency),
            told=told,
        )
    )
