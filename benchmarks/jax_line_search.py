"""The line search in JAX: one compiled function, with one matrix product for the margins of the 20 candidates."""

import jax
import jax.numpy as jnp
import optax
from jax import Array
from torch import Tensor

from benchmarks.jax_peer import as_array, as_tensor, set_up
from benchmarks.line import BOUND, STEPS
from benchmarks.methods import Problem


class Jitted:
    """Logistic regression; parameters are the flat vector [weight, bias]."""

    def __init__(self, problem: Problem) -> None:
        set_up(problem)
        self.problem = problem
        self.parameters = as_array(problem.workload.build().initial_parameters())
        self.inputs, signs = as_array(problem.inputs), 2 * problem.labels - 1
        self.signs = as_array(signs.to(problem.inputs.dtype))
        self.key, self.objectives = jax.random.key(0), jnp.zeros(len(STEPS))
        arguments = (self.parameters, self.key, self.inputs, self.signs)
        self.compiled = jax.jit(self._update, donate_argnums=(0, 1)).lower(*arguments).compile()

    def step(self) -> None:
        """One call of the compiled iteration."""
        arguments = (self.parameters, self.key, self.inputs, self.signs)
        self.parameters, self.key, self.objectives = self.compiled(*arguments)

    def wait(self) -> None:
        """Wait for the iteration."""
        self.objectives.block_until_ready()

    def released(self) -> dict[str, Tensor]:
        """The new parameters and the objectives."""
        return {"parameters": as_tensor(self.parameters), "objectives": as_tensor(self.objectives)}

    def _update(
        self, parameters: Array, key: Array, inputs: Array, signs: Array
    ) -> tuple[Array, Array, Array]:
        key, noise_key = jax.random.split(key)
        gradients = jax.vmap(jax.grad(_loss), in_axes=(None, 0, 0))(parameters, inputs, signs)
        (total,), _ = optax.per_example_global_norm_clip([gradients], self.problem.clip_norm)
        noise = self.problem.noise_scale * jax.random.normal(noise_key, total.shape)
        direction = (total + noise) / len(signs)
        candidates = parameters - jnp.array(STEPS)[:, None] * direction
        margins = candidates[:, :-1] @ inputs.T + candidates[:, -1:]
        objectives = jnp.clip(jax.nn.softplus(-signs * margins), 0.0, BOUND).sum(axis=1)
        return candidates[objectives.argmin()], key, objectives


def _loss(parameters: Array, one_input: Array, sign: Array) -> Array:
    return jax.nn.softplus(-sign * (one_input @ parameters[:-1] + parameters[-1]))
