"""Calibrated packing: a walk over a model in which each block's matrices are rounded with the block's inputs in view.

Only one block is held. Its inputs, one hidden state for each sequence, lie in a file map; the block runs once to sum up its
linear layers' inputs, and once more, rounded, to make the next block's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from blockwalk.cutting.calls import BlockCall
from blockwalk.cutting.cut_model import CutModel
from blockwalk.engine.second_order import encode_with_inputs, has_grid
from blockwalk.numerics.codecs.layout import Layout, name_of
from blockwalk.numerics.codecs.weights import DenseWeight, EncodedWeight, Value
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import Codec
from blockwalk.tiers.disk import MappedFile
from blockwalk.tiers.protocols import WeightSource


class Calibrated:
    """A model's parameters in the order of the walk, the matrices of blocks' linear layers already in their codec.

    Embeddings, the head, fused experts and GPT-2's transposed layers are left to be rounded to nearest.

    Args:
        source: the parameters as they came.
        cut: the model, computing in float32.
        sequences: token ids, int64 [S] each.
        folder: where the hidden states are kept; it must be empty.
    """

    def __init__(
        self,
        source: WeightSource,
        cut: CutModel,
        sequences: Sequence[Tensor],
        codec: Codec,
        group_size: int,
        folder: Path,
    ) -> None:
        self._source, self._cut, self._sequences = source, cut, sequences
        self._codec, self._group_size = codec, group_size
        self._unit_of = {param.name: unit for unit, each in enumerate(cut.spec().units) for param in each.params}
        self._done, self._rounded = 0, dict[str, Value]()
        ends = [0, *accumulate(len(ids) for ids in sequences)]
        width = cut.spec().hidden_size
        self._hidden = MappedFile(folder / "hidden", writable=True, length=4 * width * ends[-1])
        whole_TD = self._hidden.view(0, self._hidden.nbytes, torch.float32, (ends[-1], width))
        self._hidden_SD = [whole_TD[a:b] for a, b in pairwise(ends)]

    def close(self) -> None:
        self._hidden.close()

    def weight(self, name: str) -> Value:
        """A parameter by name; they are asked for in the order of the walk."""
        unit = self._unit_of.get(name, 0)
        if 0 < unit < self._cut.epilogue_index:
            while self._done < unit:
                self._walk(self._done + 1)
            assert self._done == unit, "parameters are asked for in the order of the walk"
        return self._rounded.get(name) or self._source.weights([name])[name]

    @torch.no_grad()
    def _walk(self, unit: int) -> None:
        """Round one block, and leave the next one's inputs."""
        params = self._cut.spec().blocks[unit - 1].params
        values: dict[str, Tensor] = {param.name: torch.empty(param.shape) for param in params}
        for name, value in values.items():
            self._source.read_into(name, value)
        self._cut.bind(unit, values)
        grams = self._grams(unit, params)
        self._rounded = {}
        for param in params:
            if (gram_DD := grams.pop(param.name, None)) is not None:
                layout = self._layout(param)
                buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
                encode_with_inputs(values[param.name], gram_DD, buffer, layout)
                self._rounded[param.name] = EncodedWeight(buffer, layout, torch.float32)
        self._cut.bind(unit, {**values, **self._rounded})
        del values
        for hidden_SD, call in self._inputs(unit):
            hidden_SD.copy_(self._cut.forward(call, hidden_SD.clone().unsqueeze(0)).squeeze(0))
        self._cut.unbind(unit)
        self._done = unit

    def _inputs(self, unit: int) -> Iterator[tuple[Tensor, BlockCall]]:
        """The input of a block [S, D] and its call, for each sequence: what comes before the blocks is run again, on one
        sequence at a time."""
        params = self._cut.spec().prologue.params
        ends = self._source.weights(param.name for param in params)
        held = {
            n: DenseWeight(v, torch.float32) if isinstance(v, Tensor) and v.dim() == 2 else v for n, v in ends.items()
        }
        self._cut.bind(0, {n: v.float() if isinstance(v, Tensor) else v for n, v in held.items()})
        for ids_S, hidden_SD in zip(self._sequences, self._hidden_SD, strict=True):
            prologue = self._cut.prologue({"input_ids": ids_S.unsqueeze(0)})
            if unit == 1 and self._done == 0:
                hidden_SD.copy_(prologue.hidden_BSD.squeeze(0))
            yield hidden_SD, prologue.calls[unit - 1]
        self._cut.unbind(0)

    def _grams(self, unit: int, params: Sequence[ParamSpec]) -> dict[str, Tensor]:
        """X^T X of the inputs of each linear layer of a bound block, by its weight's name."""
        wanted = {p.name for p in params if p.quantizable and p.shape[1:] and has_grid(self._layout(p))}
        linears = {name: module for name, module in self._cut.linears(unit).items() if name in wanted}
        grams: dict[str, Tensor] = {}
        given_to: dict[str, Tensor] = {}

        def note(name: str, _module: nn.Module, given: tuple[Tensor, ...]) -> None:
            first = next((other for other, x in given_to.items() if x is given[0]), name)
            given_to[name], x_TD = given[0], given[0].flatten(0, -2)
            if first != name:
                grams[name] = grams[first]  # query, key and value have one input
            else:
                grams.setdefault(name, x_TD.new_zeros(x_TD.shape[1], x_TD.shape[1])).addmm_(x_TD.t(), x_TD)

        with ExitStack() as stack:
            for name, module in linears.items():
                stack.callback(module.register_forward_pre_hook(partial(note, name)).remove)
            for hidden_SD, call in self._inputs(unit):
                self._cut.forward(call, hidden_SD.unsqueeze(0))
                given_to.clear()
        return grams

    def _layout(self, param: ParamSpec) -> Layout:
        return Layout(param.shape, self._codec, name_of(self._source.dtype(param.name)), self._group_size)
