"""The measured workloads: models, shapes and batch sizes, with random inputs and labels from a fixed seed.

They follow published private training runs: W1 is a line search on a linear model, W2 the dense network on which
coordinate-wise adaptive clipping was tried, W3 and W4 small networks on pixels and on scattering features, W5 a
recurrent text classifier, W6 a convolutional network for 32 x 32 colour images, and `lora` the fine-tuning of a frozen
transformer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from algorithms.models import Model, build
from algorithms.models.libraries import imported_library
from algorithms.models.objectives import cross_entropy
from benchmarks.libraries import TABLE, VOCABULARY
from benchmarks.transformer import AdaptedTransformer

_SEED = 0


@dataclass(frozen=True)
class Workload:
    """One model with the shape of its data.

    task: "step" clips, sums, adds noise and updates; "line search" also evaluates 20 candidates; "affine" clips
        after a coordinate-wise affine map.
    batch, device_batch: records in a step on a CPU, and on a GPU, where a small batch measures only kernel launches.
    peers_may_differ: a peer whose sum is off, as Opacus's is on position embeddings, is still timed, with a note.
    vocabulary: inputs are token ids below it; 0 if they are real numbers.
    """

    name: str
    about: str
    make: Callable[[], Model]
    input_shape: tuple[int, ...]
    classes: int
    batch: int
    device_batch: int
    vocabulary: int = 0
    task: str = "step"
    peers_may_differ: bool = False

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return torch.int64 if self.vocabulary else torch.float32

    def build(self) -> Model:
        """A new model, always with the same parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return self.make()

    def data(self, records: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs [records, *input_shape] and labels [records], always the same."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (records, *self.input_shape)
        if self.vocabulary:
            inputs = torch.randint(self.vocabulary, shape, generator=generator)
        else:
            inputs = torch.randn(shape, generator=generator)
        labels = torch.randint(self.classes, (records,), generator=generator)
        return inputs.to(device), labels.to(device)


class LastStates(nn.Module):
    """The last hidden states of both directions of an LSTM, inputs [batch, length, p] -> [batch, 2 hidden]."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Both last states, first the forward direction's."""
        _, (states, _) = self.lstm(inputs)
        return torch.cat([states[0], states[1]], dim=1)


def _classifier(name: str, module: nn.Module) -> Model:
    return Model(name, module, cross_entropy, lambda outputs: outputs)


def _dense() -> Model:
    return _classifier("dense", nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10)))


def _scattering_linear() -> Model:
    return _classifier("scattering linear", nn.Sequential(nn.Flatten(), nn.Linear(81 * 7 * 7, 10)))


def _scattering_network() -> Model:
    layers = [
        nn.GroupNorm(27, 81, affine=False),
        nn.Conv2d(81, 16, kernel_size=3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    ]
    return _classifier("scattering network", nn.Sequential(*layers))


def _recurrent() -> Model:
    embedding = nn.Embedding(20_000, 100)
    embedding.requires_grad_(False)
    layers = [
        nn.Linear(100, 32),
        nn.ReLU(),
        LastStates(32, 32),
        nn.Linear(64, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    ]
    return _classifier("recurrent", nn.Sequential(embedding, *layers))


def _colour_images() -> Model:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (32, 64, 128):
        layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    layers += [nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)]
    return _classifier("colour images", nn.Sequential(*layers))


def _adapted() -> Model:
    return _classifier("adapted transformer", AdaptedTransformer())


def _vit_tiny() -> Model:
    vit = imported_library("timm").models.VisionTransformer
    return _classifier("ViT-Tiny", vit(img_size=32, patch_size=4, embed_dim=192, num_heads=3, num_classes=10))


def _logistic() -> Model:
    return build("logistic", input_shape=(124,), classes=2, seed=_SEED)


def _tanh_cnn() -> Model:
    return build("tanh_cnn", input_shape=(1, 28, 28), classes=10, seed=_SEED)


_ALL = (
    Workload(
        name="W1",
        about="logistic regression, full batch: one clipped gradient and 20 candidate objectives",
        make=_logistic,
        input_shape=(124,),
        classes=2,
        batch=45_000,
        device_batch=900_000,
        task="line search",
    ),
    Workload("W2", "dense network 60-1000-10", _dense, (60,), 10, batch=600, device_batch=19_200),
    Workload("W3", "tanh network on 28 x 28", _tanh_cnn, (1, 28, 28), 10, batch=512, device_batch=16_384),
    Workload(
        "W4lin", "linear on scattering", _scattering_linear, (81, 7, 7), 10, batch=1024, device_batch=32_768
    ),
    Workload(
        "W4cnn", "network on scattering", _scattering_network, (81, 7, 7), 10, batch=1024, device_batch=16_384
    ),
    Workload(
        "W5", "bidirectional LSTM", _recurrent, (80,), 2, batch=256, device_batch=8192, vocabulary=20_000
    ),
    Workload(
        "W6", "network on 32 x 32 colours", _colour_images, (3, 32, 32), 10, batch=128, device_batch=4096
    ),
    Workload("lora", "transformer with LoRA", _adapted, (128, 256), 2, batch=64, device_batch=1024),
    Workload(
        name="adaclip",
        about="dense network 60-1000-10, clipped after a coordinate-wise affine map",
        make=_dense,
        input_shape=(60,),
        classes=10,
        batch=600,
        device_batch=19_200,
        task="affine",
    ),
)


def _of_library(name: str, *, small: bool) -> Workload:
    about, make, shape, records = TABLE[name]
    if small:
        shape = (3, 32, 32) if len(shape) == 3 else (16,)
    return Workload(
        name=name + ("-small" if small else ""),
        about=about + (", a small one" if small else ""),
        make=lambda: _classifier(name, make(small=small)),
        input_shape=shape,
        classes=2 if len(shape) == 1 else 10,
        batch=8 if small else 64,
        device_batch=64 if small else records,
        vocabulary=VOCABULARY if len(shape) == 1 else 0,
        peers_may_differ=True,
    )


OF_LIBRARIES = {name: _of_library(name, small=False) for name in TABLE}
SMALL = {name: _of_library(name, small=True) for name in TABLE}
VIT_TINY = Workload(
    "vit-tiny", "ViT-Tiny on 32 x 32", _vit_tiny, (3, 32, 32), 10, batch=64, device_batch=1024
)
WORKLOADS = {
    workload.name: workload for workload in (*_ALL, VIT_TINY, *OF_LIBRARIES.values(), *SMALL.values())
}
DEFAULT = tuple(workload.name for workload in _ALL)
