"""Labels, next tokens and tags as targets: from a data card to a card, a page and predictions."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import f1_score, roc_auc_score

from algorithms.errors import ModelRefusedError
from algorithms.models import build
from algorithms.models.libraries import imported_library
from algorithms.models.saved import adapt
from algorithms.models.saved import load as load_model
from data.card import DataCard, DataRefusedError
from data.prepared import load as load_prepared
from data.targets import Labels, Tags
from tasks import evaluate
from tasks.export import export, release
from tasks.predict import predict, write
from tasks.runs.metrics import headline_metric, metric_rows, report_text
from tasks.runs.summary import run_summary
from tests.support.cards import csv_of, label, number
from tests.support.metrics import metrics_of
from tests.support.own_records import CARD, finish
from tests.support.own_records import declared as declared
from tests.support.public_texts import WORDS, publish
from tests.support.refusals import contradicting, refused_as
from tests.support.soak import soak_but
from tests.support.workspace import Workspace

__all__ = ["declared"]

Declare = Callable[..., None]
LABELS = {"labels": ["cheap", "fresh"]}


def page_of(workspace: Workspace) -> str:
    return (workspace.root / "artifacts/report.html").read_text()


def test_a_table_of_several_labels_goes_from_its_card_to_a_column_for_each(
    workspace: Workspace, declared: Declare
) -> None:
    draw = np.random.default_rng(0)
    price, age = draw.random(300).round(3), draw.random(300).round(3)
    rows = [f"{p},{a},{int(p < 0.5)},{'true' if a < 0.3 else ''}" for p, a in zip(price, age, strict=True)]
    rows[0] = f"{price[0]},{age[0]},no idea,"
    (workspace.root / "fruit.csv").write_text("\n".join(["price,age,cheap,fresh", *rows]) + "\n")
    reader = csv_of(number("price", 0, 1), number("age", 0, 1), label("fresh"), label("cheap"))
    declared("fruit.csv", model={"name": "linear"}, classes=[], target=LABELS, reader=reader)
    data = load_prepared(workspace.root / "datasets/prepared")
    features = np.concatenate([data.train_features, data.test_features])
    labels = np.concatenate([data.train_labels, data.test_labels])
    assert labels.dtype == np.float32 and labels.shape == (300, 2)
    first = (features == np.array([price[0], age[0]], np.float32)).all(axis=1)
    assert labels[first].tolist() == [[0.0, 0.0]]
    assert (labels[~first, 0] == (features[~first, 0] < 0.5)).all()
    assert (labels[~first, 1] == (features[~first, 1] < 0.3)).all()

    finish(workspace)
    model = load_model(workspace.root / "artifacts/model.safetensors")
    said = list(predict(model, workspace.root / "fruit.csv"))
    told = io.StringIO()
    assert list(write(said, model.classes, told)) == [300]
    first_row = next(csv.DictReader(io.StringIO(told.getvalue())))
    assert list(first_row) == ["record", "predicted", "probability of cheap", "probability of fresh"]
    one = model(torch.tensor([[price[0], age[0]]], dtype=torch.float32)).sigmoid()[0].tolist()
    assert [float(first_row[f"probability of {name}"]) for name in model.classes] == pytest.approx(
        one, rel=1e-4
    )
    assert first_row["predicted"] == ";".join(n for n, p in zip(model.classes, one, strict=True) if p > 0.5)

    found = metrics_of(workspace)
    with torch.no_grad():
        scores = model(torch.from_numpy(np.array(data.test_features))).numpy()
    real = np.array(data.test_labels)
    assert found["test_micro_f1"] == f1_score(real, scores > 0, average="micro")
    assert found["test_macro_f1"] == f1_score(real, scores > 0, average="macro")
    assert found["auc"]["fresh"] == pytest.approx(roc_auc_score(real[:, 1], scores[:, 1]))
    assert found["test_subset_accuracy"] == (real == (scores > 0)).all(axis=1).mean()
    loss = np.log1p(np.exp(-(2 * real - 1) * scores)).mean()
    assert found["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert "F1 over all labels" in page_of(workspace) and "right answers" not in page_of(workspace)
    assert dict(run_summary(workspace.root))["AUC averaged over labels"] == f"{found['test_auc']:.3f}"


def test_images_in_a_table_may_have_several_labels(workspace: Workspace, declared: Declare) -> None:
    rows = ["path,cheap,fresh"]
    for place in range(40):
        shade = place + 200 * (place % 2)
        folder = workspace.root / "photos"
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), shade, np.uint8)).save(folder / f"{place}.png")
        rows.append(f"{place}.png,{place % 2},0")
    (workspace.root / "photos.csv").write_text("\n".join(rows))
    reader = {
        "kind": "image_table",
        "mode": "L",
        "format": "csv",
        "image": "path",
        "label": ["cheap", "fresh"],
    }
    paths = {"train": "photos.csv", "images": "photos"}
    files = {role: {"path": path, "keyed_sha256": "0" * 64} for role, path in paths.items()}
    known = {"classes": [], "target": LABELS, "reader": reader, "shape": [1, 8, 8]}
    declared("photos.csv", None, {"name": "linear"}, files=files, **known)
    finish(workspace)
    assert metrics_of(workspace)["auc"]["fresh"] is None  # no image has it
    (said,) = predict(load_model(workspace.root / "artifacts/model.safetensors"), workspace.root / "photos")
    assert set(said.predicted) <= {"", "cheap", "fresh", "cheap;fresh"}


def test_metrics_of_labels_know_the_best_answer_that_is_always_the_same() -> None:
    known = Labels(labels=("a", "b", "c"))
    real = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0]], np.float32)
    scores = np.full(real.shape, 0.5)
    found = evaluate.compute_metrics(
        known, evaluate.EvaluationResult(np.ones_like(real, np.int64), 0.7, scores), real
    )
    assert found["constant_micro_f1"] == pytest.approx(2 * 5 / (8 + 5))  # a and b for each record
    assert found["constant_subset_accuracy"] == 0.5
    assert found["auc"] == {"a": 0.5, "b": 0.5, "c": None} and found["test_auc"] == 0.5
    drawn = evaluate.figure_pairs(known, evaluate.EvaluationResult(real.astype(np.int64), 0.0, scores), real)
    assert (
        sorted(zip(drawn.real, drawn.predicted, strict=True))
        == [(0, 0)] * 3 + [(0, 1), (1, 0)] + [(1, 1)] * 2
    )


def test_the_loss_of_labels_is_their_mean_also_over_views_of_an_image() -> None:
    made = build("tanh_cnn", input_shape=(1, 28, 28), classes=2, seed=0, predicts="labels")
    assert (made.label_shape, made.label_dtype) == ((2,), torch.float32)
    outputs, labels = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0]])
    expected = (np.log(2.0) + np.log1p(np.exp(2.0))) / 2
    assert made.losses(outputs, labels).tolist() == pytest.approx([expected])
    several = adapt(made, input_shape=(1, 28, 28), augmentations=2)
    assert several.losses(outputs[:, None].expand(1, 2, 2), labels).tolist() == pytest.approx([expected])


def _reviews(root: Path) -> Path:
    lines = [{"text": f"{'a' if n % 2 else 'the'} {'good film' if n % 3 else 'bad'} {n}"} for n in range(120)]
    lines += [{}, {"text": "film"}]
    (root / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root / "t.jsonl"


@pytest.mark.parametrize("adapter", [{"rank": 2}, None])
def test_the_next_token_of_texts_is_measured_by_perplexity(
    workspace: Workspace, declared: Declare, tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    public = tmp_path / "public"
    publish(public, causal=True)
    path = _reviews(workspace.root)
    reader = {"kind": "texts", "format": "jsonl", "columns": ["text"]}
    data = {"transform": "encoder", "encoder": {"name": f"tokenizer/{public}", "settings": {"length": 6}}}
    chosen = {"name": "huggingface", "checkpoint": str(public)} | ({"adapter": adapter} if adapter else {})
    declared(path.name, data, chosen, classes=[], target={"next": "token"}, reader=reader, unit="one text")
    held_out = load_prepared(workspace.root / "datasets/prepared")
    ids, labels = np.array(held_out.test_features), np.array(held_out.test_labels)
    padding = WORDS.index("<pad>")
    assert (labels == np.where(ids == padding, -100, ids)).all() and (ids == padding).any()

    words = finish(workspace)
    assert "drawn from the model's seed" not in words  # the head is tied to the embeddings
    model = load_model(workspace.root / "artifacts/model.safetensors")
    library: Any = model.network.model

    def loss(row: np.ndarray) -> tuple[float, int]:
        """By the library itself, of a text without its padding: the sum over the tokens that follow one."""
        text = torch.from_numpy(row[row != padding].astype(np.int64))[None]
        follow = max(0, text.shape[1] - 1)
        with torch.no_grad():
            return (float(library(input_ids=text, labels=text).loss) * follow if follow else 0.0), follow

    sums = np.array([loss(row) for row in ids]).sum(axis=0)
    found = metrics_of(workspace)
    assert found["test_loss"] == pytest.approx(sums[0] / sums[1], rel=1e-4)
    assert found["test_perplexity"] == pytest.approx(np.exp(sums[0] / sums[1]), rel=1e-4)
    assert "perplexity" in page_of(workspace)
    assert dict(run_summary(workspace.root))["perplexity"] == f"{found['test_perplexity']:.4g}"

    (tmp_path / "new.txt").write_text("a good film\nfilm\n")
    (said,) = predict(model, tmp_path / "new.txt")
    total, follow = loss(np.array([4, 2, 1]))
    assert float(said.predicted[0]) == pytest.approx(np.exp(total / follow), rel=1e-4)
    assert said.predicted[1] == ""


TAGS = {"tags": ["O", "WHO", "WHAT"], "outside": "O", "words": 4}


def _tagged(root: Path) -> None:
    """Words with their tags: by name and by place, of words of several tokens, with too few tags and none."""
    lines: list[Any] = [
        {"words": ["the", "good-film", "a", "bad"], "tags": ["O", "WHAT", "O", "WHO"]},
        {"words": ["bad", "good", "the"], "tags": [1, 1, 0]},
        {"words": ["film", "a", "the"], "tags": ["WHAT", "nobody", None]},
        {"words": ["film", "bad"], "tags": ["WHAT"]},
        {"words": "a good film", "tags": "O WHO WHAT"},
        {"words": ["film"] * 9, "tags": ["WHAT"] * 9},
        {"words": 3},
        "no record",
    ]
    more = [{"words": ["film", str(n)], "tags": [2, 0]} for n in range(80)]
    (root / "t.jsonl").write_text("\n".join(map(json.dumps, lines + more)))


def test_a_word_has_its_tag_at_its_first_token(
    workspace: Workspace, declared: Declare, tmp_path: Path
) -> None:
    public = tmp_path / "public"
    publish(public)
    _tagged(workspace.root)
    reader = {"kind": "texts", "format": "jsonl", "columns": ["words"], "label": "tags"}
    data = {"transform": "encoder", "encoder": {"name": f"tokenizer/{public}", "settings": {"length": 6}}}
    chosen = {"name": "huggingface", "checkpoint": str(public)}
    declared("t.jsonl", data, chosen, classes=[], target=TAGS, reader=reader, unit="one text")
    held = load_prepared(workspace.root / "datasets/prepared")
    ids = np.concatenate([held.train_features, held.test_features])
    labels = np.concatenate([held.train_labels, held.test_labels])
    found = {(tuple(row), tuple(own)) for row, own in zip(ids.tolist(), labels.tolist(), strict=True)}
    pad, no, unknown = WORDS.index("<pad>"), -100, WORDS.index("<unk>")
    assert found >= {
        ((5, 2, unknown, 1, 4, 3), (0, 2, no, no, 0, 1)),  # good-film is three tokens
        ((3, 2, 5, pad, pad, pad), (1, 1, 0, no, no, no)),
        ((1, 4, 5, pad, pad, pad), (2, 0, 0, no, no, no)),  # what is no tag is outside
        ((1, 3, pad, pad, pad, pad), (2, no, no, no, no, no)),
        ((4, 2, 1, pad, pad, pad), (0, 1, 2, no, no, no)),
        ((1, 1, 1, 1, pad, pad), (2, 2, 2, 2, no, no)),  # four words at most
        ((unknown, pad, pad, pad, pad, pad), (no,) * 6),
        ((pad,) * 6, (no,) * 6),
    }

    finish(workspace)
    model = load_model(workspace.root / "artifacts/model.safetensors")
    with torch.no_grad():
        said = model(torch.from_numpy(np.array(held.test_features))).argmax(-1).numpy()
    counts = np.array(held.test_labels) != no
    real, guessed = np.array(held.test_labels)[counts], said[counts]
    measured = metrics_of(workspace)
    assert measured["test_token_accuracy"] == (real == guessed).mean()
    assert measured["test_token_f1"] == f1_score(real, guessed, labels=[1, 2], average="micro")
    assert "F1 over all tags" in page_of(workspace)
    assert "tag accuracy" in dict(run_summary(workspace.root))

    (tmp_path / "new.jsonl").write_text(json.dumps({"words": ["the", "good-film", "bad"]}))
    (new,) = predict(model, tmp_path / "new.jsonl")
    with torch.no_grad():
        row = model(torch.tensor([[5, 2, unknown, 1, 3, pad]])).argmax(-1)[0]
    assert new.predicted == (" ".join(TAGS["tags"][row[place]] for place in (0, 1, 4)),)  # type: ignore[index]
    told = io.StringIO()
    assert list(write([new], model.classes, told)) == [1]
    assert told.getvalue().splitlines()[0] == "record,predicted"


BIO = Tags(tags=("O", "B-WHO", "I-WHO", "B-WHAT", "I-WHAT"), outside="O", words=9)


def test_f1_over_entities_is_that_of_counting_word_by_word() -> None:
    """Texts of random tags, some words of which do not count; an entity never goes on in the next text."""

    def entities(text: list[str]) -> set[tuple[int, int, str]]:
        found: list[list[Any]] = []
        for place, tag in enumerate(text):
            begins, _, kind = tag.partition("-")
            if tag == "O":
                continue
            if found and begins == "I" and found[-1][1:] == [place - 1, kind]:
                found[-1][1] = place
            else:
                found.append([place, place, kind])
        return {(first, last, kind) for first, last, kind in found}

    draw = np.random.default_rng(0)
    labels, said = draw.integers(0, 5, (40, 9)), draw.integers(0, 5, (40, 9))
    said = np.where(draw.random((40, 9)) < 0.7, labels, said)
    labels = np.where(draw.random((40, 9)) < 0.2, -100, labels)
    right = given = there = 0
    for row, own in zip(said, labels, strict=True):
        counts = own != -100
        one, other = ([BIO.tags[tag] for tag in tags[counts]] for tags in (row, own))
        right += len(entities(one) & entities(other))
        given, there = given + len(entities(one)), there + len(entities(other))
    found = evaluate.compute_metrics(BIO, evaluate.EvaluationResult(said, 0.0, np.zeros((40, 0))), labels)
    assert found["test_entity_f1"] == 2 * right / (given + there) and 0.3 < found["test_entity_f1"] < 0.9
    assert headline_metric(found) == found["test_entity_f1"]
    assert ("F1 over entities", f"{found['test_entity_f1']:.3f}") in metric_rows(found)
    assert "F1 over entities is" in report_text(found, 40, 0.5).sentences


@pytest.mark.parametrize(
    "tags", [("O", "WHO"), ("O", "I-WHO"), ("O", "B-A", "I-B"), ("O", "B-A", "I-A", "X")]
)
def test_tags_of_another_form_have_no_entities(tags: tuple[str, ...]) -> None:
    known = Tags(tags=tags, outside="O")
    assert evaluate.entity_types(known) is None
    labels = np.array([[0, 1]])
    found = evaluate.compute_metrics(known, evaluate.EvaluationResult(labels, 0.0, np.zeros((1, 0))), labels)
    assert "test_entity_f1" not in found and headline_metric(found) == found["test_token_f1"] == 1.0


RELEASES: list[tuple[dict[str, Any], str, bool]] = [
    (TAGS, "TokenClassification", True),
    ({"next": "token"}, "CausalLM", False),
    ({}, "SequenceClassification", False),
    ({"next": "token"}, "CausalLM", True),
]


@pytest.mark.parametrize(
    ("target", "head", "adapter"),
    soak_but(RELEASES[:2], RELEASES),
)
def test_a_release_is_read_by_its_library_in_one_line(
    workspace: Workspace,
    declared: Declare,
    tmp_path: Path,
    target: dict[str, Any],
    head: str,
    adapter: bool,
    recwarn: pytest.WarningsRecorder,
) -> None:
    transformers, peft = imported_library("transformers"), imported_library("peft")
    public, place = tmp_path / "public", tmp_path / "released"
    publish(public, causal=head == "CausalLM")
    reader: dict[str, Any] = {"kind": "texts", "format": "jsonl", "columns": ["text"]}
    lines = [{"text": f"the good film {n}", "label": ["O", "WHO"][n % 2]} for n in range(90)]
    (workspace.root / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    known: dict[str, Any] = {"classes": [], "target": target} if target else {"classes": ["O", "WHO"]}
    data = {"transform": "encoder", "encoder": {"name": f"tokenizer/{public}", "settings": {"length": 6}}}
    chosen = {"name": "huggingface", "checkpoint": str(public)} | (
        {"adapter": {"rank": 2}} if adapter else {}
    )
    reader |= {} if head == "CausalLM" else {"label": "label"}
    declared("t.jsonl", data, chosen, reader=reader, unit="one text", **known)
    # large weights, by noise alone, round in other ways
    workspace.set("algorithm", update={"learning_rate": 0.05})
    finish(workspace)
    artifacts = workspace.root / "artifacts"
    recwarn.clear()
    names = set(release(artifacts, place, key=None))
    assert not [one for one in recwarn if one.category is FutureWarning]  # a command would print it
    assert {"model.safetensors", "privacy_card.json"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert names & {"config.json", "adapter_config.json"} == {
        "adapter_config.json" if adapter else "config.json"
    }

    auto = getattr(transformers, f"AutoModelFor{head}")
    model = load_model(place)
    if adapter:
        more = {} if head == "CausalLM" else {"num_labels": len(model.classes)}
        read = peft.PeftModel.from_pretrained(auto.from_pretrained(public, **more), place)
    else:
        read = auto.from_pretrained(place)
        assert head == "CausalLM" or read.config.id2label == {0: "O", 1: "WHO"}
    tokenize, texts = transformers.AutoTokenizer.from_pretrained(place), ["the good film", "bad bad"]
    given = [text.split() for text in texts] if head == "TokenClassification" else texts
    how = {"padding": "max_length", "truncation": True, "is_split_into_words": given is not texts}
    found = tokenize(given, max_length=6, **how)
    ids = torch.tensor(found["input_ids"])
    assert ids.tolist() == [[5, 2, 1, 7, 7, 7], [3, 3, 7, 7, 7, 7]] and tokenize.model_max_length == 6
    with torch.no_grad():
        said = read.eval()(input_ids=ids, attention_mask=(ids != 7).long()).logits
        assert torch.allclose(said, model(ids.int()), atol=1e-5)
    # Each head is among these, and adapters and none.
    others = ("torchscript", "onnx") if (head == "SequenceClassification") is not adapter else ()
    for form in ("huggingface", "library", *others):
        if form == "onnx":
            pytest.importorskip("onnxscript")
        assert export(artifacts, form, tmp_path / form) < 1e-4
    assert {path.name for path in (tmp_path / "library").iterdir()} >= {"config.json", "tokenizer.json"}
    made = [artifacts, place, *(tmp_path / form for form in ("huggingface", "library", *others))]
    files = {file for one in made for file in (one, *one.rglob("*")) if file.is_file()}
    assert len(files) > 20 and not [file for file in files if str(tmp_path).encode() in file.read_bytes()]
    untrained = auto.from_pretrained(
        public, **({} if head == "CausalLM" else {"num_labels": len(model.classes)})
    )
    with torch.no_grad():
        before = untrained.eval()(input_ids=ids, attention_mask=(ids != 7).long()).logits
    assert not torch.allclose(said, before, atol=1e-5)
    own = public / "tokenizer.json"  # another one since the run is not part of what is released
    own.write_text(own.read_text().replace('"film"', '"movie"'))
    assert "tokenizer.json" not in release(artifacts, tmp_path / "without", key=None)
    assert "which was not here to be added" in (tmp_path / "without/README.md").read_text()


def test_a_run_whose_held_out_texts_have_no_words_ends_with_a_card(
    workspace: Workspace, declared: Declare, tmp_path: Path
) -> None:
    publish(tmp_path / "public")
    lines = [{"words": ["film", str(n)], "tags": ["WHAT", "O"]} for n in range(90)]
    (workspace.root / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    reader = {"kind": "texts", "format": "jsonl", "columns": ["words"], "label": "no such"}
    encoder = {"name": f"tokenizer/{tmp_path / 'public'}", "settings": {"length": 4}}
    data = {"transform": "encoder", "encoder": encoder}
    chosen = {"name": "huggingface", "checkpoint": str(tmp_path / "public")}
    declared("t.jsonl", data, chosen, classes=[], target=TAGS, reader=reader, unit="one text")
    finish(workspace)
    assert metrics_of(workspace)["test_token_f1"] == metrics_of(workspace)["test_loss"] == 0.0


def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path: Path) -> None:
    """A BERT as a language model would say each token from itself."""
    publish(tmp_path)
    known = {"input_shape": (6,), "classes": len(WORDS), "seed": 0, "tokens": len(WORDS), "padding": 7}
    with pytest.raises(ModelRefusedError, match="sees the tokens that it is to predict"):
        build("huggingface", **known, predicts="next token", settings={"checkpoint": str(tmp_path)})  # type: ignore[arg-type]


def test_texts_of_language_modelling_need_a_tokenizer(workspace: Workspace, declared: Declare) -> None:
    reader = {"kind": "texts", "format": "jsonl", "columns": ["text"]}
    path = _reviews(workspace.root)
    with refused_as("encoder_needed", DataRefusedError, target="next token"):
        declared(path.name, classes=[], target={"next": "token"}, reader=reader)


@pytest.mark.parametrize("model", ["softmax", "logistic", "svm"])
def test_models_of_classes_refuse_labels(model: str) -> None:
    with pytest.raises(ModelRefusedError, match="the target of labels; use 'linear'"):
        build(model, input_shape=(3,), classes=2, seed=0, predicts="labels")


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"target": {"labels": ["cheap"]}}, ("labels",)),
        ({"target": {"labels": ["cheap", "ripe"]}}, ("target.labels", "reader")),
        ({"target": None, "classes": ["a", "b"]}, ("reader",)),
        ({"target": {"next": "token"}}, ("target", "reader.label")),
        ({"target": {"tags": ["A", "B"]}}, ("reader",)),
        ({"target": {"tags": ["A", "B"], "outside": "O"}}, ("outside", "tags")),
    ],
)
def test_a_card_says_which_columns_its_target_is_in(change: dict[str, Any], keys: tuple[str, ...]) -> None:
    reader = {"kind": "texts", "format": "csv", "columns": ["text"], "label": ["cheap", "fresh"]}
    files = {"train": {"path": "t.csv", "keyed_sha256": "0" * 64}}
    card = CARD | {"files": files, "reader": reader, "classes": [], "target": LABELS}
    DataCard.model_validate_json(json.dumps(card))
    with contradicting(*keys):
        DataCard.model_validate_json(json.dumps(card | change))
