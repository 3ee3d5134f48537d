"""A run that a ledger was charged for, and its card."""

import math
from dataclasses import replace

from algorithms.core.receipt import account_of
from algorithms.privacy.accounting import Budget
from algorithms.privacy.card import SIGNER, PrivacyCard, RunRecord, build, public_key_of
from algorithms.privacy.ledger import Composition, Ledger
from tests.algorithms.privacy.conftest import KEY
from tests.support.synthetic_run import DELTA, with_entries


def charge(ledger: Ledger, run: RunRecord, *blocks: str, rule: str = "basic") -> PrivacyCard:
    """The card of the run, charged to a population and settled there; another run is charged after it."""
    run = replace(run, data=with_entries(run.data, public=True))
    terms = {"unit": run.data.unit}
    ledger.declare("painters", Budget(900.0, 0.1), public=True, composition=Composition(rule), bound=terms)
    for block in blocks:
        ledger.declare_block("painters", block)
    cost = Budget(math.inf if run.receipt.cost is None else run.receipt.cost, DELTA)
    for run_id, model in (
        (run.receipt.run_id, run.receipt.sha256["model.safetensors"]),
        ("later", None),
    ):
        notes = run.plan.ledger_notes | {SIGNER: public_key_of(KEY)}
        events, named = run.receipt.events, blocks or ("all",)
        ledger.reserve(run_id, "painters", cost, events=events, notes=notes, blocks=named)
        ledger.settle(run_id, cost, events=events, model=model)
    account = account_of(ledger, "painters", run.receipt.run_id)
    return build(replace(run, receipt=run.receipt.model_copy(update={"ledger": account})), KEY)
