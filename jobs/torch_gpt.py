"""A small GPT on the characters of a text: by default the first chapters of Moby-Dick."""

from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from mpitrain import Job, data, optim

CHARACTERS = 128  # of ASCII


class Block(nn.Module):
    """Self-attention and a multilayer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + functional.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Gpt(nn.Module):
    """A transformer that predicts the next character; its output weights are its embedding."""

    def __init__(self, context: int, width: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS, bias=False)
        self.head.weight = self.characters.weight
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in nats, mean over all characters."""
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def job(
    context: int = 64,
    width: int = 128,
    blocks: int = 3,
    heads: int = 4,
    dropout: float = 0.1,
    learning_rate: float = 0.003,
    steps: int = 1500,
    text: Path | None = None,
) -> Job:
    """Train a GPT on characters.

    Args:
        context: Number of characters of the model's input. width: Length of the vector of a character.
        blocks: Number of blocks.
        heads: Attention heads of a block.
        dropout: Fraction of the values that are dropped.
        learning_rate: AdamW's largest learning rate, reached after 100 steps; it then decays along half a cosine.
        steps: Number of training steps.
        text: A file of ASCII text; the first chapters of Moby-Dick by default.
    """
    content = data.sample_text() if text is None else text.read_text()
    characters = np.frombuffer(content.encode("ascii", "replace"), np.uint8).astype(np.int64)
    part = len(characters) * 9 // 10
    return Job(
        model=Gpt(context, width, blocks, heads, dropout),
        loss=loss_of,
        optimizer=optim.adamw(
            optim.warm_up(100, optim.cosine(learning_rate, steps - 100)), weight_decay=0.1, clip_norm=1.0
        ),
        train=data.windows(characters[:part], context, stride=1),
        validation=data.windows(characters[part:], context),
        batch_size=16,
        train_steps=steps,
    )
