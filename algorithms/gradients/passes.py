"""Forward and backward passes over some records: recorded for all of them at once, or record by record."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from algorithms.gradients.arithmetic import wide
from algorithms.gradients.errors import UnsupportedModelError
from algorithms.gradients.grad_sample_recorder import (
    Args,
    Func,
    GradSampleRecorder,
    Kwargs,
    Layouts,
    Shapes,
    UnrecordedError,
    reporting_functions,
    running_opaque,
)
from algorithms.gradients.memory import lacks_memory
from algorithms.gradients.model import PerExampleModel
from algorithms.gradients.model_gradients import PerExampleGradients, combine
from algorithms.gradients.parameter_gradients import DenseGrad, PerExample
from algorithms.gradients.patches import with_visible_calls, without_autocast, without_shortcuts
from algorithms.gradients.placement import Bringer, Shards
from algorithms.gradients.rules import RULES, general, pull_back, shared_operation
from algorithms.gradients.rules.recurrent import Unpacked
from algorithms.gradients.tracer_mode import TracerMode

_GRADIENT = with_visible_calls(torch.autograd.grad)
"""`torch.autograd.grad`; PyTorch would leave a mode for its time, in which checkpointed layers run again."""

PinnedBranch = bool | int | None
PinnedBranches = tuple[PinnedBranch, ...]


@dataclass(frozen=True)
class Passes:
    """The passes of one model, in its precision.

    Attributes:
        pinned_branches: Constants that replace the model's data-dependent branch conditions, in order, such as whether
            any record has padding or how long the longest one is. A condition that depends on one record would change
            the results of others; None for a condition that no record can influence. A pass over a single record uses
            the record's own branches.
        offload: Where parameters are brought to that stay in main memory; None if they are where the records are.
        shards: Of the flat vector of parameters, if each process holds a slice of it.
        unpacks: Whether recurrent layers process packed sequences as padded ones.
        keeps_format: Whether a recorded pass leaves images and kernels in their memory format, since the model rejects
            the one that is fastest for max pooling, as `view` does, or computes other values in it, as dropout does.
        opaque_layers: Names of layers that a recorder sees as one function each, since their operations cannot be
            recorded.
        uses_double_backward: Whether the model differentiates in its forward pass, as for forces or gradient penalties.
        keeps_views: Whether small outputs of layers that are views stay so in a recorded pass, which is faster, as the
            model overwrites none.
        expects_zeros: Whether backward passes through `prod` take PyTorch's way for factors that are zero. It has other
            bits than the one that PyTorch takes if no factor of the pass is zero, and a traced pass takes it, too.
        not_by_rows: A recorder's names of weights whose maps from parameters were seen not to be by rows, so that no
            pass tries it.
        asserts_maps: Whether a pass fails where a map from parameters is not by rows, instead of reading whether it is.
        are_separate: Whether records that are taken one by one have passes of their own, since `torch.func` gives wrong
            gradients of the model, as of distances between parameters.
    """

    model: PerExampleModel
    pinned_branches: PinnedBranches = ()
    offload: torch.device | None = None
    shards: Shards | None = None
    unpacks: bool = False
    keeps_format: bool = False
    opaque_layers: tuple[str, ...] = ()
    uses_double_backward: bool = False
    keeps_views: bool = False
    expects_zeros: bool = False
    not_by_rows: frozenset[str] = frozenset()
    asserts_maps: bool = False
    are_separate: bool = False

    @cached_property
    def is_channels_last(self) -> bool:
        """Whether a recorded pass takes images and kernels in the channels-last format."""
        return not self.keeps_format and _pools(self.model.module)

    @without_shortcuts()
    def record_forward(
        self,
        parameters: Tensor,
        inputs: Tensor,
        labels: Tensor,
        layouts: Layouts | None = None,
        other: GradSampleRecorder | None = None,
    ) -> tuple[GradSampleRecorder, Tensor]:
        """Record a forward pass; also returns the loss of each record, [batch].

        Without layouts the recorder learns them from the shapes that `other` noted for another number of records.
        """
        before = None if other is None else (other.shapes, other.batch)
        recorder, inputs = self._recorder(parameters, inputs, len(labels), layouts, before)

        with (
            torch.enable_grad(),
            self._precision(inputs.device),
            self._pinning(),
            reporting_functions(),
            self.model.using(recorder.parameters),
            recorder,
            self._within(inputs.device),
        ):
            # The loss is included, which may read values or use parameters.
            losses = self.model.losses(self.model.module(inputs), labels)
        return recorder, losses.detach()

    @without_shortcuts()
    def record_gradients(
        self,
        parameters: Tensor,
        inputs: Tensor,
        labels: Tensor,
        layouts: Layouts,
        without_rule: set[str] | None = None,
        not_by_rows: set[str] | None = None,
    ) -> PerExampleGradients:
        """Per-example gradients from one backward pass to the outputs of the operations that use parameters.

        This is the book-keeping of Bu et al. (2023). without_rule: a set to add operations without a rule to.
        not_by_rows: one for the names of weights that are computed by other maps than those by rows. Raises
        UnrecordedError if an operation's gradients cannot be separated by record.
        """
        recorder, inputs = self._recorder(parameters, inputs, len(labels), layouts)

        grad_outputs: tuple[Tensor | None, ...] = ()
        try:
            # The backward pass is within, too, as checkpointed layers run again in it.
            with reporting_functions(), self.model.using(recorder.parameters):
                with torch.enable_grad(), self._precision(inputs.device), self._pinning(), recorder.saving():
                    with recorder, self._within(inputs.device):
                        outputs = self.model.module(inputs)
                    losses = self.model.losses(outputs, labels)
                    del outputs
                if uses := recorder.take_uses():
                    # Packed sequences in layers that run again would not save what they saved for the recorder.
                    with replace(self, unpacks=False)._pinning(again=True):
                        # To the outputs of uses, not to parameters, which are tensors without a gradient here. Of a
                        # sum: PyTorch imports SymPy to compare the shapes of losses with those of given gradients.
                        grad_outputs = _GRADIENT(losses.sum(), [use.edge for use in uses], allow_unused=True)
        except CheckpointError as reason:
            # They run again without the recorder, and save nothing if no trained layer comes before them.
            raise UnrecordedError("checkpointed layers save other tensors when they run again") from reason
        if without_rule is not None:
            without_rule |= recorder.without_rule

        of_uses: dict[str, list[PerExample]] = {}
        with torch.no_grad(), self._expecting_zeros():
            # Opaque layers run again, and may keep something of a pass.
            with self.model.using(recorder.parameters) if self.opaque_layers else nullcontext():
                for use, grad_output in zip(uses, grad_outputs, strict=True):
                    use.check()
                    for name, gradient in (
                        use.gradients(grad_output) if grad_output is not None else {}
                    ).items():
                        of_uses.setdefault(name, []).append(gradient)
            of_parameters = {name: combine(parts) for name, parts in pull_back(recorder, of_uses).items()}
            if not_by_rows is not None:
                not_by_rows |= recorder.not_by_rows
            return self.contributions(parameters, losses.detach(), of_parameters)

    def _recorder(
        self,
        parameters: Tensor,
        inputs: Tensor,
        batch: int,
        layouts: Layouts | None,
        other: tuple[Sequence[Shapes], int] | None = None,
    ) -> tuple[GradSampleRecorder, Tensor]:
        """A new recorder with the parameters by name, and the inputs; both in the model's fastest memory format."""
        flat = parameters.detach()
        if self.shards is not None:
            flat = torch.empty(len(parameters), dtype=parameters.dtype, device="meta")
        named = {name: self._to_memory_format(part) for name, part in self.model.by_name(flat).items()}
        recorder = GradSampleRecorder(
            *(named, RULES, general, shared_operation),
            batch=batch,
            layouts=layouts,
            other=other,
            bringing=self._bringer(parameters, named),
            uses_double_backward=self.uses_double_backward,
        )
        recorder.not_by_rows |= self.not_by_rows
        recorder.asserts_maps = self.asserts_maps
        recorder.keeps_views = self.keeps_views and not self.uses_double_backward
        return recorder, self._to_memory_format(inputs)

    def _to_memory_format(self, tensor: Tensor) -> Tensor:
        return _channels_last(tensor) if self.is_channels_last else tensor

    def _bringer(self, parameters: Tensor, named: dict[str, Tensor]) -> Bringer | None:
        """What brings parameters that are elsewhere to the device; None if they are there."""
        device, shards, model = self.offload, self.shards, self.model
        if device is not None:
            return Bringer(device, lambda name: named[name].to(device, copy=True))
        if shards is None:
            return None
        return Bringer(
            shards.device,
            lambda name: self._to_memory_format(
                shards.gather(parameters, model.slices[name]).view(model.shapes[name])
            ),
        )

    @without_shortcuts()
    def one_by_one(
        self, parameters: Tensor, inputs: Tensor, labels: Tensor, count: int | None = None
    ) -> PerExampleGradients:
        """Each record's gradient, materialised: by `torch.func`, or by a separate pass if that fails.

        count: of the records that are no padding, which gets no separate passes; all by default.
        """

        def loss(values: dict[str, Tensor], one_input: Tensor, one_label: Tensor) -> Tensor:
            return self.model.losses(self.model.outputs(values, one_input[None]), one_label[None])[0]

        if self.are_separate:
            return self._each_in_a_pass(parameters, inputs[:count], labels[:count])
        # Over the records, which all have the same parameters.
        each = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
        try:
            named = self.model.by_name(parameters.detach())
            with self._precision(inputs.device), self.model.using(named):
                gradients, losses = each(named, inputs, labels)
        except RuntimeError as error:
            # Control flow depends on values, or an operation has no batched form.
            if lacks_memory(error):  # other passes would round otherwise
                raise
            return self._each_in_a_pass(parameters, inputs[:count], labels[:count])
        rows = {name: DenseGrad(gradient.reshape(len(labels), -1)) for name, gradient in gradients.items()}
        return self.contributions(parameters, losses.detach(), dict(rows))

    def _each_in_a_pass(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> PerExampleGradients:
        """Each record in a separate pass: slow, but correct for everything that autograd differentiates."""
        losses, alone = [], replace(self, pinned_branches=())
        rows = parameters.new_zeros(len(labels), len(parameters))
        ones = zip(rows, torch.split(inputs, 1), torch.split(labels, 1), strict=True)
        for row, one_input, one_label in ones:
            loss, by_name = alone.gradients(parameters, one_input, one_label)
            losses.append(loss)
            for name in tuple(by_name):  # which frees them: the next pass takes as much memory
                row[self.model.slices[name]] = by_name.pop(name).flatten()
        gradients = {name: DenseGrad(rows[:, part]) for name, part in self.model.slices.items()}
        return self.contributions(parameters, torch.cat(losses), dict(gradients))

    @without_shortcuts()
    def gradients(
        self,
        parameters: Tensor,
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor | float = 1.0,
        turn: Callable[[], object] = lambda: None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each record, [batch], and the gradients of their sum, by parameter that it depends on.

        weights: of the losses in the sum. turn: called before the backward pass.
        """
        named = {
            name: part.detach().requires_grad_()
            for name, part in self.model.by_name(parameters.detach()).items()
        }
        with torch.enable_grad(), self._precision(inputs.device), self._pinning():
            losses = self.model.losses(self.model.outputs(named, inputs), labels)
            total = (losses * weights).sum()
        if not total.requires_grad:
            return losses, {}
        turn()
        leaves = tuple(named.values())
        with self._pinning(again=True), self.model.using(named):
            results = _GRADIENT(total, leaves, allow_unused=True)
        if any(leaf.grad is not None for leaf in leaves):
            raise UnsupportedModelError(
                f"the model {self.model.name} calls backward() inside the backward pass, as reversible layers do, so"
                " that per-example gradients cannot be told apart; leave it to autograd."
            )
        # An embedding with `sparse=True` has sparse gradients.
        gradients = {
            name: part.to_dense() for name, part in zip(named, results, strict=True) if part is not None
        }
        return losses.detach(), gradients

    @without_shortcuts()
    def losses(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record, [batch]."""
        with torch.no_grad(), self._precision(inputs.device), self._pinning():
            return self.model.losses(self.model.outputs(self.model.by_name(parameters), inputs), labels)

    def losses_one_by_one(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record, [batch], from a separate pass with the record's own branches."""
        alone = replace(self, pinned_branches=())
        pairs = zip(torch.split(inputs, 1), torch.split(labels, 1), strict=True)
        return torch.cat([alone.losses(parameters, *pair) for pair in pairs])

    def contributions(
        self, parameters: Tensor, losses: Tensor, gradients: dict[str, PerExample]
    ) -> PerExampleGradients:
        """Combine gradients by parameter, without those of no numbers, with the model's layers and positions."""
        slices = self.model.slices
        held = {name: part for name, part in gradients.items() if slices[name].stop > slices[name].start}
        return PerExampleGradients(losses, held, slices, self.model.layers, wide(parameters).dtype)

    def _pinning(self, *, again: bool = False) -> AbstractContextManager[Any]:
        """A context that pins branches. again: for a backward pass, where checkpointed layers have them out of turn."""
        pinning: AbstractContextManager[Any] = nullcontext()
        if self.pinned_branches:
            pinning = BranchPinning(self.pinned_branches, forbids_branches=again)
        if self.expects_zeros:
            pinning = _both(pinning, self._expecting_zeros())
        return _both(pinning, Unpacked()) if self.unpacks else pinning

    def _expecting_zeros(self) -> AbstractContextManager[Any]:
        """A context in which products are differentiated as if a factor were zero, if the model has any."""
        # Where a mode sees its operations, PyTorch does not look at the factors.
        return TracerMode() if self.expects_zeros else nullcontext()  # type: ignore[no-untyped-call]

    def _within(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context within a recorder's, which sees what packed sequences are replaced by, and opaque layers."""
        unpacking = Unpacked() if self.unpacks else nullcontext()
        layers = [self.model.module.get_submodule(name) for name in self.opaque_layers]
        return (
            _both(unpacking, running_opaque(layers, lambda: self._precision(device))) if layers else unpacking
        )

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.model.precision == torch.bfloat16:
            return torch.autocast(device.type, torch.bfloat16)
        return without_autocast()


_NEW_BRANCH = "it branches on tensor values where the inspection saw no branch"


class BranchPinning(TorchFunctionMode):
    """Pin the branch conditions within the block. forbids_branches: raise UnrecordedError at each of them instead."""

    def __init__(self, pinned_branches: PinnedBranches, *, forbids_branches: bool) -> None:
        super().__init__()
        self._pinned_branches, self._met = pinned_branches, 0
        self._forbids_branches = forbids_branches

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        # The model took another way than in the inspection.
        if reason[0] is None and not self._forbids_branches and self._met < len(self._pinned_branches):
            raise UnrecordedError(_NEW_BRANCH)

    def __torch_function__(
        self, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func not in _VALUE_READERS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in VALUE_CHECKS:
            # PyTorch leaves a mode while it handles a call, and the calls within are to be pinned, too.
            with self:
                return with_visible_calls(func)(*args, **(kwargs or {}))
        if not is_branch_condition(func, args):
            return func(*with_pinned_numbers(self, func, args), **(kwargs or {}))
        if self._forbids_branches or self._met >= len(self._pinned_branches):
            raise UnrecordedError(_NEW_BRANCH)
        self._met += 1
        pinned = self._pinned_branches[self._met - 1]
        return func(*args, **(kwargs or {})) if pinned is None else pinned


def with_pinned_numbers(mode: TorchFunctionMode, func: Func, args: Args) -> Args:
    """The arguments, where `mode` pinned the numbers that a range or a slice would read from tensors."""

    def number(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(number(value.start), number(value.stop), value.step)
        if not isinstance(value, Tensor):
            return value
        return mode.__torch_function__(Tensor.item, (), (value,))  # type: ignore[no-untyped-call]

    if func is torch.arange:
        return tuple(map(number, args))
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(part, slice) for part in index):
            return args[0], tuple(number(part) if isinstance(part, slice) else part for part in index)
    return args


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


_NUMBERS = frozenset((Tensor.item, Tensor.__int__, Tensor.__index__))
_CONDITIONS = frozenset(
    (
        *(Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero),
        *(Tensor.equal, torch.equal, Tensor.allclose, torch.allclose, Tensor.__contains__),
    )
)
VALUE_CHECKS: frozenset[Func] = frozenset((functional.gaussian_nll_loss,))
"""Functions of PyTorch that read values of their arguments within, and raise errors by them."""
_VALUE_READERS = frozenset((torch.arange, Tensor.__getitem__)) | _NUMBERS | _CONDITIONS | VALUE_CHECKS
"""All that may read a value, which most calls do not."""


def is_branch_condition(func: Func, args: Args) -> bool:
    """Whether a function of tensors returns a Python bool or whole number."""
    return func in _CONDITIONS or (func in _NUMBERS and not args[0].is_floating_point())


def _pools(module: nn.Module) -> bool:
    """Whether a model has max pooling, which is several times faster in the channels-last format."""
    return any(isinstance(layer, nn.modules.pooling._MaxPoolNd) for layer in module.modules())


def _channels_last(images: Tensor) -> Tensor:
    """Images and kernels in the channels-last format; other tensors unchanged."""
    if images.dim() != 4:
        return images
    _, channels, height, width = images.shape
    if channels > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # With a single channel PyTorch sees no order unless the strides say so.
    # Strides of [batch, height, width, 1].
    return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))
