"""Optimizers to test, their formulas in float64, and runs of the updater."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mpitrain import optim
from mpitrain.core.layout import Layout

LAYOUT = Layout.pack(
    [
        ("dense1.weight", (67, 80), "param"),
        ("dense1.bias", (67,), "param"),
        ("norm.mean", (5,), "state"),
        ("dense2.weight", (3, 1), "param"),
        ("dense2.bias", (1,), "param"),
        ("norm.var", (1,), "state"),
    ]
)
SIZE, TRAINED = LAYOUT.size, LAYOUT.n_trained
USED = np.concatenate([np.arange(e.start, e.stop) for e in LAYOUT.entries])
GAPS = np.setdiff1d(np.arange(SIZE), USED)

ELEMENTWISE = [
    optim.sgd(0.1),
    optim.sgd(optim.exponential(0.1, 0.5, 3), l2=0.05),
    optim.sgd(0.1, weight_decay=0.3),
    optim.momentum(0.05),
    optim.momentum(0.05, 0.8, nesterov=True),
    optim.nesterov(0.05, 0.8, l2=0.1, decay_names=["*.bias", "dense2.*"]),
    optim.adam(0.01),
    optim.adam(0.01, 0.8, 0.95, 1e-3, l2=0.1),
    optim.adamw(0.01, weight_decay=0.5),
    optim.adagrad(0.1),
    optim.rmsprop(0.01, 0.9),
    optim.adamw(0.01, weight_decay=0.5, rate_factors={"dense2.weight": 0.5, "dense2.*": 3, "*.weight": 0}),
]


def draw(seed, rows=None):
    """Return a random vector, or rows of random vectors, with zeros in the gaps."""
    rng = np.random.default_rng(seed)
    shape = (SIZE,) if rows is None else (rows, SIZE)
    values = rng.standard_normal(shape)
    values[..., GAPS] = 0
    return values


class Run:
    """An updater with its vectors."""

    def __init__(self, optimizer, dtype=np.float32, moving=None):
        self.params = draw(0).astype(dtype)
        self.slots = {name: np.zeros(SIZE, dtype) for name in optimizer.slots}
        self.average = None if moving is None else self.params.copy()
        self.frozen = np.zeros(len(LAYOUT.entries), np.uint8)
        self.updater = optim.Updater(optimizer, LAYOUT, self.params, self.slots, self.average, moving, self.frozen)

    def step(self, rows, step, bounds=(0, SIZE), order=None):
        """Take one step on each range between ``bounds``, as several ranks would do together."""
        ranges = list(pairwise(bounds))
        if not self.updater.needs_sums:
            for lo, hi in ranges:
                self.updater.update(lo, hi, rows, step, order=order)
            return
        owns = [np.full(SIZE, np.nan, rows.dtype) for _ in ranges]
        sums = [
            self.updater.prepare(lo, hi, rows, own, step, order=order)
            for own, (lo, hi) in zip(owns, ranges, strict=True)
        ]
        assert all(part.shape == (self.updater.n_sums,) for part in sums)
        for own, (lo, hi) in zip(owns, ranges, strict=True):
            self.updater.finish(lo, hi, own, sum(sums), step)

    def everything(self):
        average = [] if self.average is None else [self.average]
        return np.concatenate([self.params, *self.slots.values(), *average])


def reference(o, gradients, moving=None):
    """Return the parameters, or with ``moving`` their averages, by the formulas of papers and PyTorch in float64."""
    p = draw(0)
    average = p.copy()
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    decayed, factors = np.zeros(SIZE), np.ones(SIZE)
    for entry in LAYOUT.entries:
        factors[entry.start : entry.stop] = o.by_name(entry.name).rate_factor
        decayed[entry.start : entry.stop] = entry.kind == "param" and o.decays(entry.name)
    state = np.arange(SIZE) >= TRAINED
    for t, raw in enumerate(gradients):
        rate, g, before = o.rate(t) * factors, np.where(state, 0, raw), p.copy()
        if o.clip_norm is not None:
            g = g * min(1.0, o.clip_norm / np.linalg.norm(g))
        g = g + o.l2 * decayed * p
        if not o.layerwise:
            p = p * (1 - rate * o.weight_decay * decayed)
        if isinstance(o, optim.lars):
            u = entrywise(o, lambda w, u: o.trust * norm(w) / (norm(u) + o.weight_decay * norm(w)), p, g) * (
                g + o.weight_decay * decayed * p
            )
            m = o.momentum * m + rate * u
            p = p - m
        elif isinstance(o, optim.momentum):
            m = o.momentum * m + g
            p = p - rate * (g + o.momentum * m if o.nesterov else m)
        elif isinstance(o, optim.adam):
            m = o.beta1 * m + (1 - o.beta1) * g
            v = o.beta2 * v + (1 - o.beta2) * g * g
            u = m / (1 - o.beta1 ** (t + 1)) / (np.sqrt(v / (1 - o.beta2 ** (t + 1))) + o.eps)
            if isinstance(o, optim.lamb):
                u = u + o.weight_decay * decayed * p
                u = u * entrywise(o, lambda w, u: norm(w) / norm(u), p, u)
            p = p - rate * u
        elif isinstance(o, optim.adagrad):
            v = v + g * g
            p = p - rate * g / (np.sqrt(v) + o.eps)
        elif isinstance(o, optim.rmsprop):
            v = o.decay * v + (1 - o.decay) * g * g
            p = p - rate * g / (np.sqrt(v) + o.eps)
        else:
            p = p - rate * g
        p = np.where(state, before + raw, p)
        if moving is not None:
            decay = moving.decay_at(t)
            average = np.where(state, p, decay * average + (1 - decay) * p)
    return p if moving is None else average


def reference_of_groups(o, gradients):
    """Return each parameter from a ``reference`` in which all parameters have the options of its group."""
    p = np.zeros(SIZE)
    for entry in LAYOUT.entries:
        part = slice(entry.start, entry.stop)
        p[part] = reference(o.by_name(entry.name), gradients)[part]
    return p


def norm(x):
    return np.sqrt(np.sum(x * x))


def entrywise(o, ratio, params, direction):
    ratios = np.ones(SIZE)
    for e in LAYOUT.entries:
        if e.kind == "param" and o.decays(e.name):
            part = slice(e.start, e.stop)
            ratios[part] = ratio(params[part], direction[part])
    return ratios


ALL = [
    *ELEMENTWISE,
    optim.sgd(0.1, clip_norm=1.5),
    optim.adam(0.01, l2=0.1, clip_norm=0.5),
    optim.momentum(0.1, clip_norm=1e9),
    optim.lamb(0.01, weight_decay=0.1),
    optim.lamb(0.01, decay_names="*"),
    optim.lars(0.5, weight_decay=0.01),
    optim.lamb(0.01, rate_factors={"dense2.*": 3}),
    optim.momentum(0.1, clip_norm=0.5, rate_factors={"dense1.*": 3}),
    optim.lars(0.5, weight_decay=0.01, clip_norm=2.0, decay_names=["*"]),
]


def weights():
    return np.concatenate([np.arange(e.start, e.stop) for e in LAYOUT.entries if e.name.endswith(".weight")])


@dataclass(frozen=True)
class amsgrad(optim.Optimizer):
    """Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, 2018, algorithm 2, without bias correction."""

    beta1: float = 0.9
    beta2: float = 0.99

    slots = ("mean", "square", "largest")

    def update(self, params, grads, slots, rate, step):
        slots["mean"] += (1 - self.beta1) * (grads - slots["mean"])
        slots["square"] += (1 - self.beta2) * (grads * grads - slots["square"])
        np.maximum(slots["largest"], slots["square"], out=slots["largest"])
        params -= rate * slots["mean"] / (np.sqrt(slots["largest"]) + 1e-8)


@dataclass(frozen=True)
class lamb_of_amsgrad(amsgrad):
    """Steps of ``amsgrad``, scaled by trust ratios as in LAMB."""

    @property
    def trust_ratio(self):
        return optim.TrustRatio()


@dataclass(frozen=True)
class lars_of_amsgrad(amsgrad):
    """``amsgrad`` with gradients that are scaled by trust ratios as in LARS."""

    @property
    def trust_ratio(self):
        return optim.TrustRatio(0.1, after_rule=False)


GROUPED = [
    optim.sgd(0.1, l2=0.1, groups={"*.bias": {"learning_rate": 0.3}, "dense2.weight": {"l2": 0.0}}),
    optim.momentum(0.1, groups={"dense2.*": {"momentum": 0.5, "nesterov": True}, "dense1.bias": {"weight_decay": 0.3}}),
    optim.adam(0.01, groups={"*.weight": {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "l2": 0.1}, "*.bias": {"l2": 0.2}}),
    optim.adamw(
        0.01, groups={"dense1.*": {"learning_rate": optim.exponential(0.1, 0.5, 3)}}, rate_factors={"*.bias": 2}
    ),
    optim.adam(0.01, clip_norm=0.5, groups={"dense2.*": {"beta1": 0.5, "weight_decay": 0.2}}),
    optim.lamb(0.01, groups={"dense2.*": {"weight_decay": 0.3, "beta1": 0.5}, "*.bias": {"weight_decay": 0.0}}),
    optim.lars(0.5, clip_norm=1.0, groups={"dense1.*": {"trust": 0.1, "momentum": 0.5, "weight_decay": 0.1}}),
]
