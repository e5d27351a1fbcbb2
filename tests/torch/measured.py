"""A classifier with metrics of scikit-learn and torchmetrics."""

import numpy as np
import torch
import torchmetrics
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.utils.data import Subset, TensorDataset

from mpitrain import Job

CLASSES, N_TRAIN, N_VALIDATION = 3, 240, 101


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((N_TRAIN + N_VALIDATION, 6))
    labels = (inputs @ rng.standard_normal((6, CLASSES)) + rng.standard_normal((len(inputs), CLASSES))).argmax(1)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def splits() -> tuple[TensorDataset, TensorDataset]:
    inputs, labels = arrays()
    return TensorDataset(inputs[:N_TRAIN], labels[:N_TRAIN]), TensorDataset(inputs[N_TRAIN:], labels[N_TRAIN:])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()


def of_sklearn(outputs, labels) -> dict[str, float]:
    scores = torch.as_tensor(outputs).softmax(1)
    return {
        "auc": roc_auc_score(labels, scores, multi_class="ovr"),
        "f1": f1_score(labels, scores.argmax(1), average="macro"),
    }


def metrics() -> dict[str, object]:
    return {
        "sklearn": of_sklearn,
        "auc": torchmetrics.AUROC("multiclass", num_classes=CLASSES),
        "many": torchmetrics.MetricCollection(
            {
                "f1": torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro"),
                "accuracy": torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="micro"),
            }
        ),
    }


def job(dataset: bool = False) -> Job:
    """Train with arrays, or with datasets of torch."""
    train, validation = splits()
    if dataset:
        validation = Subset(validation, range(N_VALIDATION))
    return Job(
        make_model(),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, 0.05),
        train,
        validation,
        train_steps=20,
        metrics=metrics(),
    )
