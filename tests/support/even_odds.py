"""Models whose every decision is rounding: it shows whether a record's score depends on its company."""

import torch
from torch import Tensor, nn

WIDTH = 6


class EvenOdds(nn.Module):
    """Two ways to compute one number, whose difference is rounding alone: it decides on which side of even odds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        once = self.layer(inputs).sum(dim=1)
        again = inputs @ self.layer.weight.sum(dim=0) + self.layer.bias.sum()
        return torch.stack([torch.zeros_like(once), once - again], dim=1)


class Asking(EvenOdds):
    """The same, computed in 64 bits where any record has padding: another path, as models of texts take it."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not bool((inputs > 50.0).any()):
            return super().forward(inputs)
        weight, bias = self.layer.weight.double(), self.layer.bias.double()
        once = (inputs.double() @ weight.T + bias).to(inputs.dtype).sum(dim=1)
        again = (inputs.double() @ weight.sum(dim=0) + bias.sum()).to(inputs.dtype)
        return torch.stack([torch.zeros_like(once), once - again], dim=1)
