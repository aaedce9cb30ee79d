"""Oracle: the same step by one process, or by every rank, on the rows of all ranks one after the
other, padded by hand."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blockwalk.cutting.verify import certified
from blockwalk.data.batching import by_length
from blockwalk.data.dataset import Encoded
from blockwalk.data.row_batch import RowBatch, token_counts
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch
from tests.support.held import masters
from tests.support.messages import refused
from tests.support.processes import run_ranks
from tests.support.sharded_runs import close, make, plain_run

LENGTHS = (10, 14)
"""Tokens of the rows of each rank."""


def own_rows(rank: int, step: int, *, rows: int = 4, masked: bool = True) -> dict[str, Tensor]:
    """Rows of one rank: the last ends early, and what is learnt differs from rank to rank."""
    length = LENGTHS[rank]
    batch = random_batch(rows, length, seed=10 * step + rank)
    batch["labels"][:, : 2 + 3 * rank] = -100
    if not masked:
        return {name: batch[name] for name in ("input_ids", "labels")}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][-1, length - 3 :] = 0
    batch["labels"][-1, length - 3 :] = -100
    return batch


def mostly_padding(rank: int, step: int) -> dict[str, Tensor]:
    """Rows of one rank that lie side by side without their padding, more of them on rank 1."""
    lengths = [(40, 3, 9, 5), (56, 20, 11, 13)][rank]
    batch = random_batch(4, lengths[0], seed=10 * step + rank)
    real = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
    batch["attention_mask"] = real.long()
    batch["labels"] = batch["input_ids"].masked_fill(~real, -100)
    return batch


def concatenated(batches: list[dict[str, Tensor]], micro_batches: int) -> dict[str, Tensor]:
    """The rows of all ranks, those of each micro-batch together, padded to the longest."""
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    padded = []
    for batch in batches:
        rows, length = batch["input_ids"].shape
        fills = {"labels": -100}
        padded.append(
            {
                name: torch.cat(
                    [value, torch.full((rows, longest - length), fills.get(name, 0))], dim=1
                )
                for name, value in batch.items()
            }
        )
    return {
        name: torch.cat(
            [batch[name].chunk(micro_batches)[m] for m in range(micro_batches) for batch in padded]
        )
        for name in padded[0]
    }


CASES: list[tuple[str, bool, str, int, bool]] = [
    ("llama", False, "zero3", 1, True),
    ("llama", True, "hzp", 2, False),
]


def _packed(rank: int) -> list[tuple[float, int, dict[str, Tensor]]]:
    answers = []
    for local in (True, False):
        with Walker(make("llama", False), method("zero3", mesh={"world": 2})) as walker:
            shapes = set[tuple[int, ...]]()
            begin = walker.estimator.begin

            def noted(batches: Any, *rest: Any) -> None:
                shapes.update(tuple(batch["input_ids"].shape) for batch in batches)  # noqa: B023
                begin(batches, *rest)  # noqa: B023

            walker.estimator.begin = noted  # type: ignore[method-assign]
            batches = [mostly_padding(r, 0) for r in range(2)]
            batch = batches[rank] if local else concatenated(batches, 1)
            loss = walker.step(batch, local_batch=local).loss
            ((rows, tokens),) = shapes
            assert rows == 1
            answers.append((loss, tokens, masters(walker)))
    return answers


def test_own_rows_lie_side_by_side() -> None:
    """Bit for bit the step that every rank is given all rows for. By hand: rank 0 walks the tile of
    64 that its 57 tokens fill, rank 1 the two of its 100."""
    certified(make("llama", False))
    answers = run_ranks(2, _packed, timeout=400)
    for local, whole in answers:
        assert local[:2] == whole[:2]
        assert all(torch.equal(local[2][name], value) for name, value in whole[2].items())
    assert [local[1] for local, _ in answers] == [64, 128]


def _steps(rank: int) -> list[Any]:
    answers = []
    for kind, lora, name, micro_batches, masked in CASES:
        for local in (True, False):
            plan = method(
                name,
                mesh={"world": 2},
                gradient_accumulation_steps=micro_batches,
                optimizer={"learning_rate": 1e-3, "weight_decay": 0.5},
            )
            with Walker(make(kind, lora), plan) as walker:
                batches = [own_rows(r, 0, masked=masked) for r in range(2)]
                held_out = batches[rank] if local else concatenated(batches, 1)
                evaluated = walker.evaluate(held_out, local_batch=local)
                batch = batches[rank] if local else concatenated(batches, micro_batches)
                gradients = walker.gradients(batch, local_batch=local)
                results = []
                for step in range(2):
                    batches = [own_rows(r, step, masked=masked) for r in range(2)]
                    batch = batches[rank] if local else concatenated(batches, micro_batches)
                    results.append(walker.step(batch, local_batch=local))
                figures = [(r.loss, r.tokens, r.copies) for r in results]
                figures.append((evaluated.loss, evaluated.tokens, 0))
                graded = {f"gradient of {name}": value for name, value in gradients.items()}
                answers.append((figures, {**masters(walker), **graded}))
    return answers


def test_own_rows_are_a_step_on_all_of_them() -> None:
    """Bit for bit where every rank is given the rows of all, gradients and evaluations too; to
    rounding a plain loop's."""
    for kind, lora, *_ in CASES:
        certified(make(kind, lora))  # once, instead of on each rank
    for answers in run_ranks(2, _steps, timeout=400):
        for k, (kind, lora, _, micro_batches, masked) in enumerate(CASES):
            (local, weights), (whole, expected) = answers[2 * k : 2 * k + 2]
            assert local == whole
            assert all(torch.equal(weights[name], value) for name, value in expected.items())
            batches = [
                concatenated([own_rows(r, s, masked=masked) for r in range(2)], micro_batches)
                for s in range(2)
            ]
            if not lora:
                plain = plain_run(make(kind, lora), batches)
                losses = [loss for loss, *_ in local[:2]]
                assert losses == pytest.approx(plain["losses"], rel=1e-6)
                for name, value in plain["weights"].items():
                    assert close(weights[name], value, 1e-4), name


def _copies(rank: int) -> tuple[list[tuple[float, int, int]], list[str]]:
    plan = method("zero3", mesh={"world": 2}, gradient_accumulation_steps=2)
    with (
        Walker(make("llama", False), plan) as walker,
        warnings.catch_warnings(record=True) as notes,
    ):
        warnings.simplefilter("always")
        result = walker.step(own_rows(rank, 0, rows=3), local_batch=True)
        whole = walker.step(random_batch(5, 8))
    figures = [(r.loss, r.tokens, r.copies) for r in (result, whole)]
    return figures, [str(note.message) for note in notes]


def test_rows_that_do_not_divide_are_filled_up_and_said() -> None:
    """Closed form: 3 rows of 2 ranks for 2 micro-batches lack one on each; 5 rows lack 3."""
    answers = run_ranks(2, _copies, timeout=400)
    batch = concatenated([own_rows(rank, 0, rows=3) for rank in range(2)], 1)
    loss = plain_run(make("llama", False), [batch])["losses"][0]
    for figures, _ in answers:
        (local, tokens, copies), (_, _, whole_copies) = figures
        assert local == pytest.approx(loss, rel=1e-6)
        assert tokens == int((batch["labels"][:, 1:] != -100).sum())
        assert (copies, whole_copies) == (2, 3)
    assert [len(notes) for _, notes in answers] == [1, 0]
    (note,) = answers[0][1]
    assert "2 of the 8 rows" in note
    assert "25%" in note


def _refusals(rank: int) -> None:
    plan = method("zero3", mesh={"world": 2})
    with Walker(make("llama", False), plan) as walker:
        before = {name: value.clone() for name, value in masters(walker).items()}

        def step(batch: dict[str, Tensor], *, local: bool = True) -> None:
            walker.step(batch, local_batch=local)

        rows = own_rows(rank, 0)
        with refused(ValueError, "local_batch 4 3 batch_size"):
            step(own_rows(rank, 0, rows=4 - rank))
        with refused(ValueError, "local_batch attention_mask int64 none 1"):
            step(own_rows(rank, 0, masked=not rank))
        with refused(ValueError, "local_batch int32 int64"):
            step({**rows, "labels": rows["labels"].to(torch.int64 if rank else torch.int32)})
        with refused(ValueError, "local_batch 1 99999 input_ids"):
            step(
                {
                    **rows,
                    "input_ids": rows["input_ids"] + 0 * rank + (99999 - rows["input_ids"]) * rank,
                }
            )
        with refused(ValueError, "local_batch 1 (0, 14)"):
            step({name: value[: 4 * (1 - rank)] for name, value in rows.items()})
        with refused(ValueError, "local_batch True False 1"):
            step(rows, local=not rank)
        for batches, call in ((1 + rank, "micro-batches 1 2"), (1, "call evaluate train")):
            with refused(ValueError, call):
                if batches == 1 and rank == 0:
                    step(rows)
                else:
                    walker.evaluate(rows, batches=batches, local_batch=True)
        with refused(ValueError, "-100"):
            step({**rows, "labels": torch.full_like(rows["labels"], -100)})
        after = masters(walker)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert walker.step(rows, local_batch=True).step == 1
    with Walker(make("llama", False), method("mezo", mesh={"world": 2})) as walker:
        with refused(ValueError, "local_batch=True mezo 2"):
            walker.step(rows, local_batch=True)
        walker.step(random_batch(4, 8))


def test_rows_that_ranks_cannot_walk_together_are_refused_by_all() -> None:
    run_ranks(2, _refusals, timeout=400)


def _held_out(rank: int) -> list[Any]:
    read = _rows_read()
    answers: list[Any] = []
    with Walker(make("llama", False), method("fcdp", mesh={"world": 2})) as walker:
        for lazily in (True, False):
            read.clear()
            losses = []
            for rows, batch in by_length(rows_of_data(), 4):
                held_out = batch if lazily else dict(batch)
                by_row = walker.label_losses(held_out, batches=2).tolist()
                losses.append((rows, walker.evaluate(held_out, batches=2), by_row))
            answers.append((losses, sorted(set(read))))
    return answers


def test_a_rank_reads_its_own_rows_of_what_is_held_out() -> None:
    """The same batches as tensors, bit for bit; the rows that each rank reads, by hand: shortest
    first, of 4 rows in 2 parts over 2 ranks one of each, of 2 filled up to 4 copies of the last."""
    certified(make("llama", False))
    hands = [[8, 5, 7, 9, 6, 3], [2, 0, 4, 1, 3]]
    for rank, (lazily, whole) in enumerate(run_ranks(2, _held_out, timeout=400)):
        assert lazily[1] == sorted(hands[rank])
        assert whole[1] == list(range(10))
        assert lazily[0] == whole[0]


LENGTHS_OF_ROWS = (5, 9, 3, 12, 7, 4, 11, 6, 2, 8)


def rows_of_data() -> Encoded:
    """Rows of a data set, of which no token is learnt in the first place of a row."""
    generator = torch.Generator().manual_seed(3)
    starts = np.cumsum([0, *LENGTHS_OF_ROWS], dtype=np.int64)
    ids = torch.randint(3, 100, (int(starts[-1]),), generator=generator).numpy().astype(np.int32)
    in_loss = np.ones(len(ids), dtype=np.bool_)
    in_loss[starts[:-1]] = False
    return Encoded(ids, in_loss, starts, pad_id=0)


def _rows_read() -> list[int]:
    """The numbers of the rows that this process reads from here on; it is a rank of its own."""
    read: list[int] = []
    original = Encoded.__getitem__

    def noted(self: Encoded, index: int) -> Any:
        read.append(index)
        return original(self, index)

    Encoded.__getitem__ = noted  # type: ignore[method-assign]
    return read


def _by_number(rank: int) -> list[Any]:
    read = _rows_read()
    answers: list[Any] = []
    plan = method("fcdp", mesh={"world": 2}, gradient_accumulation_steps=2)
    for lazily in (True, False):
        with Walker(make("llama", False), plan) as walker:
            steps = []
            for rows in ([0, 3, 1, 2, 6, 7, 5, 4], [9, 8, 7, 6, 5]):
                read.clear()
                batch = RowBatch(rows_of_data(), rows)
                result = walker.step(batch if lazily else dict(batch))
                figures = (result.loss, result.tokens, result.copies)
                steps.append((figures, sorted(set(read)), token_counts(batch)))
            answers.append((steps, masters(walker)))
            if lazily:
                with refused(ValueError, "rank 1 other data 0"):
                    walker.step(RowBatch(rows_of_data(), [0, 1, 2, 3 + rank]))
                with refused(ValueError, "row 10 10 data.train"):
                    RowBatch(rows_of_data(), [0, 10])
    return answers


def test_a_rank_reads_its_own_rows_of_a_batch_that_is_named_by_numbers() -> None:
    """A step on the same batch as tensors, bit for bit; the rows that each rank reads, by hand: of
    8 rows in 2 micro-batches over 2 ranks two of each, of 5 filled up to 8 copies of the last."""
    certified(make("llama", False))
    hands = [[[0, 3, 6, 7], [9, 8, 5]], [[1, 2, 5, 4], [7, 6, 5]]]
    for rank, (lazily, whole) in enumerate(run_ranks(2, _by_number, timeout=400)):
        assert [read for _, read, _ in lazily[0]] == [sorted(rows) for rows in hands[rank]]
        assert [figures for figures, *_ in lazily[0]] == [figures for figures, *_ in whole[0]]
        assert all(torch.equal(lazily[1][name], value) for name, value in whole[1].items())
        for (figures, _, counts), rows in zip(
            lazily[0], ([0, 3, 1, 2, 6, 7, 5, 4], [9, 8, 7, 6, 5]), strict=True
        ):
            lengths = [LENGTHS_OF_ROWS[row] for row in rows]
            assert counts == (sum(lengths), sum(lengths) - len(rows))
            assert figures[1:] == (counts[1], -len(rows) % 4)
