"""Write a trained model in other formats (ONNX, TorchScript, Hugging Face), or as a folder to publish.

Each format is loaded again by its own library, and its scores on synthetic records are compared with the model's. The
privacy section of a model card comes from the privacy card.
"""

import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from algorithms.encoders.texts import WORD_SEPARATOR
from algorithms.errors import ModelRefusedError, RefusedError
from algorithms.models.saved import TrainedModel, load, load_model
from algorithms.plain_text import for_markdown
from algorithms.privacy.card import load as load_card
from algorithms.privacy.card import load_beside, verify, verify_card
from algorithms.privacy.card.text import markdown, statement
from data.files import read_json
from data.preparation import preparation_of, target_in
from data.targets import Tags
from tasks.model_card import model_card
from tasks.prepare import encoder_of, encoder_of_model, loader_of
from tasks.runs.metrics_document import Metrics, read_metrics
from tasks.runs.store import EVALUATION, sha256_of

Form = Literal["onnx", "torchscript", "huggingface", "library"]
FORMS: tuple[Form, ...] = get_args(Form)
_REQUIRED_PACKAGES: Mapping[Form, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "huggingface": ("transformers",),
}
_TRACED: tuple[Form, ...] = ("onnx", "torchscript")  # their libraries can raise any exception
_RECORDS, _TOLERANCE = 5, 1e-4
NO_CARD = "No privacy card was beside the model, so nothing is promised."
RELEASE = ("model.safetensors", "privacy_card.json", "plan.json", "trace.parquet")
"""Files of a release, besides texts: the model, its signed card, and the files that the card has checksums of."""


def export(artifacts: Path, form: Form, to: Path, *, allow_code: Collection[str] = ()) -> float:
    """Write the model of a run in another format, and compare its scores with the model's.

    Args:
        artifacts: folder of the run, or of a release.
        form: onnx or torchscript writes a file. huggingface writes a folder with weights, configuration and model card.
            library, for models of transformers and timm, writes a folder that these read by themselves, with adapters
            merged.
        to: the file or folder to write; it must not exist.
        allow_code: code of the user's own that the model's file may name; as in `tasks.predict.predict`.

    Returns:
        The largest difference between a score of the written model and the original's, on synthetic records.

    Raises:
        RefusedError: if a library is missing or cannot trace the model, `to` exists, or the scores differ.
    """
    missing = [name for name in _REQUIRED_PACKAGES.get(form, ()) if find_spec(name) is None]
    if missing:
        extra = "models" if form == "huggingface" else "export"
        raise RefusedError(
            "{form} needs {libraries}: pip install 'epsilonflow[{extra}]'.",
            code="library_missing",
            form=form,
            libraries=", ".join(missing),
            extra=extra,
        )
    if to.exists():
        raise RefusedError(
            "{path} is there already; name another place, or move it away.", code="bad_output", path=to
        )
    model = load(artifacts, allow_code=allow_code)
    _quieten_transformers()
    inputs = synthetic_inputs(model)
    privacy = _privacy(_run_folder(artifacts))
    writers: Mapping[Form, Callable[[Path], Callable[[Tensor], Tensor]]] = {
        "onnx": partial(_onnx, model, inputs, privacy),
        "torchscript": partial(_torchscript, model, inputs, privacy),
        "huggingface": partial(_huggingface, model, artifacts=artifacts, allow_code=allow_code),
        "library": partial(_library, model, artifacts=artifacts),
    }
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as folder:
        fresh = Path(folder) / to.name
        # More records than it was traced with, since the batch size must be free.
        more = torch.cat([inputs, inputs.flip(0)])
        try:
            exported = writers[form](fresh)
            with torch.no_grad():
                difference = float((exported(more) - model(more)).abs().max())
        except Exception as error:
            if isinstance(error, RefusedError) or form not in _TRACED:
                raise
            why = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            raise RefusedError(
                "the model {model!r} cannot be written as {form} ({why}); export it to huggingface.",
                code="form_unfit",
                model=model.facts.model,
                form=form,
                why=why,
            ) from error
        if not difference <= _TOLERANCE:
            raise RefusedError(
                "the {form} form gives other scores than the model, by up to {difference:.2g}; use the model as it is.",
                code="scores_differ",
                form=form,
                difference=difference,
            )
        fresh.rename(to)
    return difference


def _quieten_transformers() -> None:
    """Hide the progress bars and warnings of transformers, if it is imported."""
    if "transformers" in sys.modules:
        logs: Any = import_module("transformers.utils.logging")
        logs.disable_progress_bar()
        logs.set_verbosity_error()


def synthetic_inputs(model: TrainedModel) -> Tensor:
    """Synthetic records: numbers in [0, 1], or tokens of texts of several lengths, [5, *input_shape]."""
    generator = torch.Generator().manual_seed(0)
    shape = (_RECORDS, *model.input_shape)
    tokens = model.facts.tokens
    if tokens is not None:
        texts, length = torch.randint(0, tokens, shape, generator=generator, dtype=torch.int32), shape[-1]
        for row in range(1, _RECORDS):  # with padding, since a model may skip its mask if there is none
            texts[row, length - row * length // (_RECORDS + 1) :] = model.facts.padding
        return texts
    return torch.rand(shape, generator=generator)


def _onnx(model: TrainedModel, inputs: Tensor, privacy: str, path: Path) -> Callable[[Tensor], Tensor]:
    from tasks.onnx_tables import complete, opset_of, table_of

    onnxruntime: Any = import_module("onnxruntime")
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    batch = {0: torch.export.Dim("batch", min=1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (inputs,),
            str(path),
            input_names=["records"],
            output_names=["scores"],
            dynamic_shapes=(batch,),
            dynamo=True,
            opset_version=opset_of(table_of(model)),
            external_data=False,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    complete(path, model, privacy)
    return lambda records: torch.from_numpy(session.run(["scores"], {"records": records.numpy()})[0])


def _torchscript(model: TrainedModel, inputs: Tensor, privacy: str, path: Path) -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the warning that torch.export is newer
        jit: Any = torch.jit  # without types
        facts = {"facts.json": json.dumps(model.facts.document()), "privacy.txt": privacy}
        jit.save(jit.trace(model, inputs, check_trace=False), path, _extra_files=facts)
        loaded: Callable[[Tensor], Tensor] = jit.load(path)
    return loaded


def _huggingface(
    model: TrainedModel, folder: Path, artifacts: Path, allow_code: Collection[str]
) -> Callable[[Tensor], Tensor]:
    """Write a folder that `AutoModel.from_pretrained(folder, trust_remote_code=True)` loads beside epsilonflow."""
    from tasks.hub import EpsilonflowConfig, EpsilonflowModel

    _quieten_transformers()
    folder.mkdir()
    # the model's facts, from which the network is rebuilt by name and settings
    config = EpsilonflowConfig(facts=json.dumps(model.facts.document()))
    names = model.classes or (("number",) if "bounds" in (model.target or {}) else ())
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: index for index, name in enumerate(names)}
    config.auto_map = {
        "AutoConfig": "modeling_epsilonflow.EpsilonflowConfig",
        "AutoModelForSequenceClassification": "modeling_epsilonflow.EpsilonflowModel",
        "AutoModel": "modeling_epsilonflow.EpsilonflowModel",
    }
    exported = EpsilonflowModel(config, allow_code)
    exported.network.load_state_dict(model.network.state_dict())
    _untie(exported.network)
    exported.save_pretrained(folder)
    (folder / "modeling_epsilonflow.py").write_text(
        '"""The classes of epsilonflow, which must be installed."""\n\n'
        "from tasks.hub import EpsilonflowConfig, EpsilonflowModel\n\n"
        '__all__ = ["EpsilonflowConfig", "EpsilonflowModel"]\n',
        encoding="utf-8",
    )
    _write_cards(model, folder, artifacts)
    loaded = EpsilonflowModel.from_pretrained(folder, allow_code=allow_code)
    return lambda records: loaded(records).logits


def _untie(network: nn.Module) -> None:
    """Untie shared parameters: transformers saves a shared parameter once, and reinitialises the other."""
    seen: set[int] = set()
    for layer in network.modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(layer, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            seen.add(id(parameter))


def _library(model: TrainedModel, folder: Path, artifacts: Path) -> Callable[[Tensor], Tensor]:
    """Write a folder that `from_pretrained` of transformers or `create_model` of timm reads without epsilonflow."""
    if model.facts.model not in ("huggingface", "timm") or model.facts.front:
        raise RefusedError(
            "the model {model!r} is of no library, or learned features come before it; export it to"
            " huggingface, onnx or torchscript.",
            code="form_unfit",
            model=model.facts.model,
        )
    if model.facts.temperature is not None:
        raise RefusedError(
            "the model's scores are divided by a temperature, which a model of the library alone does not do; export it"
            " to huggingface, onnx or torchscript.",
            code="form_unfit",
        )
    from algorithms.models.library_files import read_pretrained, save_pretrained

    module, parameters = load_model(_run_folder(artifacts) / "model.safetensors")
    save_pretrained(module, parameters, folder)
    _write_cards(model, folder, artifacts)
    _write_tokenizer(model, folder)
    return read_pretrained(module, folder, model.input_shape, model.facts.output_count)


def _write_cards(model: TrainedModel, folder: Path, artifacts: Path) -> None:
    """Write the run's privacy card and a model card; without the former, a page that says so."""
    beside, text = _run_folder(artifacts), f"{NO_CARD}\n"
    if (beside / "privacy_card.json").is_file():
        shutil.copyfile(beside / "privacy_card.json", folder / "privacy_card.json")
        text = model_card(load_card(beside / "privacy_card.json"), model, _metrics(beside))
    (folder / "README.md").write_text(text, encoding="utf-8")


def _privacy(folder: Path) -> str:
    """What a form without a card says of the model's privacy."""
    card = load_beside(folder)
    return NO_CARD if card is None else statement(card)


def _run_folder(artifacts: Path) -> Path:
    return artifacts if artifacts.is_dir() else artifacts.parent


def _metrics(folder: Path) -> Metrics:
    path = folder / "metrics.json"
    return read_metrics(path) if path.is_file() else {}


def release(artifacts: Path, to: Path, *, key: str | None, allow_code: Collection[str] = ()) -> list[str]:
    """Make a folder to publish: model, signed card, what the card has checksums of, its verifier, model card; no more.

    Args:
        artifacts: folder of the run.
        to: the folder to create; it must not exist.
        key: the owner's public key, which the model card states; verifiers should get it from the owner.
        allow_code: code of the user's own that the model's file may name; as in `tasks.predict.predict`.

    Returns:
        The names of its files.

    Raises:
        RefusedError: if a file is missing, `to` exists, or the card does not verify.
    """
    if to.exists():
        raise RefusedError(
            "{path} is there already; name another place, or move it away.", code="bad_output", path=to
        )
    missing = [name for name in RELEASE if not (artifacts / name).is_file()]
    if missing:
        raise RefusedError(
            "{path} is not there; train first by `epsilonflow run`.",
            code="missing_file",
            path=artifacts / missing[0],
        )
    card = load_card(artifacts / "privacy_card.json")
    verification = verify(card, artifacts, key=key)
    if not verification.passed:
        failed = verification.failures[0]
        raise RefusedError(
            "the card of this run does not hold ({check}: {detail}); run it again.",
            code="card_broken",
            check=failed.name,
            detail=failed.detail,
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as folder:
        fresh = Path(folder) / to.name
        fresh.mkdir()
        for name in (*RELEASE, *({EVALUATION} & card.evidence.files.keys())):
            shutil.copyfile(artifacts / name, fresh / name)
        model = load(artifacts, allow_code=allow_code)
        _quieten_transformers()
        text = (
            model_card(card, model, _metrics(artifacts)) + _how_to_use(key) + _add_library_files(model, fresh)
        )
        (fresh / "README.md").write_text(text, encoding="utf-8")
        (fresh / "PRIVACY.md").write_text(markdown(card), encoding="utf-8")
        shutil.copyfile(verify_card.__file__, fresh / "verify_card.py")
        sums = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(fresh.iterdir())]
        (fresh / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
        fresh.rename(to)
    return sorted(path.name for path in to.iterdir())


def _how_to_use(key: str | None) -> str:
    owner = f" The owner's public key is said to be `{key}`; have that confirmed by the owner." if key else ""
    return (
        "## Use\n\nWithout epsilonflow, by numpy, cryptography and dp-accounting alone:\n\n"
        "    python verify_card.py . --key KEY\n\n"
        f"With epsilonflow {version('epsilonflow')} installed:\n\n"
        "    epsilonflow card verify privacy_card.json --key KEY\n"
        f"    epsilonflow predict RECORDS --model .\n\n`PRIVACY.md` is the card in sentences.{owner}\n"
    )


def _add_library_files(model: TrainedModel, folder: Path) -> str:
    """For a model of Hugging Face: write the files that its library needs, compare the scores, and describe the use."""
    settings = model.facts.model_settings or {}
    is_of_transformers = model.facts.model == "huggingface" and settings.get("replace_batch_norm") is not True
    if not is_of_transformers or model.facts.front or model.facts.temperature is not None:
        return ""
    from algorithms.models.library_files import write_beside
    from algorithms.models.public_models import library_model

    module, parameters = load_model(folder / "model.safetensors")
    module.module.load_state_dict(parameters, strict=False)
    plan = read_json(folder / "plan.json")
    base = plan["model"].get("checkpoint") or plan["model"].get("settings", {}).get("checkpoint")
    read, inputs = write_beside(module, parameters, folder, model.facts, base), synthetic_inputs(model)
    with torch.no_grad():
        difference = float((read(inputs) - model(inputs)).abs().max())
    if not difference <= _TOLERANCE:
        raise RefusedError(
            "the library gives other scores than the model, by up to {difference:.2g}; export the model in another"
            " form.",
            code="scores_differ",
            difference=difference,
        )
    name = type(library_model(module)).__name__
    tokenizer = _write_tokenizer(model, folder)
    if "adapter" not in settings:
        return f"\nBy transformers alone: `{name}.from_pretrained(FOLDER)`, on prepared records.\n{tokenizer}"
    outputs = model.facts.output_count
    with_outputs = "" if model.predicts == "next token" else f" with `num_labels={outputs}`"
    return (
        f"\nBy PEFT alone: `PeftModel.from_pretrained(model, FOLDER)`, where `model` is the {name} of the public model"
        f" {for_markdown(str(base)) if base else 'that it was trained from'}{with_outputs}.\n{tokenizer}"
    )


def _write_tokenizer(model: TrainedModel, folder: Path) -> str:
    """Write the tokenizer that prepared the texts, if it is still on this machine, and describe how to load it.

    Raises RefusedError if the written tokenizer tokenizes a text differently.
    """
    preparation = preparation_of(model.preparation)
    name = "" if preparation is None else preparation.encoder_name
    if not name.startswith("tokenizer/"):
        return ""
    target = target_in(model.target)
    is_of_words = isinstance(target, Tags)
    how = f"truncation=True, padding='max_length', max_length={model.input_shape[-1]}"
    how += ", is_split_into_words=True" if is_of_words else ""
    try:
        chosen = encoder_of_model(preparation)
        write = None if chosen is None else encoder_of(chosen).write
    except ModelRefusedError:
        chosen = write = None
    if chosen is None or write is None:
        return f"\nTexts become tokens by the public tokenizer {for_markdown(name)}, which was not here to be added.\n"
    write(folder, is_of_words)
    tokenize = import_module("transformers").AutoTokenizer.from_pretrained(
        str(folder), trust_remote_code=False
    )
    encode = loader_of(chosen, target)()
    for words in (["a", "made-up", "Text,", "ä"], [*"0123456789"] * 30):
        text: Any = words if is_of_words else " ".join(words)
        tokens_of_library = tokenize(
            text,
            truncation=True,
            padding="max_length",
            max_length=model.input_shape[-1],
            is_split_into_words=is_of_words,
        )
        ours = encode([WORD_SEPARATOR.join(words)])[0, 0] if is_of_words else encode([text])[0]
        if tokens_of_library["input_ids"] != ours.tolist():
            raise RefusedError(
                "the tokenizer {name} reads a text otherwise once it is saved; export the model in another"
                " form.",
                code="scores_differ",
                name=name,
            )
    return f"\nTexts become tokens by `AutoTokenizer.from_pretrained(FOLDER)(texts, {how})`.\n"
