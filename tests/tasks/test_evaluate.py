"""Models are evaluated and used by the computation that they were trained by."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn

from algorithms.model_facts import ModelFacts
from algorithms.models import Model
from algorithms.models.objectives import as_they_are
from data.targets import Classes
from tasks.evaluate import EvaluationResult, classification_metrics, evaluate
from tasks.predict import _predict_batch
from tasks.tuning.scoring import score_statistic


class Encoded(nn.Module):
    """In evaluation mode, without gradients, PyTorch packs records by their mask, and stops where all are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)
        self.over = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(
            self.over(self.table(ids), src_key_padding_mask=ids == 0).nan_to_num().mean(1)
        )
        return found


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("ids", [[[0, 0, 0]], [[3, 4, 0], [5, 0, 0]]], ids=["padding", "texts"])
def test_a_model_of_padded_texts_gives_what_it_gave_in_training(ids: Any) -> None:
    module = Encoded().eval()
    model = Model("encoded", module, nn.CrossEntropyLoss(reduction="none"), as_they_are)
    expected = module(torch.tensor(ids)).detach()  # with gradients, as in training
    features, labels = np.array(ids, np.int32), np.zeros(len(ids), np.int64)
    info: Any = SimpleNamespace(label_type=Classes(classes=("no", "yes")), tokens=9, label_shape=())
    data: Any = SimpleNamespace(info=info, test_features=features, test_labels=labels)
    evaluated = evaluate(model, model.published_tensors(model.initial_parameters()), data)
    torch.testing.assert_close(torch.from_numpy(evaluated.scores).double(), expected.softmax(1).double())

    trained: Any = module
    module.facts, module.classes = (
        ModelFacts(model="encoded", input_shape=(4,), classes=("no", "yes")),
        ("no", "yes"),
    )
    predicted = _predict_batch(trained, None, ("0",) * len(ids), features)
    torch.testing.assert_close(torch.from_numpy(predicted.scores).double(), expected.softmax(1).double())

    score = score_statistic(info, model, model.published_tensors(model.initial_parameters()), size=8)
    assert score(torch.from_numpy(features[0]), torch.from_numpy(labels)[0]).shape == (1,)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_metrics_of_classes_are_those_of_scikit_learn(classes: int) -> None:
    """Also where scores are equal, and where a class is never answered."""
    generator = np.random.default_rng(0)
    labels = np.r_[np.arange(classes), generator.integers(0, classes, 60)]
    scores = generator.integers(1, 6, (len(labels), classes)) * (1.0, *(0.5,) * (classes - 1))
    scores /= scores.sum(axis=1, keepdims=True)
    predicted = np.minimum(scores.argmax(axis=1), classes - 2)
    found = classification_metrics(EvaluationResult(predicted, 0.0, scores), labels)
    judged = scores[:, 1] if classes == 2 else scores
    assert found.test_auc == pytest.approx(roc_auc_score(labels, judged, multi_class="ovr"), rel=1e-12)
    assert found.test_f1 == pytest.approx(f1_score(labels, predicted, average="macro"), rel=1e-12)
