"""Rounding of a matrix with its inputs in view: each column's error is made up for by the columns
that are not rounded yet.

The mathematics is GPTQ's (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", 2023, algorithm 1): with H = X^T X of the inputs X and U^T U = H^-1, U
upper triangular, rounding column i by e moves each later column j by -e · U_ij / U_ii, the least
squares answer of X W^T to it. As in the authors' code, columns with the largest inputs go first. A
group's scales are fitted before, for one of :data:`SHARES` of its range, by the squared error that
its columns' inputs weigh. W is [N, D], H is [D, D]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.matrix_codec import Grid, grouped, halves, matrix_codec
from blockwalk.plan.sizes import spans

DAMPING = 0.01
"""The share of H's mean diagonal that is added to its diagonal, so that it has an inverse."""
TOWARDS = 0.3
"""The share that is added where a matrix makes up for what its outputs lack: 0.01 learns a few
tokens for a column by heart."""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""The shares of a group's range that its scales are tried for: values beyond it are cut."""

_AT_ONCE = 128
"""Columns after which the others are moved, in one product."""


def has_grid(layout: Layout) -> bool:
    """Whether a parameter's codec can be rounded to with its inputs in view: codes in groups, whose
    scales are fitted."""
    return layout.codec.encoded and matrix_codec(layout.codec).grid is not None


def encode_with_inputs(weight_ND: Tensor, gram_DD: Tensor, buffer: Tensor, layout: Layout) -> None:
    """Round a matrix and write its bytes.

    Args:
        weight_ND: float32.
        gram_DD: H of typical inputs, float32.
        buffer: uint8, of the layout's size.
    """
    grid = matrix_codec(layout.codec).grid
    assert grid is not None, layout.codec
    scales = layout.scales(buffer)
    codes = layout.codes(buffer)
    size = layout.group_size
    scales.copy_(fitted(grid, weight_ND, gram_DD.diagonal(), layout))
    order_D = gram_DD.diagonal().argsort(descending=True)
    root_DD = _inverse_root(gram_DD[order_D][:, order_D])
    weight_ND = weight_ND[:, order_D]
    codes_ND = torch.empty(weight_ND.shape, dtype=torch.uint8)
    for start, stop in spans(0, layout.columns, _AT_ONCE):
        errors_NK = torch.empty(layout.rows, stop - start)
        for i, column in enumerate(order_D[start:stop].tolist(), start):
            values_N11 = weight_ND[:, i].view(-1, 1, 1)
            stored = scales[:, column // size].unsqueeze(1)
            codes_N11 = grid.nearest(values_N11, stored)
            error_N = (values_N11 - grid.values(codes_N11, stored)).flatten() / root_DD[i, i]
            weight_ND[:, i + 1 : stop].addr_(error_N, root_DD[i, i + 1 : stop], alpha=-1)
            errors_NK[:, i - start] = error_N
            codes_ND[:, column] = codes_N11.flatten()
        weight_ND[:, stop:].addmm_(errors_NK, root_DD[start:stop, stop:], alpha=-1)
    codes.copy_(halves(grouped(codes_ND, layout)).view_as(codes))


def encode_fitted(rows_RD: Tensor, buffer: Tensor, layout: Layout, start: int) -> None:
    """Round rows of a matrix, from ``start`` on, to nearest on the scales of :func:`fitted`, each
    column weighed alike."""
    grid = matrix_codec(layout.codec).grid
    assert grid is not None, layout.codec
    scales = fitted(grid, rows_RD, torch.ones(layout.columns), layout)
    rows = slice(start, start + len(rows_RD))
    layout.scales(buffer)[rows] = scales
    codes = layout.codes(buffer)[rows]
    codes.copy_(halves(grid.nearest(grouped(rows_RD, layout), scales)).view_as(codes))


def compensated(weight_ND: Tensor, gram_DD: Tensor, lost_ND: Tensor) -> Tensor:
    """Return the matrix that is to be rounded in a weight's place: W + R (H + damping)^-1, the
    least squares answer to what the outputs X W^T lack, E, of which R = E^T X is given. The
    damping, of :data:`TOWARDS`, keeps it near W."""
    root_DD = _inverse_root(gram_DD.clone(), TOWARDS)
    return weight_ND + lost_ND @ root_DD.t() @ root_DD


def fitted(grid: Grid, weight_ND: Tensor, weights_D: Tensor, layout: Layout) -> Tensor:
    """Return the scales of each group, as they are stored, with the least squared error, weighed by
    column."""
    groups_NGK = grouped(weight_ND, layout)
    weights_GK = pad(weights_D, (0, layout.groups * layout.group_size - layout.columns)).view(
        layout.groups, -1
    )
    best = grid.fit(groups_NGK).to(layout.scale_dtype)
    least_NG = torch.full(groups_NGK.shape[:2], torch.inf)
    for share in SHARES:
        scales = grid.fit(groups_NGK * share).to(layout.scale_dtype)
        error_NGK = grid.values(grid.nearest(groups_NGK, scales), scales).sub_(groups_NGK).square_()
        error_NG = error_NGK.mul_(weights_GK).sum(2)
        better_NG = error_NG < least_NG
        best[better_NG] = scales[better_NG]
        least_NG[better_NG] = error_NG[better_NG]
    return best


def _inverse_root(gram_DD: Tensor, damping: float = DAMPING) -> Tensor:
    """U, upper triangular, of U^T U = (H + damping)^-1. An input that is always 0 counts as one of
    its own."""
    diagonal_D = gram_DD.diagonal()
    diagonal_D += damping * diagonal_D.mean()
    diagonal_D[diagonal_D == 0] = 1
    inverse_DD = torch.cholesky_inverse(torch.linalg.cholesky(gram_DD))
    root_DD: Tensor = torch.linalg.cholesky(inverse_DD, upper=True)
    return root_DD
