"""What the next retraining is: which blocks there are, which it uses, and the epsilon that they can all pay."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger import Block, Ledger, Price, exhausted, next_retraining
from data import PublicDescription, blocks, catalogue, public_description
from data.card import DataCard
from tasks.calibrate import plan_for
from tasks.environment import database_url
from tasks.params import Params, ParamsRefused
from tasks.population import declare
from tasks.request import Request, Revision, revise
from tasks.retraining.budget import epsilon_for
from tasks.retraining.registry import Registry
from tasks.retraining.settings import Retraining


class TooFew(Refused):
    """No retraining is due: too few blocks can pay for one, or none of them is new."""


@dataclass(frozen=True)
class Next:
    """The next retraining: its blocks, its epsilon, and what params.yaml becomes."""

    blocks: tuple[str, ...]
    epsilon: float
    revision: Revision


def declared_blocks(settings: Retraining, ledger: Ledger, root: Path) -> tuple[DataCard, list[Block]]:
    """The data card, and where the blocks stand that can be read now; new ones are entered into the ledger.

    Raises DataRefused where the source cannot be read, Refused where the population is of another kind.
    """
    card = catalogue.card(settings.dataset, root / "data" / "cards")
    there_are = blocks.names(card, root=root, url=database_url(card.blocks))
    declare(ledger, replace(public_description(card), blocks=there_are))
    return card, [block for block in ledger.blocks(card.population) if block.name in there_are]


def retire(settings: Retraining, ledger: Ledger, card: DataCard, standing: list[Block]) -> tuple[str, ...]:
    """Retires the blocks whose next payment would be of no use; returns their names."""
    names = exhausted(standing, _smallest(settings, standing), settings.spreading) if standing else ()
    for name in names:
        ledger.retire_block(card.population, name)
    return names


def next_of(
    settings: Retraining,
    ledger: Ledger,
    *,
    root: Path,
    registry: Registry,
    last: tuple[str, ...] | None,
) -> Next:
    """What to do in a period that is due; nothing is charged.

    last: the blocks of the last retraining. Raises TooFew where nothing is due, and what `revise`, `declare` and
    `plan_for` raise.
    """
    card, standing = declared_blocks(settings, ledger, root)
    retire(settings, ledger, card, standing)
    _, standing = declared_blocks(settings, ledger, root)
    used, price = _choose(settings, standing)
    if last is not None and set(used) <= set(last):
        raise TooFew("none of the blocks that can pay is new, so the model that serves stays.")
    own = _own(settings, used, registry, root)
    asked = _asked(settings, root, own)
    public = replace(public_description(card, asked.data.transform), blocks=used)
    epsilon, delta = _affordable(asked, ledger, public, price)
    return Next(used, epsilon, revise(root, Request(epsilon=epsilon, delta=delta, settings=own)))


def _choose(settings: Retraining, standing: list[Block]) -> tuple[tuple[str, ...], Price]:
    if not standing:
        raise TooFew("there is no block yet, so nothing is trained.")
    try:
        return next_retraining(
            settings.choice, settings.spreading, standing, smallest=_smallest(settings, standing)
        )
    except Refused as refusal:
        raise TooFew(str(refusal)) from None


def _smallest(settings: Retraining, standing: list[Block]) -> Price:
    return tuple(settings.smallest * min(parts) for parts in zip(*(b.limit for b in standing), strict=True))


def _own(settings: Retraining, used: tuple[str, ...], registry: Registry, root: Path) -> Mapping[str, Any]:
    """What of params.yaml a retraining sets, beside epsilon and delta."""
    own: dict[str, Any] = {"data.blocks": list(used)}
    serving = registry.serving
    if settings.warm_start and serving is not None:
        own["model.start"] = str((serving / "model.safetensors").relative_to(root))
    return own


def _asked(settings: Retraining, root: Path, own: Mapping[str, Any]) -> Params:
    """What params.yaml becomes, but for epsilon; raises ParamsRefused where it is about another data set."""
    asked = revise(root, Request(delta=settings.delta, settings=own)).params
    if asked.data.dataset != settings.dataset:
        raise ParamsRefused(
            f"params.yaml is about {asked.data.dataset!r} and the retraining about {settings.dataset!r}; use a checkout"
            f" for each, or `epsilonflow run --dataset {settings.dataset}` first."
        )
    return asked


def _affordable(
    asked: Params, ledger: Ledger, public: PublicDescription, price: Price
) -> tuple[float, float]:
    privacy, rest = asked.privacy, dict(asked.groups)
    return epsilon_for(
        price,
        ledger.balance(public.population, "all"),
        len(public.blocks),
        privacy.delta,
        lambda epsilon: plan_for(
            replace(asked, groups=rest | {"privacy": privacy.model_copy(update={"epsilon": epsilon})}), public
        ),
    )
