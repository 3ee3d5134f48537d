"""`fit`: the one call that trains a PyTorch module under differential privacy, for a notebook or a script.

It takes the same steps as the pipeline: a plan from public values, a reservation in a ledger, the barrier around the
records, the training loop, the settlement and the card. Nothing is checkpointed, so an interrupted call is not resumed:
it stays charged, and its exception says so.
"""

import hashlib
import io
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from pydantic import JsonValue
from safetensors.torch import save
from torch import Tensor, nn

from algorithms.core.calibration import check_delta
from algorithms.core.checkpoint import cpu_copies
from algorithms.core.facts_of_models import intercepts_of, number_of, zero_start_loss
from algorithms.core.learned_features import schedule_of
from algorithms.core.method import Algorithm, MethodState
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.training import Hooks, ResumableRun, train
from algorithms.errors import RefusedError
from algorithms.fit_arguments import ROWS, check_arguments, describe_method, grouping_of, naming_unknown
from algorithms.fit_charge import FitRun, Payer, data_facts
from algorithms.fit_losses import LossFunction
from algorithms.fit_model import model_of, on_its_scale
from algorithms.fit_records import FitRecords, check_index, group_rows_by_user, records_of
from algorithms.fit_refusals import FIT
from algorithms.gradients import RowModule
from algorithms.models.model import Model
from algorithms.models.scaled_target import PredictedNumber, ScaledTarget, TargetScaling
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import Accountant
from algorithms.privacy.accounting.events import run_lengths, schedule_to_json
from algorithms.privacy.accounting.gaussian import noise_for_share
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.barrier.device import device_of
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.card import PrivacyCard
from algorithms.privacy.documents import PlanDocument, PlannedModel
from algorithms.privacy.ledger import (
    UNIT,
)
from algorithms.privacy.mechanisms.noise import Generator, generator_of
from algorithms.target_scale import TargetScale


@dataclass(frozen=True)
class Step:
    """What `fit` shows its `on_step` after each step: numbers that are released anyway.

    Attributes:
        number: Steps taken, from 1.
        of: Steps in all; a method that chooses them on the way may end earlier.
        epsilon: Spent so far. It is no guarantee for a run that ends because of what was released.
        noise_std: Standard deviation of the last release's noise.
        parameters: Tensors by their names in the module, copied, for its `load_state_dict`: what the method would
            publish if it ended here.
    """

    number: int
    of: int
    epsilon: float
    noise_std: float
    parameters: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Fitted:
    """The result of `fit`.

    Attributes:
        model: A trained copy of the module, in eval mode.
        trace: One row per release: its step and event, its sampling rate and clip norm, the standard deviation
            `noise_std` of its noise on the sum, which is then divided by `divisor`, and the epsilon spent so far.
        epsilon: By accountant, at `delta`; infinite for a run without noise.
        delta: The delta of the guarantee.
        card: The privacy card.
        files: The run's files by name, as `save` writes them.
    """

    model: nn.Module
    trace: pd.DataFrame
    epsilon: Mapping[str, float]
    delta: float
    card: PrivacyCard
    files: Mapping[str, bytes] = field(repr=False)

    def save(self, folder: str | Path) -> None:
        """Write the model, plan, trace and card, for `epsilonflow card verify FOLDER/privacy_card.json --unsigned`.

        The card is not signed; cards of the pipeline are, by the owner's key. Raises RefusedError if the folder cannot
        be written; the result is still there to be saved elsewhere.
        """
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
        except OSError as error:
            raise RefusedError(
                f"the result cannot be written to {folder} ({error.strerror}); give a folder that can be."
            ) from None


_SETTINGS_BEFORE: list[tuple[int, int]] = []
"""PyTorch's settings before each of the calls that are running, in several threads maybe; the first call's first."""
_LOCK = threading.Lock()


@contextmanager
def _settings_restored() -> Iterator[None]:
    """Restore the settings of PyTorch that training changes for the whole process, once no call needs them."""
    with _LOCK:
        _SETTINGS_BEFORE.append((torch.get_num_threads(), torch.get_deterministic_debug_mode()))
    try:
        yield
    finally:
        with _LOCK:
            # Calls end in any order, and each takes the latest entry, so that the last one to end takes the first: the
            # settings from before any of them.
            threads, mode = _SETTINGS_BEFORE.pop()
            if not _SETTINGS_BEFORE:
                torch.set_num_threads(threads)
                torch.set_deterministic_debug_mode(mode)


@naming_unknown
@FIT.wording_errors()
@_settings_restored()
@torch.inference_mode(False)
@torch.enable_grad()
def fit(  # noqa: PLR0913
    model: nn.Module,
    loss: LossFunction | nn.Module | str,
    X: Any,
    y: Any = None,
    *,
    method: Algorithm[Any],
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    noise: Literal["secure", "seeded"] = "secure",
    seed: int = 0,
    public: bool = False,
    n_is_public: bool = True,
    count_noise: float = 100.0,
    people: Any = None,
    per_person: int | None = None,
    dataset: str = "in_memory",
    unit: str | None = None,
    one_row_per_unit: bool = False,
    population: str | None = None,
    ledger: str | None = None,
    cap: tuple[float, float] | None = None,
    device: str | torch.device = "auto",
    accept_rounding: bool = False,
    memory_mb: int = 1024,
    on_step: Callable[[Step], object] | None = None,
    target_scale: float | None = None,
) -> Fitted:
    """Train a copy of a module under differential privacy.

    All checks come before anything is spent. Of the records, their shape is checked, that they are finite, that classes
    are below the number of outputs, and that the model accepts their whole numbers. A UserWarning says if the model
    takes whole numbers on their raw scale, or public records of numbers far from one, or if its outputs are
    probabilities where the loss takes scores.

    Args:
        model: Maps [batch, *shape] to [batch, outputs], to [batch], or to outputs for each part of a record, such as
            [batch, length, classes] for texts. If it returns several tensors, as models of transformers do, the
            `logits` are used. Training starts from its weights; it is not changed. It trains in 32 bits: an autocast of
            its own is ignored meanwhile, and stays in the result.
        loss: (outputs, targets) -> [batch], the loss of each record; or a loss of torch.nn or torch.nn.functional, or
            its name. PyTorch's losses are then used without reduction over records. A record with several targets has
            their mean loss, or the sum if the loss's reduction is "sum" or "batchmean", without targets of
            `ignore_index` (-100). A mean over the batch that divides by weights of its classes is refused. If
            the model gives [batch, 1] for real targets [n], a loss of your own gets that if it gives [batch] for it,
            and [batch] otherwise.
        X: Records [n, *shape], as an array, a tensor or a DataFrame. Whole numbers are kept for a model with an
            embedding, and become float32 otherwise. Or a mapping of arrays by name, which the model takes as keyword
            arguments, or as a mapping if it has only one argument; whole numbers are kept, and a mask is 1 where a
            value is used.
            Or, without y, a map-style Dataset of pairs, or of mappings with the target under "labels". Each item is
            read once; arrays above 256 MB are in a temporary file without a name, for which TMPDIR chooses the disk.
            An array that `numpy.memmap` maps is not read into memory either.
        y: Targets [n]: classes as whole numbers, or real numbers for regression. Or [n, ...]: several numbers or
            labels per record, or a class for each token or pixel; for a language model the next token. For [n, 1], a
            loss of your own gets [batch, 1], and one of PyTorch [batch].
        method: Settings of a method, such as `DPSGD(steps=300, expected_batch_size=256)`.
        epsilon: Privacy target (> 0). Noise is calibrated to meet it.
        delta: At most 1/n, and at most 1e-5 where n is private.
        accountant: "pld", "rdp" or, for delta 0, "pure".
        noise: "secure", or "seeded" with `seed` for public records. Seeded noise is repeatable and protects nobody.
        public: Whether the records are public and need no protection.
        n_is_public: Whether the number of records may be known. If not, the method takes a sampling_rate, and n is
            released with noise (`count_noise`, a noise multiplier) and charged.
        people: The person of each record, [n], as numbers or names, if a person may have several records. Whole people
            are then protected, at the price of one record, and n is the number of people.
        per_person: The largest number of a person's records that are used, together as one; needed with `people`.
        dataset: The name of the records on the card.
        unit: What is protected; by default "one record", or "one person" with `people`. Any other unit needs `people`
            or `one_row_per_unit`.
        one_row_per_unit: Your statement that nobody has more than one row, so that a row is one `unit`, "one person" by
            default. Nobody checks it, and the card says that it is yours.
        population: The name of the population whose budget in a ledger is charged. The cost is reserved before training
            and settled after it. With None no budget is charged, the card says that no ledger recorded the run, and
            adding up several calls is up to you.
        ledger: The ledger's URL; by default EPSILONFLOW_LEDGER_URL, or the ledger in the home.
        cap: (epsilon, delta) of the population; needed if it is new to the ledger, and ignored otherwise.
        device: "auto", "cpu", or the name of an accelerator that PyTorch sees, such as "cuda".
        accept_rounding: Train on private records where the last bits of an accelerator's gradients depend on the other
            records of a pass; the card states it. Otherwise such a model is refused there.
        memory_mb: Memory for per-record work, in MB.
        on_step: Called after each step with what is released of it. An exception of its own ends training; what was
            charged stays charged.
        target_scale: The share of the budget's squared mu, such as 0.05, that goes to a release of the centre and the
            scale of y before training (`algorithms.target_scale`), for a number that is scaled to [-1, 1] by public
            bounds and a model with one output. Errors are then clipped on that scale, the result's model gives the
            number itself, and a `Step` has the parameters of your module, which predicts on the scale. Of a method with
            `shrink_share` that share goes to a release of the mean, too.

    Returns:
        The trained module, the trace, the cost and the privacy card.

    Raises:
        RefusedError: If something does not fit, in one sentence; BudgetRefusedError if the population cannot pay.
        Exception: Of any kind, if training fails or is interrupted. A note of the exception then says what was charged,
            which stays charged, and `charged` of the exception is that cost. If the ledger fails after training, the
            exception has the trained module as `model`; a notebook finds it in `sys.last_value.model`.

    Example:
        >>> import numpy as np, torch
        >>> from epsilonflow import DPSGD, fit
        >>> draw = np.random.default_rng(0)
        >>> X = draw.normal(size=(200, 5))
        >>> y = (X[:, 0] > 0).astype(int)
        >>> method = DPSGD(steps=20, expected_batch_size=50)
        >>> result = fit(torch.nn.Linear(5, 2), "cross_entropy", X, y, method=method, epsilon=3, delta=1e-3)
        >>> result.epsilon["pld"] <= 3
        True
        >>> len(result.trace), result.model.training
        (20, False)
        >>> from algorithms.privacy.card import verify
        >>> verify(result.card, unsigned=True).passed
        True
    """
    # First what needs no record, then the records and the model, then the plan, which follows from public values.
    check_arguments(locals())
    epsilon, delta, count_noise = float(epsilon), float(delta), float(count_noise)  # not NumPy's
    seed, per_person = int(seed), None if per_person is None else int(per_person)
    method, name, settings = describe_method(method)
    records = records_of(model, X, y, loss, n_is_public=n_is_public)
    trained, classes, records = model_of(model, loss, records, is_public=public)
    generator = generator_of(noise, seed)
    records = _group_by_person(records, X, people, per_person, generator=generator, n_is_public=n_is_public)
    rows_by, unit = grouping_of(people, unit, one_row_per_unit=one_row_per_unit)
    count = len(records.labels) if n_is_public else None
    check_delta(delta, count)
    compute = ComputeConfig(
        device_of(str(device)), memory_mb, None, number=count, accept_rounding=accept_rounding
    )
    budget, of_mean = Budget(epsilon, delta), getattr(method, "shrink_share", None)
    scale = None if target_scale is None else _scale_of_target(target_scale, budget, of_mean=of_mean)
    target = _target_after(scale, Target(budget, accountant, count_noise), count)
    training = _Training.of(model, trained, records, method, scale, loss=loss)
    plan = training.plan(target, count, classes=classes, rows_per_user=per_person, noise=noise)
    document = training.document(plan, name, settings, seed=seed, dataset=dataset, noise=noise)
    data = data_facts(dataset, unit, count, per_person, public=public, rows_by=rows_by)
    run = FitRun(plan, document, data, compute.device.type)
    run.rehearse()  # a card that cannot be made would be missed only after the charge
    with tempfile.TemporaryDirectory(prefix="epsilonflow-") as temporary:
        folder, terms = Path(temporary), {UNIT: unit, ROWS: rows_by}
        account = Payer.open(population, ledger, cap, folder, limit=budget, public=public, bound=terms)
        # From here on the run may be charged at any time: whatever ends it says so, and gives it up.
        with account.closing(run):
            return training.run(
                run, account, generator=generator, compute=compute, on_step=on_step, folder=folder
            )


def _settings_of(scale: TargetScale) -> dict[str, JsonValue]:
    """The settings of the release of a target's scale, without those that are left out."""
    return {name: value for name, value in asdict(scale).items() if value is not None}


def _target_after(scale: TargetScale | None, target: Target, count: int | None) -> Target:
    """The target of a run that releases the scale of its numbers first. count: the records, where that is public."""
    if scale is None:
        return target
    return replace(target, prior_events=tuple(schedule_of(scale, (), count, target.count_noise)))


def _scale_of_target(share: float, budget: Budget, *, of_mean: float | None) -> TargetScale:
    """The release of a number's centre and scale that takes a share of the budget's squared mu.

    of_mean: the share of its mean, for a method that shrinks towards it; None for no such release.
    """
    epsilon, delta = budget.epsilon, budget.delta
    if not 0 < share < 1:
        raise RefusedError(f"target_scale is {share:g}; give a share of the budget, such as 0.05.")
    if not 0 < delta < 1:
        raise RefusedError(
            f"delta is {delta:g}, and a number's scale is released with Gaussian noise; set delta to one above 0,"
            " customarily to 1/n or less."
        )
    mean_noise = None if of_mean is None else noise_for_share(of_mean, epsilon, delta)
    return TargetScale(noise_for_share(share, epsilon, delta), mean_noise)


def _group_by_person(
    records: FitRecords,
    X: Any,
    people: Any,
    per_person: int | None,
    *,
    generator: Generator,
    n_is_public: bool,
) -> FitRecords:
    """The records, each person's as one if `people` names them; raises RefusedError if half of that is given.

    generator: whose key decides, secretly, which records of a person are used.
    """
    if (people is None) != (per_person is None):
        raise RefusedError("one of people and per_person was given; give both, or neither.")
    if per_person is None:
        return records
    check_index(X, people, "people")
    # Derived by a hash, so that which records are used tells nothing of the noise.
    key = hashlib.sha256(b"records of a person" + generator.key).digest()
    return group_rows_by_user(records, people, per_person, key, n_is_public=n_is_public)


@dataclass(frozen=True)
class _Training:
    """What a call trains, on which records and by which method.

    Attributes:
        user_module: The module whose copy is returned: the user's, or with `scale` one that also scales what it
            predicts.
        inner: The model of the user's module alone, whose parameters a `Step` shows.
        model: The model that is trained: `inner`, or with `scale` the same for targets on the released scale.
        scale: The release of the centre and the scale of y; None for targets as they are.
    """

    user_module: nn.Module
    inner: Model
    model: Model
    records: FitRecords
    method: Algorithm[Any]
    scale: TargetScale | None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        model: Model,
        records: FitRecords,
        method: Algorithm[Any],
        scale: TargetScale | None,
        *,
        loss: LossFunction | nn.Module | str,
    ) -> "_Training":
        """The training of a module, whose model for its loss is `model`."""
        if scale is None:
            return cls(module, model, model, records, method, None)
        scaled = ScaledTarget(OrderedDict(features=TargetScaling(), model=module))
        return cls(scaled, model, on_its_scale(model, loss, records, scale), records, method, scale)

    def plan(
        self,
        target: Target,
        count: int | None,
        *,
        classes: int,
        rows_per_user: int | None,
        noise: Literal["secure", "seeded"],
    ) -> Plan:
        """The method's plan; raises RefusedError for secret noise in a run that protects nobody.

        count: the number of records, where it is public.
        """
        facts = PlanningFacts(
            records=count,
            parameters=self.model.parameter_count,
            layers=len(self.model.layers),
            classes=classes,
            loss=self.model.bounds,
            rows_per_user=rows_per_user if rows_per_user != 1 else None,
            start_loss=zero_start_loss(self.model, classes),
            intercepts=intercepts_of(self.model, classes),
            number=number_of(self.model),
        )
        plan = self.method.plan(target, facts)
        if plan.not_private is not None and noise != "seeded":
            raise RefusedError(
                "secret noise would promise what does not hold: {message} To reproduce it all the same, on public"
                ' records, give public=True and noise="seeded".',
                code="plan_not_private",
                message=plan.not_private,
            )
        return plan

    def document(
        self,
        plan: Plan,
        name: str,
        settings: Mapping[str, JsonValue],
        *,
        seed: int,
        dataset: str,
        noise: Literal["secure", "seeded"],
    ) -> PlanDocument:
        """The plan as its file has it. name, settings: of the method."""
        scale = self.scale
        return PlanDocument(
            **dict(plan.to_document()),
            algorithm=name,
            settings=dict(settings),
            features={"name": "none"} if scale is None else {"name": "target_scale", **_settings_of(scale)},
            model=_model_of_plan(self.user_module, self.model, seed=seed),
            dataset=dataset,
            noise=noise,
            diagnostics=False,
        )

    def run(
        self,
        run: "FitRun",
        account: "Payer",
        *,
        generator: Generator,
        compute: ComputeConfig,
        on_step: Callable[[Step], object] | None,
        folder: Path,
    ) -> Fitted:
        """Reserve, train, settle and publish. folder: for temporary files."""
        reporter = _StepReporter(on_step, run.plan, lambda state: self._tensors_of_state(self.inner, state))
        state, trace, model = train(
            self.method,
            run.plan,
            self.model,
            open_records=lambda: self.records,
            run=ResumableRun(run_id=run.run_id, generator=generator, folder=folder),
            compute=compute,
            features=self.scale,
            hooks=Hooks(
                on_step=reporter.note,
                on_state=None if on_step is None else reporter.show,
                reserve=lambda: account.reserve(run),
            ),
        )
        released = self._tensors_of_state(model, state)
        return _settle_and_publish(run, account, trace, released, trained=model, user_module=self.user_module)

    def _tensors_of_state(self, model: Model, state: MethodState) -> dict[str, Tensor]:
        return _tensors_to_publish(model, self.method.released(state))


def _settle_and_publish(
    run: "FitRun",
    account: "Payer",
    trace: Trace,
    released: Mapping[str, Tensor],
    *,
    trained: Model,
    user_module: nn.Module,
) -> Fitted:
    """Settle the run and hand out what it released.

    The module is filled before the ledger is asked, so that an error of the ledger carries it: it is paid for.
    """
    table = io.BytesIO()
    trace.write(table)
    files = {
        "model.safetensors": save(dict(released)),
        "plan.json": run.document.to_text().encode(),
        "trace.parquet": table.getvalue(),
    }
    frame = pd.read_parquet(table)
    module = _fill_module(trained.module, released, like=user_module)
    if isinstance(module, ScaledTarget):
        module = PredictedNumber(trained).eval()
    try:
        card = run.settle(account, files, frame, schedule_to_json(run_lengths(trace.events())))
    except BaseException as error:
        vars(error)["model"] = module
        error.add_note("The model is trained: it is this exception's `model`, without a card.")
        raise
    files["privacy_card.json"] = card.to_bytes()
    return Fitted(module, frame, dict(run.plan.epsilon), run.plan.target.budget.delta, card, files)


class _StepReporter:
    """Calls `on_step` with the facts of a step; the training loop reports the numbers first, and then the state."""

    def __init__(
        self,
        on_step: Callable[[Step], object] | None,
        plan: Plan,
        publish: Callable[[MethodState], Mapping[str, Tensor]],
    ) -> None:
        self._on_step, self._plan, self._publish = on_step, plan, publish
        self._epsilon = self._noise_std = 0.0

    def note(self, _step: int, epsilon: float, noise_std: float) -> None:
        self._epsilon, self._noise_std = epsilon, noise_std

    def show(self, step: int, state: MethodState) -> None:
        assert self._on_step is not None
        tensors = {name: part.clone() for name, part in self._publish(state).items()}
        self._on_step(Step(step, self._plan.steps, self._epsilon, self._noise_std, tensors))


def _tensors_to_publish(model: Model, parameters: Tensor) -> dict[str, Tensor]:
    """All tensors of the user's module by their names there, with the trained parameters from [d]."""
    named = cpu_copies(model.published_tensors(parameters))
    is_wrapped = isinstance(model.module, RowModule)
    return {name.removeprefix("module.") if is_wrapped else name: part for name, part in named.items()}


def _fill_module(module: nn.Module, published: Mapping[str, Tensor], *, like: nn.Module) -> nn.Module:
    """The copy of the user's module, of before the charge, with the released parameters and the user's settings.

    Not a new copy, since a module that keeps tensors of its passes cannot be copied after them, and not by
    load_state_dict, whose names a module may change.
    """
    module = module.module if isinstance(module, RowModule) else module
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.data = published[name]
    for part, original in zip(
        (*module.parameters(), *module.buffers()), (*like.parameters(), *like.buffers()), strict=True
    ):
        part.data = part.data.to(original.device)
    # The copy was trained with dense gradients, see `fit_model`.
    for layer, same in zip(module.modules(), like.modules(), strict=True):
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = same.sparse  # type: ignore[assignment]
    return module.eval()


def _model_of_plan(module: nn.Module, model: Model, *, seed: int) -> PlannedModel:
    """The model's part of the plan's document, as the pipeline writes it."""
    start = _tensors_to_publish(model, model.initial_parameters())
    return PlannedModel(
        name=model.name,
        seed=seed,
        parameters=model.parameter_count,
        # What it was trained on is not known here, and the card says so.
        files={"start": hashlib.sha256(save(start)).hexdigest()},
        freeze=tuple(name for name, part in module.named_parameters() if not part.requires_grad),
    )
