"""Sequential and Residual: names, errors that name the layer, and the order of backward passes."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.errors import JobError

from ...support.gradients import bound


class Recorder(nn.Layer):
    """Returns its input and records calls of backward; has a parameter if ``params``."""

    def __init__(self, calls, label, params=False, name=None):
        super().__init__(name)
        self.calls, self.label, self.params = calls, label, params

    def build(self, shape):
        if self.params:
            self.declare("weight", (1,), nn.ones)
        return shape

    def forward(self, x, ctx):
        return x

    def backward(self, dy):
        self.calls.append(self.label)
        return dy if self.needs_dx else None


def test_children_are_named_after_their_class_and_place_among_it():
    model = nn.Sequential(
        nn.Conv2D(1, 2, 3),
        nn.ReLU(),
        nn.Conv2D(2, 2, 3, name="last-conv"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Sequential(nn.Dense(8, 8), nn.Residual(nn.Dense(8, 8), name="skip")),
        nn.Dense(8, 3, name="head"),
        nn.Dense(3, 2),
    )
    names = [name for name, _ in model.children()]
    assert names == ["conv2d1", "relu1", "last-conv", "relu2", "flatten1", "sequential1", "head", "dense2"]
    layout = nn.layout_of(model, (2, 2, 1), np.float32)
    assert [entry.name for entry in layout.entries][4:9] == [
        "sequential1.dense1.weight",
        "sequential1.dense1.bias",
        "sequential1.skip.dense1.weight",
        "sequential1.skip.dense1.bias",
        "head.weight",
    ]
    indices = [layer.index for _, layer in nn.walk(model)]
    assert indices == list(range(len(indices)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(), "Sequential"),
        (lambda: nn.Residual(), "Residual"),
        (lambda: nn.Sequential(nn.Dense), repr(nn.Dense)),
        (lambda: nn.Sequential([nn.ReLU()]), "[<mpitrain.nn.activation.ReLU"),
        (lambda: nn.Sequential(nn.Dense(2, 2, name="a"), nn.ReLU(name="a")), " 'a'"),
        (lambda: nn.Sequential(nn.Dense(2, 2, name="dense2"), nn.Dense(2, 2)), " 'dense2'"),
        (lambda: nn.Sequential(nn.ReLU(name="")), " ''"),
        (lambda: nn.Sequential(nn.ReLU(name="a.b")), " 'a.b'"),
        (lambda: nn.Sequential(nn.ReLU(name="a\nb")), " 'a\\nb'"),
        (lambda: nn.Sequential(*[nn.ReLU()] * 2), "Sequential"),
        (lambda: (lambda r: nn.Sequential(r, nn.Residual(r)))(nn.ReLU()), "Sequential"),
    ],
)
def test_layers_that_cannot_be_a_model_are_refused(make, words):
    with pytest.raises(JobError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Dense(5, 4), nn.ReLU(), nn.Dense(3, 2)), ["dense2: ", "(3,)", "(4,)"]),
        (nn.Sequential(nn.Conv2D(1, 2, 3)), ["conv2d1: ", "(height, width, 1)", "(5,)"]),
        (nn.Sequential(nn.Residual(nn.Dense(3, 2), name="skip")), ["skip: dense1: "]),
        (nn.Sequential(nn.Residual(nn.Dense(5, 4))), ["residual1: ", "(5,)", "(4,)"]),
    ],
)
def test_a_layer_that_cannot_take_what_comes_to_it_is_named_by_its_path(model, words):
    with pytest.raises(JobError) as error:
        nn.layout_of(model, (5,), np.float32)
    message = str(error.value)
    assert message.startswith(words[0]) and all(word in message for word in words)


def test_backward_stops_at_the_first_parameters_and_reports_each_child_before_the_next():
    calls: list[object] = []
    model = nn.Sequential(
        Recorder(calls, "a"),
        nn.Sequential(Recorder(calls, "b"), Recorder(calls, "c", params=True), Recorder(calls, "d")),
        Recorder(calls, "e"),
        Recorder(calls, "f", params=True),
    )
    bound(model, (2,))
    model.after_backward = calls.append
    model.forward(np.ones((1, 2)), nn.Context())
    assert model.backward(np.ones((1, 2))) is None
    assert calls == ["f", 3, "e", 2, "d", "c", 1]
    needs = {layer.label: layer.needs_dx for _, layer in nn.walk(model) if isinstance(layer, Recorder)}
    assert needs == {"a": False, "b": False, "c": False, "d": True, "e": True, "f": True}


def test_a_model_without_parameters_has_nothing_to_run_backward():
    calls: list[object] = []
    model = nn.Sequential(Recorder(calls, "a"), nn.Residual(Recorder(calls, "b")))
    bound(model, (2,))
    model.forward(np.ones((1, 2)), nn.Context())
    assert model.backward(np.ones((1, 2))) is None and calls == []


def test_a_residual_first_in_a_model_needs_no_input_gradient():
    model = nn.Sequential(nn.Residual(nn.Dense(3, 3)), nn.Dense(3, 1))
    bound(model, (3,))
    x = np.random.default_rng(0).standard_normal((4, 3))
    model.forward(x, nn.Context())
    assert model.backward(np.ones((4, 1))) is None
    np.testing.assert_allclose(model.layers[0].layers[0].weight_grad, x.T @ np.ones((4, 1)) @ model.layers[1].weight.T)


def test_a_relu_overwrites_only_what_nobody_else_reads():
    """A ReLU may overwrite the output of Dense, but not that of Tanh, nor the input of the model or of Residual."""
    relus = [nn.ReLU() for _ in range(4)]
    model = nn.Sequential(
        relus[0], nn.Dense(3, 3), relus[1], nn.Residual(relus[2], nn.Dense(3, 3)), nn.Tanh(), relus[3]
    )
    bound(model, (3,))
    assert [relu.in_place for relu in relus] == [False, True, False, False]


def test_initial_values_depend_on_the_seed_and_the_name_alone():
    def weights(seed, *layers):
        model = nn.Sequential(*layers)
        layout, params, _ = bound(model, (4,), seed=seed)
        return layout.views(params)

    first = weights(0, nn.Dense(4, 3), nn.Dense(3, 2))
    longer = weights(0, nn.Dense(4, 3), nn.ReLU(), nn.Dense(3, 2), nn.Dense(2, 2))
    np.testing.assert_array_equal(first["dense2.weight"], longer["dense2.weight"])
    assert (first["dense1.weight"] != weights(1, nn.Dense(4, 3), nn.Dense(3, 2))["dense1.weight"]).all()


@pytest.mark.parametrize(
    ("model", "takes_integers"),
    [
        (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten()), True),
        (lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Reshape(2, 3), nn.Embedding(5, 3))), True),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Embedding(5, 3)), False),
        (lambda: nn.Sequential(nn.Dense(2, 3)), False),
        (lambda: nn.Residual(nn.Embedding(5, 3)), False),
    ],
)
def test_a_model_takes_integers_if_the_first_layer_that_reads_them_does(model, takes_integers):
    assert model().integer_inputs == takes_integers
