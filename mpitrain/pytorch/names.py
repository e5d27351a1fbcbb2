"""The names of a module's parameters and buffers, as in ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_COMPILED = "_orig_mod."  # torch.compile adds this prefix to the names of the module that it wraps


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, with its first name in ``state_dict``."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the further names of shared parameters and buffers, each with the first name."""
    first: dict[int, str] = {}
    aliases = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, parameter in named(remove_duplicate=False):
            first_name = first.setdefault(id(parameter), plain_name(name))
            if first_name != plain_name(name):
                aliases[plain_name(name)] = first_name
    return aliases


def plain_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the prefix that ``torch.compile`` adds."""
    return f"{name}.".replace(_COMPILED, "").rstrip(".")
