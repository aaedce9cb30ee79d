"""Calibrated packing: a walk over a model in which each block's matrices are rounded with their
inputs in view.

Only one block is held. Two hidden states for each sequence lie in a file map: the model's own, and
that of the model rounded so far. Layers are rounded in the order of their calls, each to give, on
the rounded model's inputs, what the model's own layer gives on its own (J. Li et al., "GPTAQ",
2025: asymmetric calibration); a layer that is added to the hidden state makes up for the error that
is in it as well, the embedding's and the earlier blocks'."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blockwalk.cutting.calls import BlockCall, Prologue
from blockwalk.cutting.cut_model import CutModel
from blockwalk.engine.second_order import compensated, encode_fitted, encode_with_inputs, has_grid
from blockwalk.numerics.codecs.layout import Layout, name_of
from blockwalk.numerics.codecs.weights import DenseWeight, EncodedWeight, Value
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import spans
from blockwalk.tiers.disk import MappedFile
from blockwalk.tiers.protocols import WeightSource

Tensors = Mapping[str, Tensor]
Values = Mapping[str, Value]

_ROWS_AT_ONCE = 4096
"""Rows of an embedding that are rounded at a time."""

_SAME = 1e-3
"""The difference between two answers of a block that is rounding, as a share of its hidden state's
deviation."""


class _ReachedError(Exception):
    """The exception that ends a block's run where nothing after it is wanted."""


class Calibrated:
    """A model's parameters in the order of the walk, the matrices of blocks' linear layers already
    in their codec.

    Embeddings and the head are rounded to nearest, on the scales of the least squared error. Fused
    experts, GPT-2's transposed layers and layers that the first sequence does not reach are left to
    be rounded to nearest as ever.

    Args:
        source: the parameters as they came.
        cut: the model, computing in float32.
        sequences: token ids, int64 [S] each.
        folder: where the hidden states are kept; it must be empty.

    Raises:
        ValueError: blocks of the model hand tensors to one another beside the hidden state.
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
        if cut.anatomy.hands_on:
            raise ValueError(
                f"{type(cut.base).__name__} hands keys and values from block to block, and"
                " calibration follows the hidden"
                " state alone: pack it without --calibrate"
            )
        self._source = source
        self._cut = cut
        self._sequences = sequences
        self._codec = codec
        self._group_size = group_size
        self._place = {
            param.name: (unit, param)
            for unit, unit_spec in enumerate(cut.spec().units)
            for param in unit_spec.params
        }
        self._done = 0
        self._rounded = dict[str, Value]()
        ends = [0, *accumulate(len(ids) for ids in sequences)]
        shape = (2, ends[-1], cut.spec().hidden_size)
        self._hidden = MappedFile(folder / "hidden", length=4 * math.prod(shape))
        whole_2TD = self._hidden.view(0, self._hidden.nbytes, torch.float32, shape)
        self._hidden_2SD = [whole_2TD[:, a:b] for a, b in pairwise(ends)]

    def close(self) -> None:
        self._hidden.close()

    def weight(self, name: str) -> Value:
        """Return a parameter by name; they are asked for in the order of the walk."""
        unit, param = self._place[name]
        if 0 < unit < self._cut.epilogue_index:
            while self._done < unit:
                self._walk(self._done + 1)
            assert self._done == unit, "parameters are asked for in the order of the walk"
        elif self._fits(param):
            return self._outside(param, rounded=True)
        return self._rounded.get(name) or self._source.weights([name])[name]

    def _outside(self, param: ParamSpec, rounded: bool) -> Value:
        """Return a parameter outside of the blocks to compute with, in its codec if it is to be
        rounded and has one."""
        value = self._source.weights([param.name])[param.name]
        if isinstance(value, Tensor):
            value = DenseWeight(value, torch.float32) if value.dim() == 2 else value.float()
        if not rounded or not self._fits(param) or isinstance(value, Tensor):
            return value
        layout = self._layout(param)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        for start, stop in spans(0, layout.rows, _ROWS_AT_ONCE):
            encode_fitted(value.rows(start, stop).float(), buffer, layout, start)
        return EncodedWeight(buffer, layout, torch.float32)

    @torch.no_grad()
    def _walk(self, unit: int) -> None:
        """Round one block, and leave the next one's inputs."""
        params = self._cut.spec().blocks[unit - 1].params
        values = {param.name: torch.empty(param.shape) for param in params}
        for name, value in values.items():
            self._source.read_into(name, value)
        if unit == 1:
            for rounded in (False, True):
                for hidden_2SD, prologue in self._inputs(rounded):
                    hidden_2SD[int(rounded)].copy_(prologue.hidden_BSD.squeeze(0))
        self._rounded = {}
        layouts = {param.name: self._layout(param) for param in params if self._fits(param)}
        groups, added = self._calls(unit, values, layouts)
        for group in groups:
            leader = group[0]
            lost = {name: torch.zeros_like(values[name]) for name in group}
            gram_KK = torch.zeros(2 * [layouts[leader].columns])
            for hidden_2SD, prologue in self._inputs():
                call = prologue.calls[unit - 1]
                model_SD, rounded_SD = hidden_2SD
                model_calls = self._run(call, values, model_SD, until=leader)
                rounded_values = {**values, **self._rounded}
                rounded_calls = self._run(call, rounded_values, rounded_SD, until=leader)
                input_SK = rounded_calls[leader][0].flatten(0, -2)
                moved_SK = model_calls[leader][0].flatten(0, -2) - input_SK
                differences = [
                    (model_calls[name][1] - rounded_calls[name][1]).view_as(model_SD)
                    for name in rounded_calls
                    if name in added and name != leader
                ]
                behind_SD = sum(differences, model_SD - rounded_SD)
                gram_KK.addmm_(input_SK.t(), input_SK)
                for name, lost_NK in lost.items():
                    lacking_SN = linear(moved_SK, values[name])
                    if name in added:
                        lacking_SN = lacking_SN + behind_SD
                    lost_NK.addmm_(lacking_SN.t(), input_SK)
            for name, lost_NK in lost.items():
                buffer = torch.empty(layouts[name].nbytes, dtype=torch.uint8)
                encode_with_inputs(
                    compensated(values[name], gram_KK, lost_NK), gram_KK, buffer, layouts[name]
                )
                self._rounded[name] = EncodedWeight(buffer, layouts[name], torch.float32)
        for hidden_2SD, prologue in self._inputs():
            for hidden_SD, changes in zip(hidden_2SD, ({}, self._rounded), strict=True):
                call = prologue.calls[unit - 1]
                calls = self._run(call, {**values, **changes}, hidden_SD.clone())
                hidden_SD.copy_(calls[""][1].squeeze(0))
        self._cut.unbind(unit)
        self._done = unit

    def _calls(
        self, unit: int, values: Tensors, wanted: Container[str]
    ) -> tuple[list[list[str]], set[str]]:
        """Group the linear layers of a block that share an input, in the order of their calls, and
        find those whose output is added to the residual stream.

        Adding noise to the stream and subtracting it from such an output leaves the block's result
        unchanged, while the additions before it are held."""
        hidden_2SD, prologue = next(self._inputs())
        call = prologue.calls[unit - 1]
        own_SD = hidden_2SD[0]
        noise_SD = own_SD.std() * torch.randn(
            own_SD.shape, generator=torch.Generator().manual_seed(0)
        )
        seen = self._run(call, values, own_SD)
        groups = dict[int, list[str]]()
        added = dict[str, Tensor]()
        for name, (input_BSK, output) in seen.items():
            of_all_tokens = input_BSK.shape[:-1].numel() == len(own_SD)  # an expert has some
            if name not in wanted or not of_all_tokens:
                continue
            groups.setdefault(id(input_BSK), []).append(name)
            if output.numel() == own_SD.numel():
                answers = {**added, name: output - noise_SD.view_as(output)}
                found_BSD = self._run(call, values, own_SD + noise_SD, answers)[""][1]
                if (found_BSD - seen[""][1]).abs().max() <= _SAME * own_SD.std():
                    added[name] = output
        return list(groups.values()), set(added)

    def _run(
        self,
        call: BlockCall,
        values: Values,
        hidden_SD: Tensor,
        answers: Tensors | None = None,
        until: str = "",
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the input and the output of each linear layer of a block by its weight's name, in
        the order of the calls, and the block's own by none; some may answer something else. It ends
        at the layer ``until``."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def note(
            name: str, _module: nn.Module, given: tuple[Tensor, ...], output: Tensor
        ) -> Tensor | None:
            seen[name] = given[0], output
            if name == until:
                raise _ReachedError
            return (answers or {}).get(name)

        self._cut.bind(call.unit, values)
        with ExitStack() as stack, suppress(_ReachedError):
            for name, module in self._cut.linears(call.unit).items():
                stack.callback(module.register_forward_hook(partial(note, name)).remove)
            seen[""] = hidden_SD, self._cut.forward(call, hidden_SD.unsqueeze(0))
        return seen

    def _inputs(self, rounded: bool = False) -> Iterator[tuple[Tensor, Prologue]]:
        """Yield for each sequence the block's inputs [2, S, D] (original model, model quantised so
        far) and the prologue, run with the original or with the ``rounded`` weights."""
        params = self._cut.spec().prologue.params
        self._cut.bind(0, {param.name: self._outside(param, rounded) for param in params})
        for ids_S, hidden_2SD in zip(self._sequences, self._hidden_2SD, strict=True):
            yield hidden_2SD, self._cut.prologue({"input_ids": ids_S.unsqueeze(0)})
        self._cut.unbind(0)

    def _fits(self, param: ParamSpec) -> bool:
        return param.quantizable and len(param.shape) == 2 and has_grid(self._layout(param))

    def _layout(self, param: ParamSpec) -> Layout:
        return Layout(
            param.shape, self._codec, name_of(self._source.dtype(param.name)), self._group_size
        )
