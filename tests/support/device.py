"""The device that `make gpu` runs the tests of sums and the contracts on; the CPU elsewhere."""

import os

import torch

DEVICE = torch.device(os.environ.get("EPSILONFLOW_TEST_DEVICE", "cpu"))
