"""PyTorch alone: the step without privacy, and per-example gradients by torch.func."""

import torch
from torch import Tensor

from benchmarks.methods import OnTorch, Problem, trained


class Plain(OnTorch):
    """Not private: the mean loss, one backward pass, torch.optim.SGD."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.model = problem.model()
        weights = trained(self.model.module).values()
        self.optimizer = torch.optim.SGD(weights, lr=problem.learning_rate)

    def step(self) -> None:
        """One step of gradient descent on the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.problem.precision():
            losses = self.model.losses(self.model.module(self.problem.inputs), self.problem.labels)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def released(self) -> dict[str, Tensor]:
        """The parameters."""
        return {"parameters": self.flat(self.model.module)}


class PerExample(OnTorch):
    """vmap(grad), as in PyTorch's tutorial "Per-sample-gradients": every gradient, their norms, one contraction."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.model = problem.model()
        self.weights = trained(self.model.module)
        self.gradients = torch.func.vmap(torch.func.grad(self._loss), in_dims=(None, 0, 0))

    def step(self) -> None:
        """Materialise every record's gradient, clip, sum, add noise, update."""
        values = {name: weight.detach() for name, weight in self.weights.items()}
        gradients = self.gradients(values, self.problem.inputs, self.problem.labels)
        norms = torch.stack([g.flatten(start_dim=1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (self.problem.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        rate = self.problem.learning_rate / len(self.problem.labels)
        for name, weight in values.items():
            total = torch.einsum("i,i...->...", factors, gradients[name])
            noise = self.problem.noise_scale * torch.randn_like(weight)
            weight.sub_(total + noise, alpha=rate)

    def released(self) -> dict[str, Tensor]:
        """The parameters."""
        return {"parameters": self.flat(self.model.module)}

    def _loss(self, values: dict[str, Tensor], one_input: Tensor, one_label: Tensor) -> Tensor:
        with self.problem.precision():
            outputs = self.model.outputs(values, one_input[None])
            return self.model.losses(outputs, one_label[None])[0]
