"""`fit`: the one call that trains a PyTorch module under differential privacy, for a notebook or a script.

It asks of the same parts in the same order as the pipeline does: a plan from public values, a reservation in a ledger,
the barrier around the records, the loop, the settlement, the card. Nothing is checkpointed: a call that is broken off
is not resumed.
"""

import copy
import hashlib
import inspect
import json
import math
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from algorithms.core.calibration import check_delta
from algorithms.core.method import Algorithm, Plan, PublicInfo, Target
from algorithms.core.receipt import account_of, cost_of, reserved_events
from algorithms.core.software import software
from algorithms.core.training import by_name, device_of, train
from algorithms.errors import RefusedError
from algorithms.methods.registry import CATALOGUE
from algorithms.models.linear import CROSS_ENTROPY, LOGISTIC, as_they_are
from algorithms.models.model import LossBounds, Model
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.accounting.epsilon import Accountant
from algorithms.privacy.accounting.events import run_lengths, schedule_to_json
from algorithms.privacy.barrier.barrier import Performance
from algorithms.privacy.card import PrivacyCard, RunRecord, build
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.ledger.composition import UNIT
from algorithms.privacy.ledger.place import ledger_url
from algorithms.privacy.mechanisms.noise import secure_generator, seeded_generator

Losses: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_BY_INDEX = {"cross_entropy", "nll_loss", "multi_margin_loss"}
"""Losses whose targets are classes and stay whole numbers."""
_FUNCTIONAL = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MultiMarginLoss": "multi_margin_loss",
}
_BOUNDS = {"cross_entropy": CROSS_ENTROPY, "binary_cross_entropy_with_logits": LOGISTIC}


@dataclass(frozen=True)
class Fitted:
    """What a call of `fit` leaves.

    Attributes:
        model: A trained copy of the module, in eval mode.
        trace: A row for each release: its event, its noise and the epsilon spent so far.
        epsilon: By accountant, at `delta`; infinite for a run without noise.
        delta: Of the promise.
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
        """Writes the model, plan, trace and card, for `epsilonflow card verify FOLDER/privacy_card.json`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def fit(
    model: nn.Module,
    loss: Losses | nn.Module | str,
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
    dataset: str = "in_memory",
    unit: str = "one record",
    population: str | None = None,
    ledger: str | None = None,
    cap: tuple[float, float] | None = None,
    device: str = "auto",
    memory_mb: int = 1024,
) -> Fitted:
    """Trains a copy of a module under differential privacy.

    Everything is checked before anything is spent. What is checked of the records is their shape, that they are finite
    and that classes are below the number of outputs.

    Args:
        model: Maps [batch, *shape] to [batch, outputs]; its weights are the start, and it is not changed.
        loss: (outputs, targets) -> [batch], the loss of each record by itself; or a loss of torch.nn or of
            torch.nn.functional, itself or by name, whose reduction is then set aside. Of a record with several numbers
            the mean counts, or the sum where the loss's reduction is "sum".
        X: Records [n, *shape], as an array or a tensor; whole numbers stay so for a model with an embedding, and
            become float32 otherwise. Or a map-style Dataset of pairs, without y.
        y: Targets [n]: classes as whole numbers, or real numbers for a regression.
        method: Settings of a method, such as `DPSGD(steps=300, expected_batch_size=256)`.
        epsilon: The target.
        delta: At most 1/n, and at most 1e-5 where n is private.
        accountant: "pld", "rdp" or, for delta 0, "pure".
        noise: "secure", or "seeded" with `seed` for public records: repeatable, so that it protects nobody.
        public: Whether the records are public, so that they need no protection.
        n_is_public: Whether the number of records may be known, THE DEFAULT. Where it may not, the method takes a
            sampling_rate, and n is released with noise (`count_noise`, a noise multiplier) and charged.
        dataset: What the card calls the records.
        unit: What one of them is.
        population: Whose budget in a ledger is charged. None charges nobody, and the card says that no ledger kept the
            run: then the sum over several calls is yours to count. With a name the cost is reserved before training
            and settled after it; a call that fails in between stays charged.
        ledger: The ledger's URL, else EPSILONFLOW_LEDGER_URL or the one in the home.
        cap: (epsilon, delta) of the population, needed where the ledger sees it for the first time, and ignored later.
        device: "auto", "cpu" or "cuda".
        memory_mb: For work on each record.

    Returns:
        The trained module, the trace, the cost and the privacy card.

    Raises:
        RefusedError: In one sentence, where something does not fit; BudgetRefusedError where the population cannot pay.

    Example:
        >>> import numpy as np, torch
        >>> from algorithms import DPSGD, fit
        >>> draw = np.random.default_rng(0)
        >>> X = draw.normal(size=(200, 5))
        >>> y = (X[:, 0] > 0).astype(int)
        >>> method = DPSGD(steps=20, expected_batch_size=50)
        >>> result = fit(torch.nn.Linear(5, 2), "cross_entropy", X, y, method=method, epsilon=3, delta=1e-3)
        >>> result.epsilon["pld"] <= 3
        True
        >>> len(result.trace), result.model.training
        (20, False)
    """
    records = _records(model, X, y)
    _check_noise(noise, public=public)
    known = len(records.labels) if n_is_public else None
    check_delta(delta, known)
    trained = _model(model, loss, records)
    performance = Performance(device_of(device), memory_mb, None, number=known)
    _check_model(trained, records, performance)
    name, settings = _described(method)
    target = Target(Budget(float(epsilon), float(delta)), accountant, count_noise)
    outputs = _outputs(trained.module, records)
    plan = method.plan(
        target,
        PublicInfo(
            records=known,
            parameters=trained.parameter_count,
            layers=len(trained.layers),
            classes=max(2, outputs),
            loss=trained.bounds,
        ),
    )
    if plan.not_private is not None and noise != "seeded":
        raise RefusedError(
            f"secret noise would promise what does not hold: {plan.not_private} To reproduce it all the same,"
            ' on public records, give public=True and noise="seeded".'
        )
    plan_file = _plan_file(
        plan, trained, name=name, settings=settings, dataset=dataset, seed=seed, noise=noise
    )
    with tempfile.TemporaryDirectory(prefix="epsilonflow-") as place:
        folder, run_id = Path(place), f"fit-{secrets.token_hex(8)}"
        account = _Account.open(
            population, ledger, cap, folder=folder, limit=Budget(epsilon, delta), public=public, unit=unit
        )
        about = {"algorithm": name, "dataset": dataset, "adjacency": plan.adjacency, "noise": noise}
        account.ledger.reserve(
            run_id, account.population, plan.cost, events=reserved_events(plan), about=about
        )
        state, trace, _ = train(
            method,
            plan,
            trained,
            open_records=lambda: records,
            generator=secure_generator() if noise == "secure" else seeded_generator(seed),
            run_id=run_id,
            folder=folder,
            performance=performance,
            checkpoint_seconds=math.inf,
            on_step=lambda *_: None,
        )
        published = by_name(trained.published(method.released(state)))
        trace.write(folder / "trace.parquet")
        files = {
            "model.safetensors": save(published),
            "plan.json": plan_file,
            "trace.parquet": (folder / "trace.parquet").read_bytes(),
        }
        sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        events = schedule_to_json(run_lengths(trace.events()))
        account.ledger.settle(run_id, plan.cost, events=events, model=sums["model.safetensors"])
        frame = pd.read_parquet(folder / "trace.parquet")
        receipt = {
            "run_id": run_id,
            "population": account.population,
            "private_noise": noise == "secure",
            "diagnostics": False,
            "device": performance.device.type,
            "sha256": sums,
            **cost_of(plan, events),
            **account.of(run_id),
        }
        facts = _facts(dataset, unit, known, public=public)
        ran = software(Path(__file__).parent, recorded="training")
        card = build(RunRecord(json.loads(plan_file), receipt, facts, frame, ran))
    files["privacy_card.json"] = card.to_bytes()
    result = copy.deepcopy(model)
    result.load_state_dict(published, strict=False)
    return Fitted(result.eval(), frame, dict(plan.epsilon), float(delta), card, files)


@dataclass(frozen=True)
class _Records:
    """features [n, *shape], float32 or int32; labels [n], int64 or, for a regression, float32."""

    features: NDArray[Any]
    labels: NDArray[Any]


def _records(model: object, X: Any, y: Any) -> _Records:
    if not isinstance(model, nn.Module):
        raise RefusedError(f"the model is a {type(model).__name__}; give a torch.nn.Module.")
    if y is None:
        X, y = _stacked(X)
    features, labels = (_array(part, name) for part, name in ((X, "X"), (y, "y")))
    if features.ndim < 2 or labels.ndim != 1 or len(features) != len(labels) or not len(labels):
        raise RefusedError(
            f"X has the shape {list(features.shape)} and y {list(labels.shape)}; give X as [n, ...] and y as [n], of"
            " the same number of records."
        )
    for part, name in ((features, "X"), (labels, "y")):
        if not np.isfinite(part).all():
            raise RefusedError(
                f"{name} holds NaN or infinite values; leave these records out or fill them in."
            )
    if labels.dtype.kind != "f" and labels.min() < 0:
        raise RefusedError("y holds classes below 0; count the classes from 0.")
    is_token = features.dtype.kind in "iu" and any(
        isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in model.modules()
    )
    return _Records(
        np.ascontiguousarray(features, np.int32 if is_token else np.float32),
        np.ascontiguousarray(labels, np.float32 if labels.dtype.kind == "f" else np.int64),
    )


def _stacked(dataset: Any) -> tuple[Any, Any]:
    """The pairs of a map-style Dataset as two arrays."""
    if not isinstance(dataset, Dataset) or not hasattr(dataset, "__len__"):
        raise RefusedError(
            "y is missing; give X and y, or in their place a map-style torch Dataset of pairs."
        )
    try:
        pairs = [dataset[place] for place in range(len(dataset))]
        X, y = ([np.asarray(part) for part in parts] for parts in zip(*pairs, strict=True))
        return np.stack(X), np.stack(y)
    except (TypeError, ValueError):
        raise RefusedError(
            "the Dataset does not hold pairs (record, target) of numbers, all of one shape; transform them to tensors."
        ) from None


def _array(values: Any, name: str) -> NDArray[Any]:
    if isinstance(values, Mapping):
        raise RefusedError(
            f"{name} is a mapping, and one array or tensor is needed; stack its parts in one of shape [n, parts, ...]"
            " and take them apart in the model."
        )
    try:
        found = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        raise RefusedError(f"{name} is no array of numbers; give a numpy array or a torch tensor.") from None
    if found.dtype.kind not in "fiub":
        raise RefusedError(f"{name} holds {found.dtype}; give numbers, classes as whole numbers from 0.")
    return found


def _check_noise(noise: str, *, public: bool) -> None:
    if noise not in ("secure", "seeded"):
        raise RefusedError(f'noise is {noise!r}; choose "secure" or "seeded".')
    if noise == "seeded" and not public:
        raise RefusedError(
            'seeded noise protects nobody, and the records are private; set noise to "secure".'
        )


def _model(module: nn.Module, loss: object, records: _Records) -> Model:
    """The module, copied, with its loss record by record; raises RefusedError where it takes no such records."""
    if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        raise RefusedError("the model has parameters that are not float32; give model.float().")
    own = copy.deepcopy(module).cpu()
    outputs, is_real = _outputs(own, records), records.labels.dtype.kind == "f"
    losses, bounds = _losses(loss, is_real=is_real)
    if not is_real and records.labels.max() >= max(2, outputs):
        raise RefusedError(
            f"y holds classes beyond the model's {outputs} outputs; give it an output for each class."
        )
    note = (
        "The start is the weights that the module was given with; what they were made of is not in this card."
    )
    return Model(type(module).__name__, own, losses, as_they_are, bounds=bounds, notes=(note,))


def _outputs(module: nn.Module, records: _Records) -> int:
    """How many numbers the module gives for a record, seen on two records of zeros."""
    zeros = torch.zeros(
        (2, *records.features.shape[1:]), dtype=torch.from_numpy(np.empty(0, records.features.dtype)).dtype
    )
    probe = copy.deepcopy(module)
    try:
        with torch.no_grad():
            found = probe(zeros)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise RefusedError(
            f"the model does not take records of shape {list(zeros.shape[1:])} ({why}); change the model or X."
        ) from None
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != 2:
        raise RefusedError(
            "the model does not give one row of outputs for each record; let it return [batch, outputs]."
        )
    return found.shape[1]


def _losses(loss: object, *, is_real: bool) -> tuple[Losses, LossBounds | None]:
    """The loss of each record [batch] and what is public about it."""
    name, of_torch, reduction = _of_torch(loss)
    if of_torch is None and not callable(loss):
        raise RefusedError(
            f"there is no loss {loss!r}; name one of torch.nn.functional, such as 'cross_entropy'."
        )
    each: Any = loss if of_torch is None else of_torch
    as_real = is_real or (of_torch is not None and name not in _BY_INDEX)

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        if as_real:
            targets = targets.to(outputs.dtype)
            # [batch, 1] beside [batch] would be broadcast to [batch, batch]
            outputs = outputs[..., 0] if outputs.shape[-1] == 1 else outputs
        found: Tensor = each(outputs, targets)
        if of_torch is None or found.dim() <= targets.dim():
            return found
        found = found.flatten(targets.dim())
        return found.sum(-1) if reduction == "sum" else found.mean(-1)

    return losses, _BOUNDS.get(name) if reduction == "" else None


def _of_torch(loss: object) -> tuple[str, Any, str]:
    """A loss of PyTorch without its reduction: its functional name, itself, its reduction, "" for the usual one."""
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return "", None, ""
        own = copy.deepcopy(loss)
        own.reduction = "none"  # type: ignore[assignment]
        kind = type(loss).__name__
        return _FUNCTIONAL.get(kind, kind), own, str(loss.reduction)
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    found = getattr(functional, name, None) if name else None
    if found is None or not (isinstance(loss, str) or found is loss):
        return "", None, ""
    try:
        has_reduction = "reduction" in inspect.signature(found).parameters
    except (TypeError, ValueError):
        has_reduction = False
    return (name, partial(found, reduction="none"), "") if has_reduction else ("", None, "")


def _check_model(model: Model, records: _Records, performance: Performance) -> None:
    """Raises RefusedError, on made-up records, where the barrier could not clip those of this model."""
    try:
        performance.engine(model, records)
    except RefusedError:
        raise
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise RefusedError(
            f"the loss does not take the model's outputs with such targets ({why}); choose another."
        ) from None


def _described(method: Algorithm[Any]) -> tuple[str, dict[str, Any]]:
    """A method's name and its settings as JSON values."""
    if isinstance(method, type) or not all(
        hasattr(method, name) for name in ("plan", "init", "step", "released")
    ):
        raise RefusedError(
            f"the method is {method!r}; give the settings of one, such as DPSGD(steps=300, expected_batch_size=256)."
        )
    kind = type(method)
    names = {of: name for name, of in CATALOGUE.items()}
    settings: dict[str, Any] = TypeAdapter(kind).dump_python(method, mode="json")
    # What is built in Python was not checked yet, as params.yaml is.
    TypeAdapter(kind).validate_json(json.dumps(settings))
    return names.get(kind, f"{kind.__module__}:{kind.__qualname__}"), settings


def _plan_file(
    plan: Plan, model: Model, *, name: str, settings: Mapping[str, Any], dataset: str, seed: int, noise: str
) -> bytes:
    """The plan as the document of this name that a run of the pipeline has."""
    described = {"name": model.name, "seed": seed, "parameters": model.parameter_count, "notes": model.notes}
    document = {
        "algorithm": name,
        "settings": settings,
        "features": {"name": "none"},
        "model": described,
        "dataset": dataset,
        "diagnostics": False,
        "noise": noise,
        **plan.to_json(),
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def _facts(dataset: str, unit: str, records: int | None, *, public: bool) -> dict[str, Any]:
    """What a data card would say of the records."""
    return {
        "dataset": dataset,
        "title": dataset,
        "source": "records in memory, of which no data card names a source",
        "licence": "not stated",
        "unit": unit,
        "public": public,
        "transform": "none",
        "records": records,
        "holdout": "none",
    }


@dataclass(frozen=True)
class _Account:
    """Where a run is charged: a population of a ledger, or a ledger of its own that is gone afterwards."""

    ledger: Ledger
    population: str
    is_kept: bool

    @classmethod
    def open(
        cls,
        population: str | None,
        url: str | None,
        cap: tuple[float, float] | None,
        *,
        folder: Path,
        limit: Budget,
        public: bool,
        unit: str,
    ) -> "_Account":
        if population is None:
            if url is not None or cap is not None:
                raise RefusedError(
                    "a ledger or a cap was given without a population; name the population to charge."
                )
            ledger = Ledger.open(f"sqlite:///{folder}/ledger.sqlite")
            ledger.declare("none", limit, public=public, bound={UNIT: unit})
            return cls(ledger, "none", is_kept=False)
        ledger = Ledger.open(ledger_url(url))
        if cap is not None:
            ledger.declare(population, Budget(*cap), public=public, bound={UNIT: unit})
        elif population not in ledger.populations():
            raise RefusedError(
                f"the ledger does not know the population {population!r}; give cap=(epsilon, delta), the most that all"
                " runs on these people may cost together."
            )
        if ledger.balance(population).public != public:
            kinds = ("private", "public")
            raise RefusedError(
                f"the population {population!r} is {kinds[not public]} in the ledger, and public={public} was given;"
                " set that right or name another population."
            )
        if (bound := ledger.terms(population).bound[UNIT]) != unit:
            raise RefusedError(
                f"the population {population!r} counts {bound!r} as one record, and unit={unit!r} was given; set that"
                " right or name another population."
            )
        return cls(ledger, population, is_kept=True)

    def of(self, run_id: str) -> dict[str, Any]:
        """What the receipt says of the account."""
        account = account_of(self.ledger, self.population, run_id)
        return account if self.is_kept else {"ledger": account["ledger"] | {"head": None}}
