"""`fit`: the one call that trains a PyTorch module under differential privacy, for a notebook or a script.

It takes the same steps as the pipeline: a plan from public values, a reservation in a ledger, the barrier around the
records, the training loop, the settlement and the card. Nothing is checkpointed, so an interrupted call is not resumed.
"""

import hashlib
import json
import math
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import pandas as pd
import torch
from pydantic import ValidationError
from safetensors.torch import save
from torch import nn

from algorithms.core.calibration import check_delta
from algorithms.core.method import Algorithm, Plan, PublicInfo, Target, adapter
from algorithms.core.receipt import account_of, cost_of, reserved_events
from algorithms.core.software import software
from algorithms.core.training import by_name, device_of, train
from algorithms.errors import RefusedError
from algorithms.fit_inputs import Losses, model_of, pooled, records_of
from algorithms.methods.registry import CATALOGUE
from algorithms.models.model import Model, copied
from algorithms.models.packing import Called
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.accounting.epsilon import Accountant
from algorithms.privacy.accounting.events import run_lengths, schedule_to_json
from algorithms.privacy.barrier.barrier import Performance
from algorithms.privacy.card import PrivacyCard, RunRecord, build
from algorithms.privacy.ledger import Ledger, heads
from algorithms.privacy.ledger.books import in_words
from algorithms.privacy.ledger.composition import UNIT
from algorithms.privacy.ledger.place import home, ledger_url
from algorithms.privacy.mechanisms.noise import secure_generator, seeded_generator


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

        The card is not signed; cards of the pipeline are, by the owner's key.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


@torch.inference_mode(False)
@torch.enable_grad()
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
    people: Any = None,
    per_person: int | None = None,
    dataset: str = "in_memory",
    unit: str | None = None,
    population: str | None = None,
    ledger: str | None = None,
    cap: tuple[float, float] | None = None,
    device: str = "auto",
    memory_mb: int = 1024,
) -> Fitted:
    """Train a copy of a module under differential privacy.

    All checks come before anything is spent. Of the records, their shape is checked, that they are finite, that classes
    are below the number of outputs, and that the model accepts their whole numbers.

    Args:
        model: Maps [batch, *shape] to [batch, outputs], to [batch], or to outputs for each part of a record, such as
            [batch, length, classes] for texts. If it returns several tensors, as models of transformers do, the
            `logits` are used. Training starts from its weights; it is not changed.
        loss: (outputs, targets) -> [batch], the loss of each record; or a loss of torch.nn or torch.nn.functional, or
            its name. PyTorch's losses are then used without reduction over records. A record with several targets has
            their mean loss, or the sum if the loss's reduction is "sum", without targets of `ignore_index` (-100). If
            the model gives [batch, 1] for real targets [n], a loss of your own gets that if it gives [batch] for it,
            and [batch] otherwise.
        X: Records [n, *shape], as an array or a tensor. Whole numbers are kept for a model with an embedding, and
            become float32 otherwise. Or a mapping of arrays by name, which the model takes as keyword arguments, or
            as a mapping if it has only one argument; whole numbers are kept, and a mask is 1 where a value is used.
            Or, without y, a map-style Dataset of pairs, or of mappings with the target under "labels".
        y: Targets [n]: classes as whole numbers, or real numbers for regression. Or [n, ...]: several numbers or
            labels per record, or a class for each token or pixel; for a language model the next token. For [n, 1], a
            loss of your own gets [batch, 1], and one of PyTorch [batch].
        method: Settings of a method, such as `DPSGD(steps=300, expected_batch_size=256)`.
        epsilon: The target, above 0; the least noise is found at which the run costs no more.
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
        unit: What is protected; by default "one record", or "one person" with `people`.
        population: The name of the population whose budget in a ledger is charged. The cost is reserved before training
            and settled after it; a call that fails in between stays charged. With None no budget is charged, the card
            says that no ledger recorded the run, and adding up several calls is up to you.
        ledger: The ledger's URL; by default EPSILONFLOW_LEDGER_URL, or the ledger in the home.
        cap: (epsilon, delta) of the population; needed if it is new to the ledger, and ignored otherwise.
        device: "auto", "cpu" or "cuda".
        memory_mb: Memory for per-record work, in MB.

    Returns:
        The trained module, the trace, the cost and the privacy card.

    Raises:
        RefusedError: If something does not fit, in one sentence; BudgetRefusedError if the population cannot pay.

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
        >>> from algorithms.privacy.card import verify
        >>> verify(result.card, unsigned=True).passed
        True
    """
    _check_kinds(locals())
    records = records_of(model, X, y, loss)
    _check_noise(noise, public=public)
    trained, classes = model_of(model, loss, records)
    rows = per_person if per_person != 1 else None
    generator = secure_generator() if noise == "secure" else seeded_generator(seed)
    if people is not None and per_person is not None:
        key = hashlib.sha256(b"records of a person" + generator.key).digest()
        records = pooled(records, people, per_person, key)
    elif people is not None or per_person is not None:
        raise RefusedError("one of people and per_person was given; give both, or neither.")
    unit = unit or ("one record" if people is None else "one person")
    known = len(records.labels) if n_is_public else None
    check_delta(delta, known)
    performance = Performance(device_of(device), memory_mb, None, number=known)
    name, settings = _described(method)
    target = Target(Budget(float(epsilon), float(delta)), accountant, count_noise)
    plan = method.plan(
        target,
        PublicInfo(
            records=known,
            parameters=trained.parameter_count,
            layers=len(trained.layers),
            classes=classes,
            loss=trained.bounds,
            pooled=rows,
        ),
    )
    if plan.not_private is not None and noise != "seeded":
        raise RefusedError(
            f"secret noise would promise what does not hold: {plan.not_private} To reproduce it all the same,"
            ' on public records, give public=True and noise="seeded".'
        )
    run = _Run(
        plan=plan,
        document=_document(
            plan, trained, name=name, settings=settings, dataset=dataset, seed=seed, noise=noise
        ),
        facts=_facts(dataset, unit, known, public=public) | {"per_person": per_person, "pooled": rows},
        device=performance.device.type,
    )
    with tempfile.TemporaryDirectory(prefix="epsilonflow-") as place:
        folder = Path(place)
        account = _Account.open(
            population, ledger, cap, folder=folder, limit=Budget(epsilon, delta), public=public, unit=unit
        )
        state, trace, _ = train(
            method,
            plan,
            trained,
            open_records=lambda: records,
            generator=generator,
            run_id=run.run_id,
            folder=folder,
            performance=performance,
            checkpoint_seconds=math.inf,
            on_step=lambda *_: None,
            reserve=lambda: account.reserve(run),
        )
        published = by_name(trained.published(method.released(state)))
        if isinstance(trained.module, Called):
            published = {name.removeprefix("module."): value for name, value in published.items()}
        trace.write(folder / "trace.parquet")
        files = {
            "model.safetensors": save(published),
            "plan.json": (json.dumps(run.document, indent=2) + "\n").encode(),
            "trace.parquet": (folder / "trace.parquet").read_bytes(),
        }
        frame = pd.read_parquet(folder / "trace.parquet")
        card = run.settled(account, files, frame, schedule_to_json(run_lengths(trace.events())))
    files["privacy_card.json"] = card.to_bytes()
    result = copied(model)
    for part in (*result.parameters(), *result.buffers()):
        part.data = part.data.contiguous()  # an expanded tensor cannot be written to
    result.load_state_dict(published, strict=False)
    return Fitted(result.eval(), frame, dict(plan.epsilon), float(delta), card, files)


_KINDS: Mapping[str, tuple[type | UnionType, str]] = {
    **dict.fromkeys(("epsilon", "delta", "count_noise"), (Real, "a number")),
    **dict.fromkeys(("seed", "memory_mb"), (Integral, "a whole number")),
    "per_person": (Integral | None, "a whole number"),
    "dataset": (str, "a text"),
    **dict.fromkeys(("unit", "population", "ledger"), (str | None, "a text")),
}


def _check_kinds(given: Mapping[str, object]) -> None:
    for name, (kind, words) in _KINDS.items():
        if not isinstance(given[name], kind):
            raise RefusedError(f"{name} is of type {type(given[name]).__name__}; give {words}.")


def _check_noise(noise: str, *, public: bool) -> None:
    if noise not in ("secure", "seeded"):
        raise RefusedError(f'noise is {noise!r}; choose "secure" or "seeded".')
    if noise == "seeded" and not public:
        raise RefusedError(
            'seeded noise protects nobody, and the records are private; set noise to "secure".'
        )


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
    settings: dict[str, Any] = adapter(kind).dump_python(method, mode="json", warnings=False)
    # Settings built in Python were not validated yet; those of params.yaml are.
    try:
        adapter(kind).validate_json(json.dumps(settings))
    except ValidationError as error:
        key, what = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise RefusedError(f"the setting {key} of {kind.__name__} does not fit: {what}; change it.") from None
    return names.get(kind, f"{kind.__module__}:{kind.__qualname__}"), settings


def _document(
    plan: Plan, model: Model, *, name: str, settings: Mapping[str, Any], dataset: str, seed: int, noise: str
) -> dict[str, Any]:
    """The plan's document, as the pipeline writes it."""
    described = {"name": model.name, "seed": seed, "parameters": model.parameter_count, "notes": model.notes}
    return {
        "algorithm": name,
        "settings": settings,
        "features": {"name": "none"},
        "model": described,
        "dataset": dataset,
        "diagnostics": False,
        "noise": noise,
        **plan.to_json(),
    }


def _facts(dataset: str, unit: str, records: int | None, *, public: bool) -> dict[str, Any]:
    """The facts on the records that a data card would state."""
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


def _cap(cap: Any, population: str) -> Budget:
    """The cap of a new population; raises RefusedError unless it is a pair of numbers."""
    if cap is None:
        raise RefusedError(
            f"the ledger does not know the population {population!r}; give cap=(epsilon, delta), the most that all"
            " runs on these people may cost together."
        )
    try:
        epsilon, delta = map(float, () if isinstance(cap, str | Mapping) else cap)
    except (TypeError, ValueError):
        raise RefusedError(f"cap is {cap!r}; give a pair (epsilon, delta), such as (10, 1e-4).") from None
    return Budget(epsilon, delta)


@dataclass(frozen=True)
class _Account:
    """The population that pays for a run.

    public, unit: its terms. cap: with which `reserve` declares it, if it is new to the ledger. url: of the
    ledger; None without a named population, where a new ledger is made and deleted after the call.
    """

    ledger: Ledger
    population: str
    public: bool
    unit: str
    cap: Budget | None = None
    url: str | None = None

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
        """Raises RefusedError if the population has other terms, or is new without a cap that covers `limit`."""
        if population is None:
            if url is not None or cap is not None:
                raise RefusedError(
                    "a ledger or a cap was given without a population; name the population to charge."
                )
            own = Ledger.open(f"sqlite:///{folder}/ledger.sqlite")
            return cls(own, "none", public, unit, limit)
        url = ledger_url(url)
        ledger = heads.open_newest(url, home=home())
        if population not in ledger.populations():
            most = _cap(cap, population)
            if most.epsilon < limit.epsilon or most.delta < limit.delta:
                raise RefusedError(
                    f"the cap {in_words(most)} of the new population {population!r} is below this call's own"
                    f" {in_words(limit)}; give a cap for all runs on these people together, which stays."
                )
            return cls(ledger, population, public, unit, most, url)
        account = cls(ledger, population, public, unit, url=url)
        account._check()
        return account

    def reserve(self, run: "_Run") -> None:
        """Declare the population if it is new, and reserve the run's cost."""
        if self.cap is not None:
            self.ledger.declare(self.population, self.cap, public=self.public, bound={UNIT: self.unit})
            self._check()  # another call may have declared it meanwhile
        about = {name: run.document[name] for name in ("algorithm", "dataset", "adjacency", "noise")}
        events = reserved_events(run.plan)
        self.ledger.reserve(run.run_id, self.population, run.plan.cost, events=events, about=about)
        if self.url is not None:
            heads.remember(self.ledger, self.url, home=home())

    def _check(self) -> None:
        """Raises RefusedError if the population has other terms in the ledger."""
        if self.ledger.balance(self.population).public != self.public:
            kinds = ("private", "public")
            raise RefusedError(
                f"the population {self.population!r} is {kinds[not self.public]} in the ledger, and"
                f" public={self.public} was given; set that right or name another population."
            )
        if (bound := self.ledger.terms(self.population).bound[UNIT]) != self.unit:
            raise RefusedError(
                f"the population {self.population!r} counts {bound!r} as one record, and unit={self.unit!r} was given;"
                " set that right or name another population."
            )

    def of(self, run_id: str) -> dict[str, Any]:
        """The receipt's entries on the account."""
        account = account_of(self.ledger, self.population, run_id)
        return account if self.url is not None else {"ledger": account["ledger"] | {"head": None}}


@dataclass(frozen=True)
class _Run:
    """The run of one call. document: of its plan. facts: those that a data card would state."""

    plan: Plan
    document: Mapping[str, Any]
    facts: Mapping[str, Any]
    device: str
    run_id: str = field(default_factory=lambda: f"fit-{secrets.token_hex(8)}")

    def settled(
        self, account: _Account, files: Mapping[str, bytes], trace: pd.DataFrame, events: list[dict[str, Any]]
    ) -> PrivacyCard:
        """Settle the run's cost and build its card. files: the released files, by name."""
        sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        account.ledger.settle(self.run_id, self.plan.cost, events=events, model=sums["model.safetensors"])
        receipt = {
            "run_id": self.run_id,
            "population": account.population,
            "private_noise": self.document["noise"] == "secure",
            "diagnostics": False,
            "device": self.device,
            "sha256": sums,
            **cost_of(self.plan, events),
            **account.of(self.run_id),
        }
        ran = software(Path(__file__).parent, recorded="training")
        return build(RunRecord(self.document, receipt, self.facts, trace, ran))
