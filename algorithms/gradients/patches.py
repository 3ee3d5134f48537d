"""Everything that changes PyTorch itself: settings of the process, and the patches of its functions.

PyTorch has no per-thread form of these. A `ProcessSetting` holds while some thread is inside of it, and what was set
before comes back when the last one has left. A patch acts only for the threads that asked for it, so that others in the
process, which may train without this package, see PyTorch as it is.

| | what it changes | why |
| --- | --- | --- |
| `in_full_precision` | `fp32_precision` of products | a norm and its contribution must round alike |
| `without_shortcuts` | attention's fast path, checks of distributions | they look at all records of a pass at once |
| | `torch.cdist` of two matrices | it computes in another way for more than 25 rows |
| | the order of factors in `torch.einsum` | opt_einsum chooses it by the number of records, too |
| `without_autocast` | `torch.autocast.__enter__` | rounding to 16 bits would hide whether records mix |
| `reporting_applied` | `torch.autograd.Function.apply` | it bypasses `__torch_function__`, by which uses are recorded |
| `with_visible_calls` | a copy of one function, nothing else | it hands itself over to a mode as a whole |
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.distributions import Distribution
from torch.overrides import handle_torch_function, has_torch_function

from algorithms.gradients.devices import (
    CUDA_PRODUCTS,
    HAS_CUDA_PRODUCTS,
    get_tf32_convolutions,
    set_tf32_convolutions,
)

T = TypeVar("T")

_BACKENDS: Any = torch.backends  # its type stubs are incomplete
_ON_CPU = (_BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.rnn)
_PRODUCTS = (*CUDA_PRODUCTS, *_ON_CPU)
_USED = _PRODUCTS if HAS_CUDA_PRODUCTS else _ON_CPU


class ProcessSetting(ContextDecorator):
    """A setting of the process that all threads share: it holds until the last of those that entered has left.

    change: makes the setting, and returns what restores the earlier one.

    Example:
        >>> log = []
        >>> def change():
        ...     log.append("on")
        ...     return lambda: log.append("off")
        >>> setting = ProcessSetting(change)
        >>> with setting, setting:
        ...     log.append("twice")
        >>> log
        ['on', 'twice', 'off']
    """

    def __init__(self, change: Callable[[], Callable[[], object]]) -> None:
        self._change = change
        self._restore: Callable[[], object] = _nothing
        self._lock, self._entered = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._restore = self._change()
            self._entered += 1

    def __exit__(self, *reason: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._restore()


def _nothing() -> None:
    pass


def in_full_precision() -> ProcessSetting:
    """Disable reduced-precision products of 32-bit numbers, with which a norm and its contribution could differ.

    These are TF32 on GPUs and bfloat16 on some CPUs.
    """
    return _FULL_PRECISION


def _set_full_precision() -> Callable[[], object]:
    # "none": set neither for these nor for all products, which PyTorch then computes in full precision.
    if all(kind.fp32_precision in ("ieee", "none") for kind in _USED):
        return _nothing
    precisions = [kind.fp32_precision for kind in _PRODUCTS]
    products = _read_or_none(torch.get_float32_matmul_precision)
    convolutions = _read_or_none(get_tf32_convolutions)
    # The older settings first: PyTorch raises an error where they are read after the newer ones were written.
    torch.set_float32_matmul_precision("highest")
    set_tf32_convolutions(False)
    _set_precisions(["ieee"] * len(precisions))
    return functools.partial(_restore_precisions, precisions, products, convolutions)


def _restore_precisions(precisions: Sequence[str], products: str | None, convolutions: bool | None) -> None:
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if convolutions is not None:
        set_tf32_convolutions(convolutions)
    _set_precisions(precisions)


def _set_precisions(precisions: Sequence[str]) -> None:
    for kind, precision in zip(_PRODUCTS, precisions, strict=True):
        kind.fp32_precision = precision


def _read_or_none(setting: Callable[[], T]) -> T | None:
    """Read one of PyTorch's settings from before 2.9; None if it cannot be read, since the newer settings were used."""
    try:
        return setting()
    except RuntimeError:
        return None


_FULL_PRECISION = ProcessSetting(_set_full_precision)


def without_shortcuts() -> ProcessSetting:
    """Disable what PyTorch computes for all records of a pass together, or checks of their values, where it need not.

    In evaluation mode and without gradients, `nn.TransformerEncoder` packs records without their padding. That fails
    for a record of padding alone, and gives other numbers than the passes that a model is trained by. Distributions
    stop at a value of one record, which is to count as zero, and show it. Distances between the rows of two matrices,
    one of which may be the records, follow from products of these however few there are, as for many in PyTorch.
    Products of several factors are formed in an order that follows from the equation alone.
    """
    return _WITHOUT_SHORTCUTS


def _disable_shortcuts() -> Callable[[], object]:
    packs, checks = torch.backends.mha.get_fastpath_enabled(), Distribution._validate_args
    torch.backends.mha.set_fastpath_enabled(False)
    Distribution.set_default_validate_args(False)
    _FUNCTIONS.cdist, _FUNCTIONS.einsum = _distances, _contract

    def restore() -> None:
        del _FUNCTIONS.cdist, _FUNCTIONS.einsum
        torch.backends.mha.set_fastpath_enabled(packs)
        Distribution.set_default_validate_args(checks)

    return restore


def _distances(first: Tensor, second: Tensor, p: float, mode: int | None) -> Tensor:
    """What `torch.cdist` calls; mode: 1 for products, 2 for differences, None for PyTorch's choice by the numbers."""
    distances: Tensor = _CDIST(
        first, second, p, 1 if mode is None and first.dim() == second.dim() == 2 else mode
    )
    return distances


def _contract(equation: str, factors: Sequence[Tensor], path: Sequence[int] | None = None) -> Tensor:
    """What `torch.einsum` calls; path: which two of several factors come first, if opt_einsum has chosen them."""
    order = None if path is None else _order(equation, tuple(factor.dim() for factor in factors))
    product: Tensor = _EINSUM(equation, factors, path=order)
    return product


@functools.cache
def _order(equation: str, dimensions: tuple[int, ...]) -> list[int]:
    """The order of least work if all indices are equally long: that of the records is not known here."""
    shapes = [(_LENGTH,) * n for n in dimensions]
    pairs: Any = torch.backends.opt_einsum.get_opt_einsum().contract_path(equation, *shapes, shapes=True)[0]
    return [place for pair in pairs for place in pair]


_LENGTH = 8
_FUNCTIONS: Any = torch._VF  # functions of C++, each an attribute once it is set
_CDIST: Callable[..., Any] = _FUNCTIONS.cdist
_EINSUM: Callable[..., Any] = _FUNCTIONS.einsum
_WITHOUT_SHORTCUTS = ProcessSetting(_disable_shortcuts)

_IGNORING = threading.local()
"""The number of blocks that ignore autocast, and that a thread is in."""


@contextmanager
def without_autocast() -> Iterator[None]:
    """Ignore a model's own autocast, so that it computes in its precision of 32 bits: the same but for rounding.

    In 16 bits, rounding would hide whether records mix.
    """
    before = getattr(_IGNORING, "blocks", 0)
    with _AUTOCAST_IGNORED:
        _IGNORING.blocks = before + 1
        try:
            yield
        finally:
            _IGNORING.blocks = before


def _ignore_autocast() -> Callable[[], object]:
    enter: Callable[[torch.autocast], Any] = torch.autocast.__enter__

    def enter_disabled(context: torch.autocast) -> Any:
        if not getattr(_IGNORING, "blocks", 0):  # another thread's, which trains in 16 bits
            return enter(context)
        is_enabled, context._enabled = context._enabled, False
        try:
            return enter(context)
        finally:
            context._enabled = is_enabled

    torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
    return lambda: setattr(torch.autocast, "__enter__", enter)


_AUTOCAST_IGNORED = ProcessSetting(_ignore_autocast)


def reporting_applied(is_recorded: Callable[[tuple[Any, ...]], bool]) -> ProcessSetting:
    """Hand `Function.apply` over to `__torch_function__`, like torch's own functions; PyTorch passes it by there.

    is_recorded: whether a call with these arguments is this thread's to record.
    """

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if is_recorded(args) and has_torch_function(args):
            return handle_torch_function(cls.apply, args, *args, **kwargs)
        return _APPLY.__func__(cls, *args, **kwargs)

    apply.__name__ = APPLIED

    def change() -> Callable[[], object]:
        Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
        return functools.partial(setattr, Function, "apply", _APPLY)

    return ProcessSetting(change)


# Taken from the dictionary: as an attribute, the class method would be bound to `Function`.
_APPLY = Function.__dict__["apply"]
APPLIED: str = _APPLY.__name__
"""The name of `Function.apply`, by which a rule knows it."""


@functools.cache
def with_visible_calls(func: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python function of PyTorch whose calls within are seen by a mode.

    As it is, it begins by asking `has_torch_function`, and hands itself over as a whole. The copy has the same code,
    but other globals, in which the answer is always no.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    around = func.__globals__ | dict.fromkeys(names, lambda *_: False)
    visible = FunctionType(func.__code__, around, func.__name__, func.__defaults__, func.__closure__)
    visible.__kwdefaults__ = func.__kwdefaults__
    return visible
