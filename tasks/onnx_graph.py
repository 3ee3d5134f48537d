"""Nodes of an ONNX graph that prepare columns of a table."""

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

# Of the extra `export`.
onnx: Any = import_module("onnx")
helper: Any = import_module("onnx.helper")
TensorProto = onnx.TensorProto
ML = "ai.onnx.ml"
_WHOLE_NUMBER = re.compile("[+-]?[0-9]+")


class Graph:
    """Nodes of a graph, each of which gets a name of its own."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._count = prefix, 0
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output; returns the output's name."""
        self._count += 1
        name = f"{self._prefix}/{self._count}/{op}"
        self.nodes.append(helper.make_node(op, [*inputs], [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.float64) -> str:
        """An array that belongs to the graph."""
        name = f"{self._prefix}/constant/{len(self.initializers)}"
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def split(self, texts: str, delimiter: str, count: int) -> list[str]:
        """The first `count` pieces of each text, empty where it has fewer; an empty delimiter is white space."""
        padding = self.constant([(delimiter or " ").join(["0"] * count)], object)
        padded = self.add("Concat", padding, texts, axis=0)
        name = self.add("StringSplit", padded, delimiter=delimiter, maxsplit=count - 1)
        self.nodes[-1].output.append(f"{name}/count")
        pieces = [self.add("Gather", name, self.constant(index, np.int64), axis=1) for index in range(count)]
        ends = self.constant([1], np.int64), self.constant([2**62], np.int64)
        return [self.add("Slice", piece, *ends) for piece in pieces]

    def column(self, value: str) -> str:
        """[n] as [n, 1]."""
        return self.add("Unsqueeze", value, self.constant([1], np.int64))

    def concatenate(self, parts: Sequence[str]) -> str:
        """Parts [n, k] side by side, [n, all of them]."""
        return parts[0] if len(parts) == 1 else self.add("Concat", *parts, axis=1)

    def indices(self, text: str, names: Sequence[str]) -> str:
        """The index of each text in the names, their number for any other; int64 [n]."""
        spellings = {
            spelling: index for index, name in enumerate(names) for spelling in _spellings(name, names)
        }
        return self.add(
            "LabelEncoder",
            text,
            domain=ML,
            keys_strings=[*spellings],
            values_int64s=[*spellings.values()],
            default_int64=len(names),
        )

    def one_hot(self, indices: str, width: int) -> str:
        """Doubles [n, width], zero where the index is beyond them."""
        same = self.add("Equal", self.column(indices), self.constant([np.arange(width)], np.int64))
        return self.add("Cast", same, to=TensorProto.DOUBLE)

    def bins(self, number: str, edges: Sequence[float]) -> str:
        """The number of edges that are at most each number, [n, 1]."""
        reached = self.add("GreaterOrEqual", self.column(number), self.constant([edges]))
        ones = self.add("Cast", reached, to=TensorProto.DOUBLE)
        return self.add("ReduceSum", ones, self.constant([1], np.int64), keepdims=1)

    def share(self, number: str, low: float, high: float) -> str:
        """The number clamped to its bounds as a share of them, [n, 1]; NaN stays NaN."""
        inside = self.add(
            "Min", self.add("Max", self.column(number), self.constant(low)), self.constant(high)
        )
        # Some kernels take a bound for NaN.
        moved = self.add("Sub", self.keep_nan(inside, self.column(number)), self.constant(low))
        return self.add("Div", moved, self.constant(high - low))

    def keep_nan(self, value: str, number: str) -> str:
        """A value, NaN where the number is."""
        return self.add("Where", self.add("IsNaN", number), self.constant(np.nan), value)

    def logarithmic(self, share: str, span: float) -> str:
        """log(1 + x span) / log(1 + span) of shares, at most 1."""
        grown = self.add("Add", self.add("Mul", share, self.constant(span)), self.constant(1.0))
        scaled = self.add("Div", self.add("Log", grown), self.constant(np.log1p(span)))
        return self.keep_nan(self.add("Min", scaled, self.constant(1.0)), share)


def _spellings(name: str, names: Sequence[str]) -> list[str]:
    forms = [name]
    if {name.lower() for name in names} <= {"true", "false"}:
        forms = [name.lower(), name.lower().capitalize(), name.upper()]
    elif all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        forms = [name, f"{name}.0"]
    return [spelling for form in forms for spelling in (form, f" {form}", f"{form} ", f" {form} ")]
