"""A finished run with its card, other cards, and places for a ledger: a SQLite file, and a PostgreSQL server."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from algorithms.privacy.card import PrivacyCard, build
from tests.support.postgres import new_database, postgres_server  # noqa: F401 - fixtures
from tests.support.synthetic_run import Folders, record, write_run

PASSWORD = "s3cret%40word"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
"""The owner's."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The files of a finished run, not to be changed."""
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def built(folders: Folders) -> PrivacyCard:
    """Its card."""
    return build(record(folders), KEY)


@pytest.fixture
def document(built: PrivacyCard) -> dict[str, Any]:
    """Its card as a document, to be changed."""
    return built.to_json()


def card_of(document: Mapping[str, Any]) -> PrivacyCard:
    """The card of these facts, and of this signature."""
    return PrivacyCard.model_validate_json(json.dumps(document))


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a ledger that does not exist yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/home/ledger.sqlite"
    database: sa.URL = request.getfixturevalue("new_database")()
    return database.render_as_string(hide_password=False)
