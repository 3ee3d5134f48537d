"""Tables of what a run would cost and whether its population can pay."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from algorithms.core.plan import Plan
from algorithms.core.private_evaluation import EvaluationPlan
from algorithms.core.shrinkage import Shrinkage
from algorithms.evaluation import expected_errors, expected_group_errors
from algorithms.methods.matrix_factorisation import CorrelatedPlan
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.risk import max_true_positive_rate, risk_profile
from algorithms.privacy.card.schema import words_by
from algorithms.privacy.ledger import explain
from data import DatasetInfo
from data.card import data_card
from data.documents import load_yaml
from tasks.config import params
from tasks.config.overrides import ParamOverrides, encoder_recipe, explain_recipe, params_edit, recipe
from tasks.config.params import Params
from tasks.preflight.preview import RunPreview, held_out_people, preview_ledger, preview_run
from tasks.prepare import info_of
from tasks.runs.metrics import metric_units, metric_words
from tasks.runs.summary import two_columns

if TYPE_CHECKING:
    from tasks.tuning.search_plan import SearchPlan


def cost_table(preview: RunPreview, settings: Params) -> Table:
    """A table of a run's plan and its population's balance."""
    questioned = [("these settings look wrong", warning) for warning in preview.warnings]
    questioned += [("to be answered", question) for question in preview.questions]
    about = [*_plan_rows(settings, preview.plan), *_person_rows(preview), *_held_out_rows(preview)]
    rows = [*about, *questioned, *_ledger_rows(preview)]
    return two_columns(rows)


def advice_table(
    root: Path, dataset: str, epsilon: float, delta: float | None, encoder: str | None = None
) -> tuple[Table, Table]:
    """Tables of settings from public numbers, each with its reason, and of the cost of such a run; spends nothing."""
    card = data_card(dataset, root / "data" / "cards")
    advised = (
        recipe(card, "dp_sgd", epsilon, by_numbers=True)
        if encoder is None
        else encoder_recipe(card, encoder, "dp_sgd", epsilon)
    )
    why, settings = explain_recipe(card, advised), advised.settings
    values = {
        "model": advised.model,
        "batch size": settings.get("expected_batch_size"),
        "sampling rate": settings.get("sampling_rate"),
        "steps": settings["steps"],
        "clip norm": settings["clip_norm"],
        "learning rate": settings["update"]["learning_rate"],
        "momentum": settings["update"]["momentum"] if "momentum" in why else None,
        "features": advised.features["name"] if advised.features["name"] != "none" else None,
        "shrinkage": settings.get("shrink_share"),
    }
    table = Table("setting", "value", "why")
    for name, value in values.items():
        if value is not None:
            table.add_row(name, str(value), why.get(name, "a tenth of the records"))
    changes = {f"algorithm.{key}": value for key, value in settings.items()} | {"model.name": advised.model}
    overrides = ParamOverrides(dataset, "dp_sgd", epsilon, delta, None, changes, encoder)
    params_of_run = params_edit(root, overrides).params
    return table, cost_table(preview_run(root, params_of_run), params_of_run)


def search_table(
    root: Path, file: Path, *, allow_code: Collection[str] = ()
) -> tuple[Table, RunPreview | None]:
    """A table of what a search costs if only the winner is released, and if all trials are; spends nothing.

    With the preview of the way that the file asks for; None if that does not fit. allow_code: code of the user's own
    that the file may name, besides what params.yaml and the data cards name.
    """
    # here, since the plan of a single run does not need their imports
    from tasks.tuning.search import Search
    from tasks.tuning.search_plan import plan_options
    from tasks.tuning.settings import READS, load_here

    search_settings = load_here(root, file, allow_code=allow_code)
    base = load_yaml((root / "params.yaml").read_text(encoding="utf-8"))
    settings = params.load(root / "params.yaml", reads=READS)
    card = data_card(settings.data.dataset, root / "data" / "cards")
    info = info_of(card, settings.data)
    table = Table("", "only the best is released", "all trials are released")
    options = plan_options(search_settings, base, info)
    size = next(len(option.plans) for option in options if option)
    rows = {
        "trials": (
            f"random, {search_settings.trials.mean:g} on average, out of {size} settings",
            f"all {size} settings, once each",
        ),
        "epsilon of the search": tuple(
            _text(option.cost) if option else "does not fit" for option in options
        ),
        "epsilon of each trial": tuple(
            _text(option.epsilon_per_trial) if option else "" for option in options
        ),
        "noise multipliers": tuple(_noises(option) if option else "" for option in options),
    }
    if search_settings.objective.on == "held_out":
        people = held_out_people(card)
        rows["people held out"] = tuple(
            _score_cost_text(option, people) if option else "" for option in options
        )
    for name, (first, other) in rows.items():
        table.add_row(name, first, other)
    chosen = options if search_settings.show_all == "cheaper" else [options[search_settings.show_all]]
    option = max(filter(None, chosen), key=lambda option: option.epsilon_per_trial, default=None)
    if option is None:
        return table, None
    plan = Search(search_settings, option, root / "datasets" / "prepared", info).charged_plan
    return table, preview_ledger(root, settings, info, plan)


def _noises(option: "SearchPlan") -> str:
    multipliers = [plan.noise_multiplier or 0.0 for plan in option.plans]
    return f"{min(multipliers):.4g} to {max(multipliers):.4g}"


def _score_cost_text(option: "SearchPlan", people: int) -> str:
    """What a search's scores cost the people held out, and how exact they are."""
    stated = option.plans[0].evaluation
    assert stated is not None
    evaluation = EvaluationPlan.from_document(stated)
    name, error = next(iter(expected_errors(evaluation.spec, people, evaluation.noise_std).items()))
    shown = "drowned by noise" if error is None else f"standard error {error:.2g}"
    return f"epsilon {_text(evaluation.epsilon)}; of a trial's {name.replace('_', ' ')}: {shown}"


def _plan_rows(settings: Params, plan: Plan) -> list[tuple[str, str]]:
    by = words_by(plan.epsilon)
    costs = ", ".join(f"{_text(cost)} {by[name]}" for name, cost in plan.epsilon.items())
    features = (settings.features_settings or {}).get("name", "none")
    learned = f"{features}: learned by a release before training, which the epsilon below counts"
    return [
        ("data set", settings.data.dataset),
        *_promise_rows(settings),
        *([] if features == "none" else [("features", learned)]),
        ("algorithm", settings.algorithm_name),
        ("steps", f"{plan.steps:,}"),
        ("sampling rate", f"{plan.sampling_rate:.4g}"),
        ("noise multiplier", _noise(plan)),
        *_correlation_rows(plan),
        *_method_rows(plan),
        *_unspent_rows(settings, plan),
        ("epsilon", costs),
        ("delta", f"{plan.target.budget.delta:g}"),
        *_attack_rows(settings, plan),
    ]


def _unspent_rows(settings: Params, plan: Plan) -> list[tuple[str, str]]:
    """That a share buys nothing, where the model cannot be shrunk, or has no errors that the clip norm may follow."""
    rows = []
    if getattr(settings.algorithm, "shrink_share", None) is not None and not plan.method_params:
        why = "this model has nothing to be shrunk towards, so algorithm.shrink_share is not spent"
        rows.append(("shrinkage", f"none: {why}"))
    if getattr(settings.algorithm, "error_share", None) is not None and "errors" not in plan.method_params:
        why = "it has no errors of a number to follow, so algorithm.error_share is not spent"
        rows.append(("clip norm", f"stays: {why}"))
    return rows


def _promise_rows(settings: Params) -> list[tuple[str, str]]:
    """Why the epsilon below is no promise, if it is none."""
    if settings.privacy.noise == "seeded":
        return [("promises", "no privacy: anyone can compute seeded noise and take it away")]
    if settings.privacy.diagnostics:
        return [("promises", "no privacy: diagnostics are shown without noise")]
    return []


def _person_rows(preview: RunPreview) -> list[tuple[str, str]]:
    """How many records of a person are used, if the data card names the person's column."""
    per_person = preview.info.per_person
    if per_person is None:
        return []
    where = " in each block" if preview.info.blocks_by else ""
    if rows := preview.info.rows_per_user:
        text = f"up to {rows} records of each{where}, together as one"
    elif per_person == 1:
        text = f"one record of each{where}"
    else:
        text = f"up to {per_person} records of each; {per_person} times that is charged"
    return [("of a person", text)]


def _held_out_rows(preview: RunPreview) -> list[tuple[str, str]]:
    """Who the held-out records are, and for private ones what their evaluation costs and how exact it will be."""
    evaluation, info = preview.plan.evaluation, preview.info
    if evaluation is None:
        why = f": {info.holdout_why}" if info.holdout_why else ""
        return [] if info.is_public else [("held-out records", f"declared public{why}; exact metrics leave")]
    whole = _text(preview.plan.cost.epsilon)
    price = f"private: one release at epsilon {_text(evaluation.epsilon)}; the whole run costs {whole}"
    errors = expected_errors(evaluation.spec, preview.held_out, evaluation.noise_std)
    drowned = [metric_words(name) for name, error in errors.items() if error is None]
    rows = info.rows_per_user
    people = f"{preview.held_out:,} people of {rows} records" if rows else f"{preview.held_out:,} records"
    held_out = f"with {people} held out, about as many as the data card allows"
    if len(drowned) == len(errors):
        none = f"noise drowns every one, {held_out}; the run trains and shows none"
        return [("held-out records", price), ("standard errors of its metrics", none)]
    by_group = expected_group_errors(evaluation.spec, preview.held_out, evaluation.noise_std)
    return [
        ("held-out records", price),
        ("standard errors of its metrics", f"{_errors_text(errors, info)}, {held_out}"),
        *(
            (
                f"of each group of {name}",
                f"{_errors_text(of_one, info)}, if the groups are equally large",
            )
            for name, of_one in by_group.items()
        ),
        *(
            [("drowned by noise", f"{', '.join(drowned)}; the run trains and does not show them")]
            if drowned
            else []
        ),
    ]


def _errors_text(errors: Mapping[str, float | None], info: DatasetInfo) -> str:
    """Standard errors of metrics; those of a number's errors in its own units."""
    shown = ", ".join(
        f"{metric_words(name)} {error * metric_units(name, info.label_type):.2g}"
        for name, error in errors.items()
        if error is not None
    )
    return shown or "none is shown"


def _correlation_rows(plan: Plan) -> list[tuple[str, str]]:
    """How much correlated noise is expected to gain."""
    if "noise_against_independent" not in plan.method_params:
        return []
    correlated = plan.params(CorrelatedPlan)
    share, parts = correlated.noise_against_independent, correlated.parts
    gain = f"{abs(1 - share):.1%} {'less' if share <= 1 else 'more'}"
    return [("correlated noise", f"{gain} in the iterates than independent noise; records in {parts} parts")]


def _method_rows(plan: Plan) -> list[tuple[str, str]]:
    """How far a selection is from a coin's toss, whose protocol a run has, and what it releases to be shrunk."""
    law, protocol = plan.method_params.get("selection_law"), plan.method_params.get("paper_protocol")
    rows = []
    if "gain_noise" in plan.method_params:
        shrinkage = plan.params(Shrinkage)
        gain = f"noise multiplier {shrinkage.gain_noise:.4g}"
        text = f"towards the released centre, by the gain on it ({gain}), which the epsilon below counts"
        if shrinkage.counts is not None:
            text = (
                f"towards the class frequencies, by their counts (noise multiplier {shrinkage.counts.noise:.4g}) and"
                f" the gain on them ({shrinkage.gain_noise:.4g}), which the epsilon below counts"
            )
        rows += [("shrinkage", text)]
        if (errors := shrinkage.errors) is not None:
            of_each = f"{len(errors.after)} releases on the way (noise multiplier {errors.noise:.4g})"
            rows += [("clip norm", f"falls with the errors, by {of_each}, which the epsilon below counts")]
    if isinstance(law, Mapping):
        distance = law["distance"]
        text = "unknown, as the number of records is private" if distance is None else f"{distance:.2g}"
        rows += [("selection", f"{text} away from a uniform draw among {law['candidates']}")]
    if isinstance(protocol, Mapping):
        departures = protocol["departures"]
        others = (
            f", but for {', '.join(map(str, departures))}"
            if isinstance(departures, list) and departures
            else ""
        )
        rows += [("protocol", f"by {protocol['paper']}{others}")]
    return rows


def _attack_rows(settings: Params, plan: Plan) -> list[tuple[str, str]]:
    """If the target is an attack: what it achieves against the planned run, and what it may achieve."""
    attack = settings.privacy.target
    if attack is None:
        return []
    share = float(
        max_true_positive_rate(risk_profile(plan.filter, plan.schedule, plan.adjacency), attack.false_alarms)
    )
    text = (
        f"recognises at most {share:.2%} at {attack.false_alarms:.2%} false alarms;"
        f" {attack.caught:.2%} is allowed"
    )
    return [("an attacker", text)]


def _noise(plan: Plan) -> str:
    """The noise; in words if it is chosen adaptively, since a number would suggest that it is known."""
    if plan.fixed_noise is not None:
        return f"{plan.fixed_noise:.4g}"
    max_noise = plan.method_params.get("most_noise")
    return "chosen adaptively" if max_noise is None else f"at most {max_noise:.4g}, chosen by epoch"


def _ledger_rows(preview: RunPreview) -> list[tuple[str, str]]:
    population, balance, info = preview.info.population, preview.balance, preview.info
    if balance is None:
        new = [("population", population), ("cap", _pair(preview.cap)), ("spent", "nothing so far")]
        return [*new, *_composition_rows(preview)]
    counts = _pair(balance.cap)
    if balance.cap != Budget(info.cap_epsilon, info.cap_delta):
        counts += "; the one in the data card is no longer used, `epsilonflow ledger cap` changes it"
    return [
        ("population", population),
        ("cap", counts),
        ("spent", _pair(balance.spent)),
        ("reserved by open runs", _pair(balance.reserved)),
        ("remaining", _pair(balance.remaining)),
        ("runs like this that fit", "as many as you like" if preview.fits is None else f"{preview.fits:,}"),
        *_composition_rows(preview),
    ]


def _composition_rows(preview: RunPreview) -> list[tuple[str, str]]:
    """How runs on the population add up, and what this one and ten more like it take of the cap."""
    added, planned = str(preview.composition), preview.info.composition_runs
    if preview.chosen is not None and planned is not None:
        added += f": {explain(preview.chosen, planned)}"
    elif preview.composition.kind == "basic":
        added += ": epsilons and deltas add up"
    rule = [("runs add up by", added)]
    if not preview.spent_after or preview.info.is_public:
        return rule
    after, more = preview.spent_after
    is_within = more.epsilon <= preview.cap.epsilon and more.delta <= preview.cap.delta
    later = f"after ten more like it: epsilon {_text(more.epsilon)}"
    later = later if is_within else "ten more like it would exceed the cap"
    return [*rule, ("spent after this run", f"epsilon {_text(after.epsilon)}; {later}")]


def _pair(budget: Budget) -> str:
    return f"epsilon {_text(budget.epsilon)}, delta {budget.delta:g}"


def _text(value: float) -> str:
    return f"{value:,.6g}" if math.isfinite(value) else "infinite"
