"""The parameters that weight decay spares: norms and biases, by the rule of transformers'
Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:\.|$)|_norm(?:\.|$)")
"""Lower-case names that ``Trainer.get_decay_parameter_names`` leaves out. Layers of
``nn.LayerNorm`` go by their type."""


def spared_by_decay(model: nn.Module, canonical: Callable[[str], str]) -> frozenset[str]:
    """Find the parameters that weight decay spares, by canonical name.

    Args:
        model: the model as it is trained, its adapters included.
        canonical: a parameter's canonical name, of its name in ``model``.
    """
    spared = set()
    for path, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(module, nn.LayerNorm) or _SPARED.search(name.lower()):
                spared.add(canonical(name))
    return frozenset(spared)
