"""Counts what makes the code hard to read: `python -m benchmarks.code_figures [CHECKOUT ...] [--names]`.

A column has the figures of one checkout, by default this one; for a comparison with an earlier commit check it out
beside this one by `git worktree add`. `--names` lists the functions that are counted, to be looked at one by one.

The product is the Python code in `PRODUCT`. Docstrings are counted in its lines. The code lines of a function are those
without docstrings, comments and blank lines. `benchmarks.gradient_stack` traces the hops, except
where the barrier is missing or has other arguments.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PRODUCT = ("epsilonflow", "flows", "tasks", "algorithms", "data")
LONG, MANY_PARAMETERS = 60, 9
_PARTICIPLE = re.compile(
    r"(?!(embed|feed|need|proceed|seed|shed|speed)$)[a-z]+ed|begun|built|chosen|done|drawn|driven|felt|found|given|gone"
    r"|grown|held|hidden|kept|known|laid|led|lent|made|meant|met|paid|said|seen|sent|shown|sold|spent|spoken|taken|taught"
    r"|thought|thrown|told|understood|worn|written"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """The source of a file."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def comments(self) -> frozenset[int]:
        """The lines with a comment for people."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return frozenset(
            token.start[0]
            for token in tokens
            if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:)", token.string)
        )

    @cached_property
    def docstrings(self) -> frozenset[int]:
        """The lines of docstrings, those of attributes included."""
        bodies = [
            node.body
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Module | ast.ClassDef | Function)
        ]
        return frozenset(
            line
            for body in bodies
            for node in body
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        )

    @cached_property
    def code(self) -> frozenset[int]:
        """The lines that are neither docstrings, comments of their own nor blank."""
        lines = enumerate(self.text.splitlines(), start=1)
        code = (number for number, line in lines if line.strip() and not line.lstrip().startswith("#"))
        return frozenset(code) - self.docstrings

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    def code_lines(self, function: Function) -> int:
        """How many lines of code a function has."""
        lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
        return len(self.code.intersection(lines))


def parameters(function: Function) -> int:
    """How many parameters a function has, without `self` and `cls`."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_participle(function: Function) -> bool:
    """Whether a name is a past participle alone, as `_counted`, which says neither what is done nor what comes back."""
    return _PARTICIPLE.fullmatch(function.name.strip("_")) is not None


def untyped_mappings(module: Module) -> int:
    """How many places say `dict[str, Any]` or `Mapping[str, Any]`."""
    return sum(
        re.fullmatch(r"(dict|Mapping|MutableMapping)\[str, Any\]", ast.unparse(node)) is not None
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Subscript)
    )


def imports_of_tests(module: Module) -> int:
    """How many imports of a test module take something from another one."""
    return sum(
        isinstance(node, ast.ImportFrom)
        and any(
            part.startswith("test_")
            for part in (*(node.module or "").split("."), *(n.name for n in node.names))
        )
        for node in ast.walk(module.tree)
    )


def private_patches(module: Module) -> int:
    """How many calls of a test replace a private name, as `monkeypatch.setattr(module, "_name", ...)`."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("setattr", "delattr", "patch", "object")
        and any(
            isinstance(each, ast.Constant)
            and isinstance(each.value, str)
            and re.search(r"(^|\.)_(?!_)\w+$", each.value) is not None
            for each in node.args[:2]
        )
        for node in ast.walk(module.tree)
    )


def modules_in(root: Path, folders: Sequence[str]) -> list[Module]:
    """The Python files of some folders, in their order."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [Module(path.relative_to(root), path.read_text(encoding="utf-8")) for path in paths]


def packages(modules: Sequence[Module]) -> dict[str, str]:
    """Lines and files by package: by its folder, below which others are rows of their own."""
    lines, files = Counter[str](), Counter[str]()
    for module in modules:
        folder = module.path.parent.as_posix()
        lines[folder] += len(module.text.splitlines())
        files[folder] += 1
    return {folder: f"{lines[folder]:,} in {files[folder]}" for folder in sorted(lines)}


def functions_where(modules: Sequence[Module], holds: Callable[[Module, Function], bool]) -> list[str]:
    """The functions for which a condition holds, as file:line name."""
    return [
        f"{module.path}:{each.lineno} {each.name}"
        for module in modules
        for each in module.functions
        if holds(module, each)
    ]


def hard_functions(modules: Sequence[Module]) -> dict[str, list[str]]:
    """The functions that are hard to read, by what is wrong with them."""
    return {
        f"functions over {LONG} code lines": functions_where(
            modules, lambda module, each: module.code_lines(each) > LONG
        ),
        f"functions with over {MANY_PARAMETERS} parameters": functions_where(
            modules, lambda _, each: parameters(each) > MANY_PARAMETERS
        ),
        "functions named by a bare participle": functions_where(modules, lambda _, each: is_participle(each)),
    }


def figures(root: Path) -> dict[str, str]:
    """The figures of a checkout but for its packages and hops, by what they count."""
    product, tests = modules_in(root, PRODUCT), modules_in(root, ["tests"])
    lines = sum(len(module.text.splitlines()) for module in product)
    sizes = sorted(module.code_lines(each) for module in product for each in module.functions)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    return {
        "product lines": f"{lines:,}",
        "test lines": f"{sum(len(module.text.splitlines()) for module in tests):,}",
        "functions": f"{len(sizes):,}",
        "code lines of a function, median / 90 % / most": " / ".join(
            str(sizes[min(len(sizes) - 1, len(sizes) * part // 100)]) for part in (50, 90, 100)
        ),
        **{what: str(len(names)) for what, names in hard_functions(product).items()},
        "places of dict[str, Any] and Mapping[str, Any]": str(sum(map(untyped_mappings, product))),
        "lines with a comment": f"{sum(len(module.comments) for module in product) / lines:.1%}",
        "lines of docstrings": f"{sum(len(module.docstrings) for module in product) / lines:.1%}",
        "changelog": f"{len(changelog.encode()) / 1000:.1f} kB, {len(re.findall(r'^- ', changelog, re.M))} entries",
        "imports between test modules": str(sum(map(imports_of_tests, tests))),
        "private names that tests patch": str(sum(map(private_patches, tests))),
    }


def stack_depths(root: Path) -> dict[str, str]:
    """How many functions and files lead from `Barrier.gradient` to its innermost matrix product, by kind of pass."""
    if not (root / "algorithms").is_dir():  # else those of an installed one would be traced
        return {}
    environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
    script = [sys.executable, "-P", str(Path(__file__).with_name("gradient_stack.py"))]
    traced = subprocess.run(script, cwd=root, env=environment, capture_output=True, text=True)
    stacks = json.loads(traced.stdout) if traced.returncode == 0 else {}
    return {
        f"hops to a product, {kind} pass": f"{len(stack)} functions in {len({file for file, _ in stack})} files"
        for kind, stack in stacks.items()
    }


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A Markdown table with a row for each figure that some column has."""
    rows = dict.fromkeys(what for column in columns.values() for what in column)
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[what, *(column.get(what, "") for column in columns.values())] for what in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(arguments: list[str]) -> None:
    """Print the figures of some checkouts side by side, then lines and files by package."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.code_figures", description="Figures of the code."
    )
    parser.add_argument(
        "checkouts", nargs="*", type=Path, default=[Path.cwd()], help="folders; here by default"
    )
    parser.add_argument("--names", action="store_true", help="also list the functions that are counted")
    settings = parser.parse_args(arguments)
    roots: dict[str, Path] = {str(root): root for root in settings.checkouts}
    columns = {title: figures(root) | stack_depths(root) for title, root in roots.items()}
    sys.stdout.write(table(columns) + "\n")
    sys.stdout.write(table({title: packages(modules_in(root, PRODUCT)) for title, root in roots.items()}))
    for title, root in roots.items() if settings.names else ():
        for what, functions in hard_functions(modules_in(root, PRODUCT)).items():
            sys.stdout.write(f"\n{title}, {what}:\n" + "".join(f"  {each}\n" for each in functions))


if __name__ == "__main__":
    main(sys.argv[1:])
