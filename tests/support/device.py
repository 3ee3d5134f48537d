"""The device that `make gpu` runs the tests of sums and the contracts on, as a run would; the CPU elsewhere."""

import os

from algorithms.privacy.barrier.device import device_of

DEVICE = device_of(os.environ.get("EPSILONFLOW_TEST_DEVICE", "cpu"))
