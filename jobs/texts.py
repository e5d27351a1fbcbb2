"""Texts of different lengths, classified with PyTorch: whether a review of a restaurant, made by rules, is positive."""

import numpy as np
import torch
from torch import Tensor, nn

from mpitrain import Job, data, optim

THINGS = "soup bread fish wine service music room price dessert coffee staff menu".split()
GOOD, BAD = "good great excellent friendly fresh lovely".split(), "bad poor awful slow stale noisy".split()
DEGREES = ["", "", "very", "really", "quite"]
WORDS = ["<padding>", "the", "was", "not", "and", "but", *THINGS, *GOOD, *BAD, *sorted(filter(None, set(DEGREES)))]
NUMBERS = {word: number for number, word in enumerate(WORDS)}


class Reviews:
    """Reviews of 1 to 8 statements, each positive or negative, some by negation; label 1: most are positive."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.reviews = [self._review(rng) for _ in range(count)]
        self.lengths = np.array([len(words) for words, _ in self.reviews])

    def __len__(self) -> int:
        return len(self.reviews)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        words, label = self.reviews[index]
        return torch.tensor([NUMBERS[word] for word in words]), label

    def _review(self, rng: np.random.Generator) -> tuple[list[str], int]:
        count = 2 * int(rng.integers(0, 4)) + 1
        are_positive = rng.random(count) < rng.choice([0.2, 0.8])
        statements = [self._statement(rng, bool(positive)) for positive in are_positive]
        return " and ".join(statements).split(), int(are_positive.sum() > count / 2)

    def _statement(self, rng: np.random.Generator, positive: bool) -> str:
        negated = rng.random() < 0.3
        word = rng.choice(GOOD if positive != negated else BAD)
        return f"the {rng.choice(THINGS)} was {'not' if negated else ''} {rng.choice(DEGREES)} {word}"


class Classifier(nn.Module):
    """A recurrent network that reads the words, and classifies by the mean of its states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width, padding_idx=0)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.reader(self.words(words))
        is_word = (words > 0).unsqueeze(2)
        return self.head((states * is_word).sum(1) / is_word.sum(1))


def padded(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return a batch of texts, padded with zeros to the length of the longest text."""
    texts, labels = zip(*examples, strict=True)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


def job(width: int = 32, learning_rate: float = 0.005, reviews: int = 20_000) -> Job:
    """Train a classifier of reviews.

    Args:
        width: Size of the words' vectors and of the recurrent state.
        learning_rate: AdamW's initial step size; it decays along half a cosine.
        reviews: Number of reviews to train on.
    """
    steps, batch_size = 800, 32
    train = Reviews(reviews, seed=1)
    by_length = data.orders.GroupedByLength(train.lengths, group=100 * batch_size)
    return Job(
        model=Classifier(width),
        loss=nn.CrossEntropyLoss(),
        optimizer=optim.adamw(optim.cosine(learning_rate, steps)),
        train=data.dataset(train, classes=2).collated(padded).ordered(by_length),
        validation=data.dataset(Reviews(2000, seed=2), classes=2).collated(padded),
        batch_size=batch_size,
        train_steps=steps,
    )
