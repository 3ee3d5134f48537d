"""A step in JAX: vmap(grad) and Optax's differentially private aggregation, compiled ahead of time as one function."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from jax import Array
from torch import Tensor

from benchmarks.jax_models import Parameters, apply
from benchmarks.methods import NotAvailableError, Problem, trained


def as_array(tensor: Tensor) -> Array:
    """A copy on JAX's device."""
    return jnp.array(tensor.detach().cpu().numpy())


def as_tensor(array: Array) -> Tensor:
    """A flat copy, float64 on the CPU."""
    return torch.tensor(jax.device_get(array), dtype=torch.float64).reshape(-1)


def set_up(problem: Problem) -> None:
    """Set full precision, as in PyTorch; raises NotAvailableError if JAX does not see the batch's device."""
    precision = None if problem.autocast else "highest"
    jax.config.update("jax_default_matmul_precision", precision)  # type: ignore[no-untyped-call]
    kind = "cpu" if problem.device.type == "cpu" else "gpu"
    if jax.default_backend() != kind:
        raise NotAvailableError(
            f"jax {jax.__version__} is installed without support for this {kind.upper()}."
        )


class PerExample:
    """One compiled step, which donates the parameters' memory to the next one."""

    def __init__(self, problem: Problem) -> None:
        set_up(problem)
        self.problem = problem
        model = problem.workload.build()
        self.module = model.module
        weights = {name: as_array(p) for name, p in self.module.named_parameters()}
        self.parameters = {name: weights.pop(name) for name in trained(self.module)}
        self.frozen, self.names = weights, list(self.parameters)
        self.inputs, self.labels = as_array(problem.inputs), as_array(problem.labels)
        self.optimizer = optax.chain(
            optax.contrib.differentially_private_aggregate(
                problem.clip_norm, problem.noise_multiplier, key=jax.random.key(0)
            ),
            optax.sgd(problem.learning_rate),
        )
        self.state = self.optimizer.init(self.parameters)
        arguments = (self.parameters, self.state, self.frozen, self.inputs, self.labels)
        self.compiled = jax.jit(self._update, donate_argnums=(0, 1)).lower(*arguments).compile()

    def step(self) -> None:
        """One call of the compiled step."""
        arguments = (self.parameters, self.state, self.frozen, self.inputs, self.labels)
        self.parameters, self.state = self.compiled(*arguments)

    def wait(self) -> None:
        """Wait for the parameters."""
        for array in self.parameters.values():
            array.block_until_ready()

    def released(self) -> dict[str, Tensor]:
        """The parameters."""
        return {"parameters": torch.cat([as_tensor(self.parameters[name]) for name in self.names])}

    def _update(
        self, parameters: dict[str, Array], state: Any, frozen: Parameters, inputs: Array, labels: Array
    ) -> tuple[Any, Any]:
        gradients = jax.vmap(jax.grad(self._loss), in_axes=(None, None, 0, 0))(
            parameters, frozen, inputs, labels
        )
        updates, state = self.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def _loss(self, parameters: Parameters, frozen: Parameters, one_input: Array, one_label: Array) -> Array:
        everything, inputs = {**frozen, **parameters}, one_input[None]
        if self.problem.autocast:
            everything, inputs = jax.tree.map(_half, (everything, inputs))
        outputs = apply(self.module, everything, "", inputs)[0].astype(jnp.float32)
        loss: Array = optax.softmax_cross_entropy_with_integer_labels(outputs, one_label)
        return loss


def _half(values: Array) -> Array:
    """Cast real numbers to bfloat16; leave tokens as they are."""
    return values.astype(jnp.bfloat16) if jnp.issubdtype(values.dtype, jnp.floating) else values
