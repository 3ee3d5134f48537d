"""The small tanh network for 28 x 28 images (Papernot et al. 2021, "Tempered Sigmoid Activations", Table 1)."""

from torch import nn

from algorithms.models.linear import CROSS_ENTROPY, cross_entropy
from algorithms.models.model import Model, ModelRefused


def tanh_cnn(input_shape: tuple[int, ...], classes: int) -> Model:
    """Two tanh convolutions with overlapping max-pooling and two dense layers; 26,010 parameters on 1 x 28 x 28.

    input_shape: (channels, height, width), at least 20 pixels high and wide. Raises ModelRefused otherwise.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 20:
        raise ModelRefused(
            f"the model 'tanh_cnn' takes images of at least 20 x 20 pixels, not inputs of shape {input_shape};"
            " use 'softmax'."
        )
    height, width = (_side(pixels) for pixels in input_shape[1:])
    module = nn.Sequential(
        nn.Conv2d(input_shape[0], 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * height * width, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )
    return Model("tanh_cnn", module, cross_entropy, lambda outputs: outputs, bounds=CROSS_ENTROPY)


def _side(pixels: int) -> int:
    """Height or width after both convolutions and both poolings."""
    first = (pixels + 4 - 8) // 2 + 1 - 1
    return (first - 4) // 2 + 1 - 1
