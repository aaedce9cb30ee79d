"""Whether the blocks of a model take several forwards as one batch, found by trying."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from blockwalk.cutting.calls import joined_call
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import SEED, TOLERANCE, difference


def takes_joint_forwards(cut: CutModel, batch: Mapping[str, Tensor]) -> bool:
    """Return whether every block answers three batches at once as it answers one after the other.

    The batches have one sequence each, then two, and each has linear weights and vectors of its
    own."""
    generator = torch.Generator().manual_seed(SEED)

    def near(tensor: Tensor) -> Tensor:
        return tensor.detach() + torch.randn(tensor.shape, generator=generator)

    parameters = dict(cut.model.named_parameters())
    for rows in (1, 2):
        shortened = {name: tensor[:rows] for name, tensor in batch.items()}
        for call in cut.prologue(shortened).calls:
            linears = cut.linears(call.unit)
            changed = {
                param.name: parameters[param.name]
                for param in cut.spec().units[call.unit].params
                if len(param.shape) == 1 or param.name in linears
            }
            values = [{name: near(tensor) for name, tensor in changed.items()} for _ in range(3)]
            shape = (rows, batch["input_ids"].shape[1], cut.spec().hidden_size)
            inputs = [near(torch.zeros(shape)) for _ in values]
            separate = []
            joint = None
            # whatever a block raises, it does not take them so
            with torch.no_grad(), suppress(Exception):
                for input_BSD, value in zip(inputs, values, strict=True):
                    cut.bind(call.unit, value)
                    separate.append(cut.forward(call, input_BSD))
                if (joined := joined_call([call] * 3, rows, {})) is not None:
                    joint = cut.forward_together(joined, torch.cat(inputs), values)
            cut.unbind(call.unit)
            if joint is None or not difference(joint, torch.cat(separate)) <= TOLERANCE:
                return False
    return True
