"""Readers of matrices whose codes, scales and zero points are tensors of their own: functions that
are put together.

A reader answers some rows and columns of a matrix [R, D]. The simplest ones read a tensor; others
look its codes up, turn it, or make ``(code − zero) · scale`` of several. A quantised checkpoint's
format is a reader of its tensors (:mod:`blockwalk.tiers.model_folder.quantised`). Products are
float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Index = slice | Tensor
"""Rows or columns, by number: a slice with both ends, or int64 [n]."""

Reader = Callable[[Index, Index], Tensor]
"""(rows, columns): the elements there, numbers or codes, [rows, columns]."""

Order = Callable[[Tensor], Tensor]
"""(numbers of neighbouring codes): their places in what they share."""


def numbers(tensor: Tensor) -> Reader:
    """Return the elements of a tensor [R, D]."""
    if tensor.dtype.is_floating_point and tensor.itemsize == 1:
        # an index does not know float8, and its casts are slow
        levels = torch.arange(256, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)
        return looked_up(numbers(tensor.view(torch.uint8)), levels.float())
    return lambda rows, columns: tensor[rows][:, columns]


def packed(tensor: Tensor, bits: int, dim: int = 1, order: Order | None = None) -> Reader:
    """Return codes of ``bits`` bits, several side by side in each element of an integer tensor
    along ``dim``; ``order`` answers the place in it of each, counted from the lowest bits, where it
    is not their own number."""
    per_element = 8 * tensor.itemsize // bits
    places = torch.arange(per_element, dtype=tensor.dtype, device=tensor.device)
    shifts = (order(places) if order else places) * bits

    def shifted(elements: Tensor, by: Tensor) -> Tensor:
        return elements >> (by[:, None] if dim == 0 else by) & (1 << bits) - 1

    def elements_of(index: Index, rows: Index, columns: Index) -> Tensor:
        return tensor[index][:, columns] if dim == 0 else tensor[rows][:, index]

    def read(rows: Index, columns: Index) -> Tensor:
        index = (rows, columns)[dim]
        if not isinstance(index, slice):
            elements = elements_of(index // per_element, rows, columns)
            return shifted(elements, shifts[index % per_element])
        # elements are taken apart whole, and what is asked for is cut out
        span = slice(index.start // per_element, -(-index.stop // per_element))
        codes = shifted(elements_of(span, rows, columns).unsqueeze(dim + 1), shifts)
        start = index.start % per_element
        return codes.flatten(dim, dim + 1).narrow(dim, start, index.stop - index.start)

    return read


def turned(reader: Reader) -> Reader:
    """Return a matrix that its tensors have as [D, R]."""
    return lambda rows, columns: reader(columns, rows).t()


def looked_up(codes: Reader, levels: Tensor) -> Reader:
    """Return the levels (1-D) that codes stand for."""

    def read(rows: Index, columns: Index) -> Tensor:
        places = codes(rows, columns)
        # a third of the time of ``levels[places]``
        return levels.index_select(0, places.flatten().int()).view(places.shape)

    return read


def above(upper: Reader, lower: Reader, height: int) -> Reader:
    """Return a matrix whose first ``height`` rows are one reader's, and the others another's."""

    def read(rows: Index, columns: Index) -> Tensor:
        if isinstance(rows, Tensor):
            of_upper = upper(rows.clamp(max=height - 1), columns)
            of_lower = lower((rows - height).clamp(min=0), columns)
            return torch.where((rows < height).unsqueeze(1), of_upper, of_lower)
        if rows.stop <= height:
            return upper(rows, columns)
        if rows.start >= height:
            return lower(slice(rows.start - height, rows.stop - height), columns)
        of_upper = upper(slice(rows.start, height), columns)
        return torch.cat([of_upper, lower(slice(0, rows.stop - height), columns)])

    return read


def in_rows_of(width: int, flat: Reader) -> Reader:
    """Return a matrix of ``width`` columns whose elements are one row of ``flat``, row after
    row."""

    def read(rows: Index, columns: Index) -> Tensor:
        if isinstance(rows, slice):
            places: Index = slice(rows.start * width, rows.stop * width)
        else:
            places = (rows.unsqueeze(1) * width + torch.arange(width, device=rows.device)).flatten()
        return flat(slice(0, 1), places).view(-1, width)[:, columns]

    return read


def scaled(
    codes: Reader,
    scales: Reader,
    zeros: Reader | None = None,
    *,
    less: float = 0.0,
    block: tuple[int, int] = (1, 1),
    group_of: Tensor | None = None,
    groups: int = 0,
    plus: float = 0.0,
) -> Reader:
    """Return ``(code − zero − less) · scale + plus`` in float32.

    Args:
        codes: [R, D].
        scales, zeros: those of blocks of the matrix, [⌈R / rows⌉, ⌈D / columns⌉].
        less: a number that every zero point lacks.
        block: rows and columns of a block.
        group_of: the blocks that each row belongs to, int64 [R], of ``groups``, where these are not
            neighbours.
        plus: a number that every element lacks.
    """

    def read(rows: Index, columns: Index) -> Tensor:
        def spread(of_blocks: Reader, less: float = 0.0) -> Tensor:
            down = _blocks(rows, block[0]) if group_of is None else slice(0, groups)
            values = of_blocks(down, _blocks(columns, block[1])).to(torch.float32) + less
            if group_of is None:
                return _for_each(_for_each(values, rows, block[0], 0), columns, block[1], 1)
            return _for_each(values[group_of[rows]], columns, block[1], 1)

        values = codes(rows, columns).to(torch.float32)
        if zeros is not None:
            values = values - spread(zeros, less)
        elif less:
            values = values - less
        return values * spread(scales) + plus

    return read


def _blocks(index: Index, size: int) -> Index:
    """Return the blocks of ``size`` rows or columns that some touch: once where these are
    neighbours, else one for each."""
    if not isinstance(index, slice):
        return index // size
    return slice(index.start // size, -(-index.stop // size))


def _for_each(of_blocks: Tensor, index: Index, size: int, dim: int) -> Tensor:
    """Return the value of its block for each of some rows or columns; of one block for all, or of
    as many blocks, as they are."""
    if size == 1 or not isinstance(index, slice) or of_blocks.shape[dim] == 1:
        return of_blocks
    repeated = of_blocks.repeat_interleave(size, dim)
    return repeated.narrow(dim, index.start % size, index.stop - index.start)
