"""The privacy card: what the guarantee of a run is, how it came about, and how to recompute it.

A card holds typed facts and no sentences (`schema`). `build` makes it from a run's documents and signs it with the
owner's key; `load` reads it from a file, every byte of which matters; `verify` checks its signature, computes epsilon
again from its events, and compares it with the files beside it; `check_charged` compares it with a ledger. `text`
writes the sentences for people. `verify_card` is a program of one file for people without this package,
with which it shares no code.

A card promises no more than its events. Its checksums tie it to the files of the run, its ledger_head to the
population's ledger. It holds no checksum of private records, since such a number would let anyone test a guess of them.

Keys come from the caller, as objects of `cryptography`. Of the rest of privacy only accounting, events and the ledger's
reading are imported, and nothing imports this package that a run needs while it trains.
"""

from algorithms.privacy.card.build import (
    RunRecord,
    build,
    load,
    load_beside,
    placeholder_trace,
    trace_schedule,
)
from algorithms.privacy.card.schema import EVALUATION, RELEASED, PrivacyCard, public_key_of
from algorithms.privacy.card.verify import SIGNER, CardVerification, check_charged, recompute, verify

__all__ = [
    "EVALUATION",
    "RELEASED",
    "SIGNER",
    "CardVerification",
    "PrivacyCard",
    "RunRecord",
    "build",
    "check_charged",
    "load",
    "load_beside",
    "placeholder_trace",
    "public_key_of",
    "recompute",
    "trace_schedule",
    "verify",
]
