"""A hook of MkDocs that generates the reference pages from the code when the site is built.

So they cannot disagree with the code: keys, types, defaults and ranges come from the models that check them, commands
from the command line itself, and data sets from their cards.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import TypeAdapter

_RANGE = {
    "exclusiveMinimum": "> {}",
    "minimum": ">= {}",
    "exclusiveMaximum": "< {}",
    "maximum": "<= {}",
    "minLength": "not empty",
    "minItems": "at least {} of them",
    "pattern": "`{}`",
}


_VERIFIER = Path(__file__).parents[1] / "algorithms/privacy/card/verify_card.py"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the verifier of cards, to those in the folder."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    files.append(File.generated(config, "reference/verify_card.py", abs_src_path=str(_VERIFIER.resolve())))
    return files


def params() -> str:
    """Every key of params.yaml, and what it does, by the docstrings of the classes that check them."""
    from algorithms.features import FEATURES
    from algorithms.methods import CATALOGUE
    from algorithms.methods.dp_sgd import DPSGD
    from algorithms.models import CATALOGUE as NETWORKS
    from tasks.config.params import MODELS, OPTIONAL

    text = [
        "# params.yaml",
        "`params.yaml` holds the settings of a run. Unknown keys and impossible values are refused, with their path."
        " `performance`, `tracking` and `ledger` do not change the result. `epsilonflow run --set"
        " KEY=VALUE` sets a key.",
    ]
    for group, model in MODELS.items():
        optional = " (optional)" if group in OPTIONAL else ""
        schema = TypeAdapter(model).json_schema()
        text += [f"## {group}{optional}", *_section(model, group), *_inside(schema, group)]
    text += ["## algorithm", "`algorithm.name` is one of these, or your own `package.module:factory`."]
    parts: dict[str, None] = {}
    for name, method in CATALOGUE.items():
        schema = TypeAdapter(method).json_schema()
        text += [f"### {name}", f"In Python: `{method.__name__}`.", _doc(inspect.getmodule(method))]
        text += _section(method, "algorithm", others=DPSGD)
        parts |= dict.fromkeys(_inside(schema, "algorithm"))
    text += parts  # once for all methods that have them
    text += [
        "## features (optional)",
        "`features.name` is `none`, one of these, or `package.module:factory`.",
    ]
    for name, kind in FEATURES.items():
        text += [f"### {name}", *_section(kind, "features")]
    text += ["## model.settings", "The settings of each model, under its `model.name`."]
    for name, architecture in NETWORKS.items():
        schema = TypeAdapter(architecture.settings).json_schema()
        if schema.get("properties"):
            text += [f"### {name}", *_section(architecture.settings, "model.settings")]
            text += _inside(schema, "model.settings")
    plain = [
        name
        for name, one in NETWORKS.items()
        if not TypeAdapter(one.settings).json_schema().get("properties")
    ]
    text += [f"Models without settings: {', '.join(f'`{name}`' for name in plain)}."]
    return "\n\n".join(text)


def data_card() -> str:
    """Every key of a data card."""
    from data.card import Cap, DataCard, DeclaredComposition, File, Person, RecordCounts, SplitRule
    from data.cells import CellSettings
    from data.deployment import Deployment
    from data.formats import (
        Binned,
        Categorical,
        Cifar,
        Csv,
        Datasets,
        Date,
        Digits,
        Folder,
        Hashed,
        Idx,
        Ignored,
        Images,
        ImageTable,
        Label,
        Numeric,
        Own,
        Parquet,
        Query,
        Reviews,
        SkipLines,
        Synthetic,
        Texts,
        Timestamp,
        Tokens,
    )
    from data.targets import Count, Labels, NextToken, Number, Quantile, Tags

    text = [
        "# The data card",
        "A YAML file in `data/cards`, named after the data set. It declares everything that is public about the data;"
        " nothing in it is computed from the rows. See [how to write one](../how-to/data-card.md).",
        *_section(DataCard, ""),
    ]
    parts: Mapping[str, Iterable[Any]] = {
        "Parts": (File, RecordCounts, Cap, SplitRule, DeclaredComposition, Person, Deployment),
        "Targets (`target`, instead of `classes`)": (Number, Count, Quantile, Labels, NextToken, Tags),
        "Readers (`reader.kind`)": (
            Csv,
            Parquet,
            Datasets,
            Images,
            ImageTable,
            Texts,
            Tokens,
            Own,
            Idx,
            Cifar,
            Reviews,
            Digits,
            Synthetic,
            CellSettings,
            SkipLines,
        ),
        "Columns of a table (`kind`)": (
            Numeric,
            Binned,
            Categorical,
            Hashed,
            Timestamp,
            Date,
            Label,
            Ignored,
        ),
        "Blocks (`blocks.kind`)": (Folder, Query),
    }
    for title, models in parts.items():
        text.append(f"## {title}")
        for model in models:
            text += [f"### {model.__name__}", *_section(model, "")]
    return "\n\n".join(text)


def privacy_card() -> str:
    """Every field of a privacy card."""
    from algorithms.privacy.card.schema import PrivacyCard

    schema = TypeAdapter(PrivacyCard).json_schema()
    text = [
        "# The privacy card",
        "`artifacts/privacy_card.json` holds the facts of a run, typed and signed. `epsilonflow card show` prints it"
        " as text and `epsilonflow card verify` checks it. See [the guarantee](../explanation/guarantee.md).",
        _doc(PrivacyCard),
        _table(schema, ""),
    ]
    for name, part in sorted(schema.get("$defs", {}).items()):
        if part.get("properties"):
            text += [
                f"## {name}",
                _clean(part.get("description", "")),
                _table({**part, "$defs": schema["$defs"]}, ""),
            ]
    return "\n\n".join(text)


def commands() -> str:
    """Every command with its arguments and options."""
    from flows.cli.main import app

    root = typer.main.get_command(app)
    text = ["# The command line", "`epsilonflow --install-completion` completes commands in your shell."]
    text += [part for path, command in _commands(root, ("epsilonflow",)) for part in _command(path, command)]
    return "\n\n".join(text)


def _commands(command: Any, path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield path, command
        return
    for name, each in inner.items():
        yield from _commands(each, (*path, name))


def _command(path: tuple[str, ...], command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        names = " ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        is_argument = parameter.param_type_name == "argument"
        names = f"`{parameter.name.upper()}`" if is_argument else names
        default = parameter.default if isinstance(parameter.default, str | int | float | Path) else None
        shown = "required" if parameter.required else "" if default in (None, False) else f"`{default}`"
        words = getattr(parameter, "show_default", None)
        rows.append((names, words if isinstance(words, str) else shown, getattr(parameter, "help", "") or ""))
    text = [f"## {' '.join(path)}", _clean(command.help or "")]
    return [*text, _rows(("name", "default", "meaning"), rows)] if rows else text


def datasets() -> str:
    """The shipped data sets, from their cards."""
    from data.card import card_names, data_card

    rows = []
    for name in card_names():
        card = data_card(name)
        records = card.records
        count = "private" if records.train is None else f"{records.train:,} + {records.test:,}"
        shape = " x ".join(map(str, card.input_shape))
        rows.append(
            (f"`{name}`", card.title, count, shape, str(len(card.classes) or "a number"), card.licence)
        )
    heads = ("name", "what", "training + test records", "features", "classes", "licence")
    return "\n\n".join(
        [
            "# Data sets",
            "Each has a card in `data/cards`. Files are downloaded and checked by their checksum;"
            " `EPSILONFLOW_DATA_MIRROR` names a folder that is tried before the network.",
            _rows(heads, rows),
        ]
    )


def api() -> str:
    """The Python interface, which mkdocstrings fills in."""
    parts = {
        "Training": ("algorithms.fitting.fit", "algorithms.fitting.Fitted", "algorithms.fitting.Step"),
        "Models with BatchNorm": ("algorithms.models.batch_norm.replace_batch_norm",),
        "Using a model": ("algorithms.models.saved.load", "algorithms.models.saved.TrainedModel"),
        "Predicting on files": ("tasks.predict.predict", "tasks.predict.Predictions"),
        "Estimators for scikit-learn": (
            "epsilonflow.sklearn.DPClassifier",
            "epsilonflow.sklearn.DPRegressor",
        ),
        "Exports": ("tasks.export.export", "tasks.export.release"),
        "Privacy cards": ("algorithms.privacy.card.load", "algorithms.privacy.card.verify"),
        "The ledger": ("algorithms.privacy.ledger.Ledger",),
    }
    text = [
        "# Python",
        "`from epsilonflow import fit, load`, and each method by its class name, such as `DPSGD`."
        " [params.yaml](params.md#algorithm) has the methods with their settings, and as `algorithm.update` those of"
        " `OptimizerConfig`.",
    ]
    for title, names in parts.items():
        text.append(f"## {title}")
        text += [f"::: {name}\n    options:\n      heading_level: 3" for name in names]
    return "\n\n".join(text)


def decisions() -> str:
    """The decisions by their titles."""
    pages = sorted((Path(__file__).parent / "decisions").glob("*.md"))
    titles = [page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in pages]
    rows = [f"- [{title}](../decisions/{page.name})" for page, title in zip(pages, titles, strict=True)]
    return "\n".join(["# Decisions", "", *rows])


def environment() -> str:
    """The environment variables, each with its meaning."""
    rows = [
        (
            "EPSILONFLOW_HOME",
            "folder of the ledger, the owner's key and the runs; by default the user's data folder",
        ),
        ("EPSILONFLOW_LEDGER_URL", "URL of the ledger; PostgreSQL for several machines"),
        ("EPSILONFLOW_DATA_MIRROR", "folder that is tried for data files before the network"),
        (
            "EPSILONFLOW_SPEND_AGAIN",
            "`yes`: repeat a finished run on private records, and charge it again, without asking",
        ),
        ("EPSILONFLOW_TRAIN_ANYWAY", "`yes`: train with settings that look wrong, without asking"),
        ("EPSILONFLOW_RETRAINING", "set by a scheduled retraining: the retraining that a run belongs to"),
        ("EPSILONFLOW_PROCESS", "set by the first of several processes: the number of this process"),
        (
            "EPSILONFLOW_PLAN_AHEAD",
            "set by a command for its stages: the file with the plan by which it has looked ahead",
        ),
        ("PREFECT_API_URL", "a Prefect server, which then shows the runs"),
    ]
    return "# Environment\n\n" + _rows(("variable", "meaning"), [(f"`{name}`", text) for name, text in rows])


PAGES: Mapping[str, Callable[[], str]] = {
    "params": params,
    "data-card": data_card,
    "privacy-card": privacy_card,
    "command-line": commands,
    "datasets": datasets,
    "environment": environment,
    "decisions": decisions,
    "api": api,
}


def describe_keys(text: str, keys: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its prose and what it says of each key, as in "steps: updates. rate, period: how fast.".

    Such a list begins a paragraph. A colon after a key within a sentence is prose.

    Example:
        >>> describe_keys("A method.\\n\\nsteps: updates. rate: how fast", ["steps", "rate"])
        ('A method.', {'steps': 'updates', 'rate': 'how fast'})
    """
    one = "|".join(sorted(map(re.escape, keys), key=len, reverse=True)) or "(?!)"
    head = re.compile(rf"(?:(?<=[.;]\s)|^)((?:{one})(?:,\s(?:{one}))*):\s+")
    prose, meanings = [], dict[str, str]()
    for paragraph in text.split("\n\n"):
        if not head.match(paragraph):
            prose.append(paragraph)
            continue
        _, *parts = head.split(_OTHERS.sub("", paragraph))
        for names, meaning in zip(parts[::2], parts[1::2], strict=True):
            meanings |= dict.fromkeys(re.split(r",\s", names), " ".join(meaning.split()).rstrip(".;"))
    return "\n\n".join(prose), meanings


_OTHERS = re.compile(r"\s*The\s+other\s+settings\s+are\s[^.]*\.")


def _section(kind: type[Any], prefix: str, *, others: type[Any] | None = None) -> list[str]:
    """The prose of a class, and a table of its keys. others: the class that describes keys which `kind` does not."""
    schema = TypeAdapter(kind).json_schema()
    keys, described = schema.get("properties", {}), dict[str, str]()
    for one in (*reversed((others or object).__mro__), *reversed(kind.__mro__)):
        known = {name for base in one.__mro__ for name in inspect.get_annotations(base)}
        described |= describe_keys(inspect.cleandoc(one.__dict__.get("__doc__") or ""), {*keys, *known})[1]
    prose, _ = describe_keys((inspect.getdoc(kind) or "").partition("\n\nExample:")[0], keys)
    return [_clean(prose), _table(schema, prefix, described)]


def _table(
    schema: Mapping[str, Any], prefix: str, described: Mapping[str, str] = MappingProxyType({})
) -> str:
    """One row per key: what it does, its type, default and range."""
    known, required = schema.get("$defs", {}), schema.get("required", ())
    rows = []
    for name, part in schema.get("properties", {}).items():
        default = part.get("default", "")
        shown = (
            "required"
            if name in required
            else f"`{'null' if default is None else default}`"
            if default != ""
            else _EMPTY.get(part.get("type", ""), "its own defaults")
        )
        key = f"{prefix}.{name}" if prefix else name
        does = (_clean(described.get(name, "")),) if described else ()
        rows.append((f"`{key}`", *does, _type(part, known), shown, _limits(part, known)))
    heads = ("key", *(("what it does",) if described else ()), "type", "default", "range")
    return _rows(heads, rows) if rows else "It has no keys."


def _inside(schema: Mapping[str, Any], prefix: str) -> list[str]:
    """A section for each key that has keys of its own."""
    text, known = [], schema.get("$defs", {})
    for name, part in schema.get("properties", {}).items():
        for one in (part, *part.get("anyOf", ()), *part.get("oneOf", ())):
            inner = known.get(str(one.get("$ref", "")).rsplit("/", 1)[-1], {})
            if inner.get("properties"):
                whole, key = {**inner, "$defs": known}, f"{prefix}.{name}"
                words, described = describe_keys(inner.get("description", ""), inner["properties"])
                table = _table(whole, key, described)
                text += ["\n\n".join((f"### {key}", _clean(words), table)), *_inside(whole, key)]
    return text


_EMPTY = {"array": "`[]`", "object": "`{}`"}


def _type(part: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    if "$ref" in part:
        name = part["$ref"].rsplit("/", 1)[-1]
        return " or ".join(f"`{one}`" for one in known[name]["enum"]) if "enum" in known[name] else name
    for many in ("anyOf", "oneOf"):
        if many in part:
            return " or ".join(dict.fromkeys(_type(one, known) for one in part[many]))
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return " or ".join(f"`{one}`" for one in part["enum"])
    if part.get("type") == "array" and isinstance(part.get("items"), Mapping):
        return f"list of {_type(part['items'], known)}"
    return str(part.get("type", "any"))


def _limits(part: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    found = [text.format(part[key]) for key, text in _RANGE.items() if key in part]
    for many in ("anyOf", "oneOf"):
        found += [limits for one in part.get(many, ()) if (limits := _limits(one, known))]
    return ", ".join(dict.fromkeys(found))


def _rows(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = tuple(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines)


def _doc(thing: Any) -> str:
    return _clean((inspect.getdoc(thing) or "").partition("\n\nExample:")[0])


def _clean(text: str) -> str:
    """Escape plain text with code in backticks, so that Markdown reads no tags, links or emphasis in the rest."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        for mark, plain in {"<": "&lt;", "[": "\\[", "*": "\\*", "_": "\\_"}.items():
            parts[place] = parts[place].replace(mark, plain)
    return "`".join(parts)


__all__ = ["PAGES", "on_files"]
