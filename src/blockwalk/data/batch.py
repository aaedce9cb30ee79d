"""A batch: its tensors, the tokens in it, and its parts for micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.plan.losses import IGNORE
from blockwalk.plan.objectives import PREFIX
from blockwalk.plan.row_order import RowOrder
from blockwalk.plan.words import counted

Batch = Mapping[str, Tensor]
"""``input_ids``, ``attention_mask`` and ``labels``, each int64 [B, S]; labels are −100 where
nothing is learnt. Packed rows have ``position_ids`` in place of the mask: where these restart a
document begins, and transformers lets no attention cross. What an objective reads beside them has
names that begin with ``objective.``: numbers of rows, [B], or of labels, [B, S]."""

COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels")
"""Names of the tensors of a batch that a walk follows."""


def is_of_objective(name: str) -> bool:
    """Return whether an entry of a batch is a number that an objective reads."""
    return name.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class LearntCounts:
    """Counts of what a step learns, over all of its micro-batches and ranks."""

    tokens: int = 0
    """Labels that count."""
    sequences: int = 0
    """Sequences with such a label."""
    chosen_tokens: int = 0
    """Labels that count of the first sequence of each example."""


def without_numbers(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch that a walk follows, without an objective's numbers."""
    return {name: tensor for name, tensor in batch.items() if not is_of_objective(name)}


def numbers_of(batch: Batch) -> dict[str, Tensor]:
    """Return an objective's numbers of a batch by name, without the prefix."""
    return {
        name.removeprefix(PREFIX): tensor for name, tensor in batch.items() if is_of_objective(name)
    }


def sequences_of(batch: Batch) -> Tensor:
    """Return the number of the sequence that each token belongs to, int64 [B, S]: of its row, or of
    its document where a batch is one row of several."""
    rows, length = batch["input_ids"].shape
    if _is_one_row_of_documents(batch):
        return (batch["position_ids"].to("cpu") == 0).cumsum(1) - 1
    return torch.arange(rows).unsqueeze(1).expand(rows, length)


def learnt_counts(batch: Batch, group: int) -> LearntCounts:
    """Return the counts of a batch whose examples are so many neighbouring sequences."""
    learnt_BS = batch["labels"][:, 1:].to("cpu") != IGNORE
    if not _is_one_row_of_documents(batch):
        chosen_BS = learnt_BS[::group]
        return LearntCounts(int(learnt_BS.sum()), int(learnt_BS.any(1).sum()), int(chosen_BS.sum()))
    sequences_N = sequences_of(batch)[:, 1:][learnt_BS]
    chosen = int((sequences_N % group == 0).sum())
    return LearntCounts(len(sequences_N), len(set(sequences_N.tolist())), chosen)


def _is_one_row_of_documents(batch: Batch) -> bool:
    return len(batch["input_ids"]) == 1 and "position_ids" in batch


def require_groups(rows: int, group: int) -> None:
    """Raise ValueError for a batch that does not have whole examples of so many rows."""
    if rows % group:
        raise ValueError(
            f"the batch has {counted(rows, 'row')}, and an example of the objective is {group}"
            " neighbouring rows: give whole ones, the chosen answer before the rejected"
        )


def require_entries(batch: Batch, names: Iterable[str]) -> None:
    """Raise ValueError for a batch that lacks an entry which its objective reads."""
    if missing := [name for name in names if name not in batch]:
        raise ValueError(
            f"the batch has no {', '.join(missing)}, which the objective reads: float64, one number"
            f" a row; it has {', '.join(batch)}"
        )


def require_columns(names: Iterable[str]) -> None:
    """Raise ValueError for a tensor of a batch that a walk would not follow: models take some more
    than :data:`COLUMNS`, and pass over others. What an objective reads passes."""
    if unknown := [name for name in names if name not in COLUMNS and not is_of_objective(name)]:
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which a walk does not follow; it takes"
            f" {', '.join(COLUMNS)}: leave the others out. Labels of -100 are not learnt, and"
            " Walker(objective=...) takes a function that reads further columns"
        )


def tokens_read(batch: Batch) -> int:
    """Return tokens of a batch without its padding. A packed document has two tokens or more, one
    of them at position 1; a token of padding is at position 0."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    positions_BS = batch["position_ids"]
    return int((positions_BS > 0).sum() + (positions_BS == 1).sum())


def loss_tokens(batch: Batch) -> int:
    """Return tokens that the loss is a mean over: labels from the second on, since a model predicts
    the next one."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def micro_batches(
    batch: Batch, count: int, *, further_columns: bool = True, group: int = 1
) -> list[Batch]:
    """Return a batch, tensors [B, S], cut into ``count`` equal parts, in order, between examples of
    ``group`` rows each. It may have ``further_columns``, beside :data:`COLUMNS`, where something
    reads them; numbers of an objective may be [B].

    Raises:
        ValueError: something is missing, of another shape, or B is no multiple of ``count`` parts
            of whole examples.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch is a mapping with input_ids and labels, not a {type(batch).__name__}"
        )
    if not further_columns:
        require_columns(batch)
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{key} of the batch is a {type(value).__name__}; it must be a tensor, int64"
                " [batch, sequence]"
            )
    if "input_ids" not in batch or "labels" not in batch:
        raise ValueError(
            f"a batch needs input_ids and labels; this one has {', '.join(batch) or 'nothing'}"
        )
    shape = batch["input_ids"].shape
    if len(shape) != 2 or not shape[0] or not all(_fits(*item, shape) for item in batch.items()):
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise ValueError(
            "every tensor of a batch must be [batch, sequence] of one shape, not empty; got"
            f" {shapes}"
        )
    require_groups(shape[0], group)
    if shape[0] // group % count:
        raise ValueError(
            f"the batch has {_counted(shape[0], group)}, which gradient_accumulation_steps ×"
            f" mesh.data = {count} does not divide"
        )
    parts = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: parts[key][m] for key in parts} for m in range(count)]


def _fits(name: str, tensor: Tensor, shape: torch.Size) -> bool:
    """Return whether an entry of a batch of [B, S] has its shape; a number of an objective may be
    one a row."""
    return tensor.shape == shape or (is_of_objective(name) and tensor.shape == shape[:1])


def _counted(rows: int, group: int) -> str:
    """Return the number of examples in some rows, with their noun."""
    if group == 1:
        return counted(rows, "sequence")
    return f"{counted(rows // group, 'example')} of {group} rows"


def row_order(batch: Batch, count: int, tokens: int) -> RowOrder:
    """Return the order in which ``count`` ranks share out a batch's sequences, for parts of so many
    ``tokens``. The batch may be of whole sequences or of a part of each."""
    return RowOrder(count, tokens, folded="position_ids" not in batch)


def columns(batch: Batch, order: RowOrder, number: int) -> Batch:
    """Return one of the equal parts of the sequences of a batch, tensors [B, S].

    Its ``input_ids`` are [B, s]; ``labels`` [B, s + 1], each beside the token that predicts it:
    after the first of a sequence, of which nothing is learnt, those of the tokens after the part's
    own. Mask and positions stay those of whole sequences. These are first filled up on the right
    to the length of the order, with tokens of which nothing is learnt."""
    length = batch["input_ids"].shape[1]
    fills = {"labels": IGNORE}
    whole = {
        name: tensor
        if tensor.dim() == 1
        else F.pad(tensor, (0, order.length - length), value=fills.get(name, 0))
        for name, tensor in batch.items()
    }
    pieces = order.pieces(number)
    predicted_BS = F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORE)
    labels = [predicted_BS[:, piece] for piece in pieces]
    return {
        **whole,
        "input_ids": torch.cat([whole["input_ids"][:, piece] for piece in pieces], 1),
        "labels": F.pad(torch.cat(labels, 1), (1, 0), value=IGNORE),
    }


def require_mask(batch: Batch, count: int) -> None:
    """Raise ValueError for a batch whose sequences have padding on the left, and are to be cut into
    ``count`` parts."""
    seen_BS = batch.get("attention_mask")
    if count > 1 and seen_BS is not None and bool((seen_BS[:, 1:] > seen_BS[:, :-1]).any()):
        raise ValueError(
            f"mesh.context is {count}, and the attention mask hides tokens before others that it"
            " does not: parts are of sequences that are padded on the right; set mesh.context: 1"
        )


def require_tokens(length: int, count: int) -> None:
    """Raise ValueError for sequences with fewer than two tokens for each of ``count`` parts."""
    if count > 1 and length < 2 * count:
        raise ValueError(
            f"a batch has sequences of {counted(length, 'token')}, and mesh.context: {count} parts"
            f" need {2 * count}; set mesh.context: {max(1, length // 2)}, or data.padding_multiple"
            " higher"
        )


def filled(batch: Batch, multiple: int, *, group: int = 1) -> dict[str, Tensor]:
    """Return the batch with as many copies of its last example, every label ignored, as it lacks to
    a multiple of so many examples of ``group`` rows."""
    lacks = -len(batch["input_ids"]) % (multiple * group)
    rows = {
        name: torch.cat([tensor, *(tensor[-group:] for _ in range(lacks // group))])
        for name, tensor in batch.items()
    }
    rows["labels"][len(rows["labels"]) - lacks :] = IGNORE
    return rows


def lengthened(batch: Batch, length: int) -> Batch:
    """Return the batch padded on the right to so many tokens a row, as a data set's rows are:
    nothing is learnt of the padding, and an attention mask hides it."""
    lacks = length - batch["input_ids"].shape[1]
    if not lacks:
        return batch
    return {
        name: tensor
        if tensor.dim() == 1
        else F.pad(tensor, (0, lacks), value=IGNORE if name == "labels" else 0)
        for name, tensor in batch.items()
    }


def require_ids(ids: Tensor, rows: int) -> None:
    """Check that a model has a row for every token, before a device is asked for one: an
    accelerator that is asked for another ends all of its process's work.

    Args:
        ids: int64, of any shape.
        rows: of the model's embeddings.

    Raises:
        ValueError: an id is below 0 or has no row; that id is named, and the number of rows.
    """
    if not ids.numel():
        return
    least, largest = (int(value) for value in torch.aminmax(ids))
    if least < 0 or largest >= rows:
        raise ValueError(
            f"input_ids has the token id {least if least < 0 else largest}, and the model has"
            f" {rows} rows of embeddings: take the model's own tokenizer, or save the model with"
            " resize_token_embeddings"
        )
