"""The folder with the real files, and the mark of tests that need it."""

import os

import pytest

MIRROR = os.environ.get("EPSILONFLOW_DATA_MIRROR")


needs_mirror = pytest.mark.skipif(
    not MIRROR, reason="EPSILONFLOW_DATA_MIRROR names no folder with the real files"
)
