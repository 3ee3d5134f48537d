"""A transformer encoder whose base is frozen, with low-rank adapters (Hu et al. 2021, "LoRA", section 4)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, FEED_FORWARD, RANK, SCALING = 256, 4, 1024, 8, 2.0


class Adapted(nn.Module):
    """A frozen linear layer plus a trained low-rank product: W x + b + scaling U D x.

    U is initialised at random, not at zero as in the paper; else all gradients of D would be zero in the first step.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        outputs: Tensor = self.base(inputs) + SCALING * self.up(self.down(inputs))
        return outputs


class Block(nn.Module):
    """Attention and feed-forward, each after a frozen layer normalisation; the shape stays [batch, length, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.query = Adapted(WIDTH, WIDTH)
        self.key = Adapted(WIDTH, WIDTH)
        self.value = Adapted(WIDTH, WIDTH)
        self.out = Adapted(WIDTH, WIDTH)
        self.before_feed_forward = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.wide = Adapted(WIDTH, FEED_FORWARD)
        self.narrow = Adapted(FEED_FORWARD, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Two residual steps."""
        attended = inputs + self._attention(self.before_attention(inputs))
        hidden = functional.gelu(self.wide(self.before_feed_forward(attended)))
        outputs: Tensor = attended + self.narrow(hidden)
        return outputs

    def _attention(self, inputs: Tensor) -> Tensor:
        query, key, value = (self._heads(layer(inputs)) for layer in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        outputs: Tensor = self.out(mixed.transpose(1, 2).flatten(start_dim=2))
        return outputs

    def _heads(self, inputs: Tensor) -> Tensor:
        batch, length, _ = inputs.shape
        return inputs.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)


class AdaptedTransformer(nn.Module):
    """Two blocks, the mean over the sequence, and a trained head with two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings [batch, length, WIDTH] -> outputs [batch, 2]."""
        outputs: Tensor = self.head(torch.mean(self.blocks(inputs), dim=1))
        return outputs
