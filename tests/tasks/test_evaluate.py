"""Models are evaluated and used by the computation that they were trained by."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from algorithms.model_facts import ModelFacts
from algorithms.models import Model
from algorithms.models.objectives import as_they_are
from data.targets import Classes
from tasks.evaluate import evaluate
from tasks.predict import _predict_batch
from tasks.tuning import score_statistic


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
    public: Any = SimpleNamespace(label_type=Classes(classes=("no", "yes")), tokens=9, label_shape=())
    data: Any = SimpleNamespace(public=public, test_features=features, test_labels=labels)
    evaluated = evaluate(model, model.published_tensors(model.initial_parameters()), data)
    torch.testing.assert_close(torch.from_numpy(evaluated.scores).double(), expected.softmax(1).double())

    trained: Any = module
    module.facts, module.classes = (
        ModelFacts(model="encoded", input_shape=(4,), classes=("no", "yes")),
        ("no", "yes"),
    )
    predicted = _predict_batch(trained, None, ("0",) * len(ids), features)
    torch.testing.assert_close(torch.from_numpy(predicted.scores).double(), expected.softmax(1).double())

    score = score_statistic(public, model, model.published_tensors(model.initial_parameters()), size=8)
    assert score(torch.from_numpy(features[0]), torch.from_numpy(labels)[0]).shape == (1,)
