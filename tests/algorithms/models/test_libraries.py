"""Model libraries that are extras."""

import pytest
import torch

from algorithms.models.libraries import LibraryMissingError, imported_library


def test_a_library_whose_compiled_part_does_not_load_is_imported_all_the_same() -> None:
    model = imported_library("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert imported_library("transformers").BertConfig().hidden_size == 768


def test_a_library_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(
        LibraryMissingError, match=r"^nowhere was asked for.*pip install 'epsilonflow\[models\]'\.$"
    ):
        imported_library("nowhere.at_all")
