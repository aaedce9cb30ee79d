"""The conversion of a checkpoint's tensors to a model's parameters: transformers' own mapping, as
values.

transformers 5 loads a checkpoint through renamings and converters (fused experts, split or permuted
projections, prefixes). :func:`resolve` runs those rules over names and meta tensors alone, once,
and answers one :class:`Recipe` per parameter, so that a parameter can be read alone, at any time,
without the rest of the model."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.numerics.codecs.layout import name_of
from blockwalk.plan.words import counted
from blockwalk.tiers.model_folder.stored import StoredTensor

View = Callable[["StoredTensor"], Tensor]
Rows = Callable[["StoredTensor", int, int], Tensor]
"""A reader of rows ``start:stop`` of a stored matrix."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """One of transformers' converters at work on the stored tensors of one place in the model.

    ``patterns`` says for each source which of the converter's patterns it answers to; ``target`` is
    the name of the first parameter that comes out, by which a converter names its results.
    ``model`` has what a converter may ask of a model: its parameters' shapes, as meta tensors, and
    its configuration."""

    converter: Any
    target: str
    patterns: tuple[str, ...]
    model: Any

    @property
    def stacks(self) -> bool:
        """Whether experts are stacked along dim 0 (several matrices of one expert above one another
        along dim 1)."""
        operations = [
            (type(op).__name__, getattr(op, "dim", None)) for op in self.converter.operations
        ]
        return operations in (
            [("MergeModulelist", 0)],
            [("MergeModulelist", 0), ("Concatenate", 1)],
        )

    def run(self, sources: Sequence[StoredTensor], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return every result by parameter name; meta tensors answer meta tensors."""
        converter = copy.deepcopy(self.converter)
        for stored, pattern, tensor in zip(sources, self.patterns, tensors, strict=True):
            converter.add_tensor(self.target, stored.key, pattern, tensor)
        results = converter.convert(self.target, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in results.items()
        }

    def shapes(self, sources: Sequence[StoredTensor]) -> dict[str, tuple[int, ...]] | str:
        """Return the results' shapes by parameter name, or why these sources cannot be
        converted."""
        try:
            results = self.run(
                sources, [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources]
            )
        except (
            Exception
        ) as error:  # whatever transformers' operations raise over shapes that do not fit
            return f"made of {_some([s.key for s in sources], 3)}: {type(error).__name__}: {error}"
        return {name: tuple(tensor.shape) for name, tensor in results.items()}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources of one parameter: one stored tensor as it is, or several that a conversion joins.
    Its dtype is theirs.

    ``name`` is the parameter's name in the model, which for a tied weight need not be the canonical
    one."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    conversion: Conversion | None = None

    def misfit(self) -> str:
        """The reason why the sources do not make this parameter, or "" where they do."""
        shape: tuple[int, ...] | str | None = self.sources[0].shape
        if self.conversion is not None:
            shapes = self.conversion.shapes(self.sources)
            shape = shapes if isinstance(shapes, str) else shapes.get(self.name)
        return (
            "" if shape == self.shape else f"{self.name} (model {self.shape}, checkpoint {shape})"
        )

    def read_into(self, out: Tensor, view: View) -> None:
        """Write the parameter into ``out`` (of its shape, any floating dtype). Stacking experts
        takes no memory."""
        if self.conversion is None:
            out.copy_(view(self.sources[0]))
        elif self.conversion.stacks:
            for stored, expert, row in self.stacked():
                out[expert].narrow(0, row, stored.shape[0]).copy_(view(stored))
        else:
            out.copy_(self.conversion.run(self.sources, [view(s) for s in self.sources])[self.name])

    def stacked(self) -> Iterator[tuple[StoredTensor, int, int]]:
        """Yield the matrices that are stacked, each with the number of its expert and its first row
        there."""
        assert self.conversion is not None
        row = 0
        for pattern in self.conversion.converter.source_patterns:
            experts = [
                s
                for s, p in zip(self.sources, self.conversion.patterns, strict=True)
                if p == pattern
            ]
            for expert, stored in enumerate(experts):
                yield stored, expert, row
            row += experts[0].shape[0]

    def read_range_into(self, start: int, out_P: Tensor, view: View, rows: Rows) -> None:
        """Write the flat parameter's elements from ``start`` on into ``out_P`` (any floating
        dtype). Of stacked experts the rows that lie there are read, and no others."""
        if self.conversion is None or not self.conversion.stacks:
            whole = torch.empty(self.shape, dtype=self.sources[0].dtype)
            self.read_into(whole, view)
            out_P.copy_(whole.view(-1)[start : start + len(out_P)])
            return
        stop = start + len(out_P)
        _, height, columns = self.shape
        for stored, expert, row in self.stacked():
            begin = (expert * height + row) * columns
            first = max(start, begin)
            last = min(stop, begin + stored.shape[0] * columns)
            if first >= last:
                continue
            first_row = (first - begin) // columns
            rows_RD = rows(stored, first_row, -(-(last - begin) // columns))
            skipped = first - begin - first_row * columns
            part_P = rows_RD.reshape(-1)[skipped : skipped + last - first]
            out_P[first - start : last - start].copy_(part_P)


def resolve(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    view: View,
    where: str,
    *,
    all_used: bool = False,
) -> tuple[dict[str, Recipe], dict[str, dict[str, str]]]:
    """Return recipes for every parameter and persistent buffer of ``model``, by canonical name; and
    by that of a tied one, the further tensors that hold it: their keys by its other names.

    Args:
        model: a plain transformers model on any device; only names and shapes are read.
        stored: the checkpoint's tensors, by their names in it.
        view: reads a stored tensor; used only where a checkpoint holds two tensors that the model
            ties, to compare.
        where: the checkpoint's name in messages.
        all_used: whether a tensor that the model does not use is an error, and not a warning.

    Raises:
        ValueError: missing or misshaped tensors, all of them, by name; tied weights that differ;
            numbers that are codes; with ``all_used`` tensors that the model does not use.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    recipes, extra = _match(model, state, stored)
    _refuse_codes(state, recipes, [stored[key] for key in extra], where)
    misshaped = [text for text in (recipe.misfit() for recipe in recipes.values()) if text]
    recipes, missing, duplicates = _untie(model, state, recipes, None if misshaped else view)

    missing = _without(missing, _patterns(model, "_keys_to_ignore_on_load_missing"))
    extra = _without(extra, _patterns(model, "_keys_to_ignore_on_load_unexpected"))
    extra = _without(extra, _SAVED_BY_OLDER_VERSIONS)
    if missing or misshaped:
        kinds = (("missing", missing), ("misshaped", misshaped), ("unknown to the model", extra))
        parts = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds if names]
        raise ValueError(f"{where} does not fit {type(model).__name__}: {'; '.join(parts)}")
    if extra:
        text = (
            f"{where} has {counted(len(extra), 'tensor')} that {type(model).__name__} does not"
            f" use: {_some(extra)}"
        )
        if all_used and (parts := _that_count(model, [stored[key] for key in extra], view)):
            text = (
                f"{where} has {counted(len(parts), 'tensor')} that {type(model).__name__} does not"
                f" use: {_some(parts)}"
            )
            raise ValueError(
                f"{text}. A model without them is another one than the file's, and is not trained"
            )
        warnings.warn(text, stacklevel=3)
    return recipes, duplicates


_FURTHER_TOKENS = re.compile(r"(^|\.)(mtp|nextn|mtp_\w+|nextn_\w+)\.")
"""Names of heads that predict tokens beyond the next."""


def _that_count(model: nn.Module, unused: Sequence[StoredTensor], view: View) -> list[str]:
    """Return names of the tensors without which a model is another one: not those of heads that
    predict further tokens, which stand apart or as layers beyond the last, and no zero biases,
    which GPTQ's tools add."""
    config: Any = model.config
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)

    def predicts_further(key: str) -> bool:
        layer = re.search(r"(^|\.)layers\.(\d+)\.", key)
        beyond = layer is not None and layers is not None and int(layer.group(2)) >= layers
        return beyond or _FURTHER_TOKENS.search(key) is not None

    return [
        tensor.key
        for tensor in unused
        if not predicts_further(tensor.key)
        and not (tensor.key.endswith(".bias") and not bool(view(tensor).any()))
    ]


_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SAVED_BY_OLDER_VERSIONS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Patterns of names of buffers that are computed today."""
_SCALE = re.compile(r"(.*_)?(scales?|zeros?|zero_points?|absmax)(_inv|_\d)?")
"""Names of tensors that say what a quantised neighbour's codes stand for."""


def _refuse_codes(
    state: Mapping[str, Tensor],
    recipes: Mapping[str, Recipe],
    extra: Sequence[StoredTensor],
    where: str,
) -> None:
    """Raise ValueError where a floating parameter is stored in a dtype of codes, or beside a scale
    that nothing reads. A buffer is converted instead, as transformers does it."""
    sources = {
        source.key: (name, source) for name, recipe in recipes.items() for source in recipe.sources
    }
    advice = "give the model in bfloat16, float16 or float32, not a quantised one"
    for name, source in sources.values():
        param = state[name]
        if (
            isinstance(param, torch.nn.Parameter)
            and param.is_floating_point()
            and source.dtype not in _PLAIN
        ):
            raise ValueError(
                f"{where}/{source.file}: {source.key} is stored in {name_of(source.dtype)}, and"
                f" {name} would read its codes as if they were the weights; {advice}"
            )
    owners = {key.rpartition(".")[0]: key for key in sources}
    for scale in extra:
        owner, _, leaf = scale.key.rpartition(".")
        if _SCALE.fullmatch(leaf) and owner in owners:
            raise ValueError(
                f"{where}/{scale.file}: {scale.key} ({name_of(scale.dtype)}) scales"
                f" {owners[owner]}, which"
                f" would be read without it; {advice}"
            )


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (
        f", and {len(names) - most} more" if len(names) > most else ""
    )


def _patterns(model: nn.Module, attribute: str) -> tuple[str, ...]:
    """Return a transformers model's list of regular expressions, which may be None."""
    return tuple(getattr(model, attribute, None) or ())


def optional(model: nn.Module, name: str) -> bool:
    """Return whether transformers lets a checkpoint of ``model`` leave a tensor out without a
    word."""
    return not _without([name], _patterns(model, "_keys_to_ignore_on_load_missing"))


def _without(names: Sequence[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that none of the regular expressions finds."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _match(
    model: nn.Module, state: dict[str, Tensor], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, Recipe], list[str]]:
    """Give each stored tensor to the parameter that it makes, by transformers' rules and in
    transformers' order (``convert_and_load_state_dict_in_model``); the second answer names those
    that make none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    plain: Any = model
    mapping = get_model_conversion_mapping(plain)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    meta = {name: tensor.detach().to("meta") for name, tensor in state.items()}
    prefix = plain.base_model_prefix
    shapes = SimpleNamespace(config=plain.config, get_parameter=meta.__getitem__)

    recipes: dict[str, Recipe] = {}
    groups: dict[str, list[tuple[str, StoredTensor]]] = {}
    extra: list[str] = []
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            extra.append(key)
        elif pattern is None:
            recipes[name] = Recipe(name, tuple(state[name].shape), (stored[key],))
        else:
            groups.setdefault(name, []).append((pattern, stored[key]))

    for target, members in groups.items():
        patterns = tuple(p for p, _ in members)
        sources = tuple(s for _, s in members)
        conversion = Conversion(by_pattern[patterns[0]], target, patterns, shapes)
        results = conversion.shapes(sources)
        for name in (target,) if isinstance(results, str) else results:
            if name in state:
                recipes[name] = Recipe(name, tuple(state[name].shape), sources, conversion)
    return recipes, extra


def _untie(
    model: nn.Module, state: Mapping[str, Tensor], recipes: Mapping[str, Recipe], view: View | None
) -> tuple[dict[str, Recipe], list[str], dict[str, dict[str, str]]]:
    """Return one recipe a tensor, under its canonical name and in the model's order; the second
    answer names the missing, the third further tensors of the checkpoint that hold the same: keys
    by the tensor's other names.

    A checkpoint may hold a tied weight under any of its names. Where it holds several they must be
    equal."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *state.items()]:
        names = aliases.setdefault(id(tensor), [])
        if name not in names:
            names.append(name)
    untied: dict[str, Recipe] = {}
    missing: list[str] = []
    duplicate_keys: dict[str, dict[str, str]] = {}
    for names in aliases.values():
        stored = [recipes[name] for name in names if name in recipes]
        if not stored:
            missing.append(names[0])
            continue
        kept, *duplicates = stored
        untied[names[0]] = kept
        if duplicates:
            duplicate_keys[names[0]] = {recipe.name: recipe.sources[0].key for recipe in duplicates}
        for recipe in duplicates if view else ():
            assert view is not None
            sources = (kept.sources[0], recipe.sources[0])
            if sources[0].dtype == sources[1].dtype and torch.equal(*map(view, sources)):
                continue
            raise ValueError(
                f"the configuration ties {kept.name} to {recipe.name}, but the checkpoint holds"
                " different values for them: set tie_word_embeddings to false in its config.json"
            )
    return untied, missing, duplicate_keys
