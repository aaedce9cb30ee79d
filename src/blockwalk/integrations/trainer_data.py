"""Data of a run's settings (``data.*``) in a Trainer: texts, conversations, classes with label
words, and tasks by name.

The Trainer's loader hands out numbers of examples; ranks tell one another theirs, and every one of
them makes the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import EvalPrediction

from blockwalk.data.batch import Batch
from blockwalk.data.corpus import training_set
from blockwalk.data.dataset import Choices, Encoded
from blockwalk.data.label_words import LabelWordBatch, label_word_batch
from blockwalk.data.rendered import Tokenizer
from blockwalk.data.row_batch import collate
from blockwalk.integrations.trainer_batches import in_rows
from blockwalk.integrations.trainer_objective import encoded_pairs, with_reference
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import DataSettings
from blockwalk.train import config
from blockwalk.train.evaluation import HeldOut
from blockwalk.walk.walker import Walker

NUMBERS = "rows"
"""The column of a loader's batch that holds numbers of examples, int64 [B]."""


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """A data set of the numbers of its examples."""

    rows: Encoded | Choices
    """Examples as tokens, with every candidate where an objective ranks them."""
    settings: DataSettings

    def __len__(self) -> int:
        return self.rows.examples if isinstance(self.rows, Encoded) else len(self.rows)

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index

    def batch(self, numbers: Sequence[int], multiple: int = 1) -> Batch | LabelWordBatch:
        """Return the examples named, in rows that so many micro-batches divide."""
        padding = self.settings.padding_multiple
        if isinstance(self.rows, Choices):
            scores = self.settings.label_scores
            return label_word_batch(self.rows, numbers, padding, scores=scores)
        rows = self.rows.rows_of(numbers).tolist()
        return in_rows(collate(self.rows, rows, padding), multiple, group=self.rows.group)


@dataclass(frozen=True, slots=True)
class HeldOutNumbers:
    """Held-out examples, of which a walker measures all at once."""

    held_out: HeldOut

    def __len__(self) -> int:
        return self.held_out.examples

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index

    def evaluate(
        self, walker: Walker, metrics: Callable[[Any], Mapping[str, Any]] | None, tell: Any
    ) -> tuple[dict[str, float], EvalPrediction | None]:
        """Return figures by name: the loss, what the records are scored by, and the metrics of the
        candidates' scores. These stand beside the figures, with the right candidates.

        Args:
            metrics: a function of scores [N, C] and right candidates [N]; an example with fewer
                candidates than another has −∞ in the places of those that it lacks.
            tell: called before each batch.

        Raises:
            ValueError: there are metrics, and no candidate.
        """
        evaluation = self.held_out.evaluate(walker, tell)
        measured = dataclasses.asdict(evaluation)
        figures = {
            name: measured[name]
            for name in ("loss", "accuracy", "f1", "exact_match", "reward_accuracy", "margin")
            if measured[name] is not None
        }
        if metrics is None:
            return figures, None
        rows = self.held_out.rows
        if not isinstance(rows, Choices):
            raise ValueError(
                "compute_metrics takes the scores of candidates or logits, and data.eval has"
                " answers that are generated, whose F1 and exact match are measured; leave it out"
            )
        scores_R = self.held_out.scores(walker, rows)
        spans = list(pairwise(rows.firsts.tolist()))
        scores_NC = np.full((len(spans), max(end - begin for begin, end in spans)), -np.inf)
        for number, (begin, end) in enumerate(spans):
            scores_NC[number, : end - begin] = scores_R[begin:end]
        prediction = EvalPrediction(predictions=scores_NC, label_ids=rows.targets)
        return {**figures, **metrics(prediction)}, prediction


@dataclass(frozen=True, slots=True)
class TrainerData:
    """The data sets of a Trainer's run, read from settings."""

    train: RowNumbers
    held_out: RowNumbers | HeldOutNumbers | None


def read_data(
    settings: DataSettings | Mapping[str, Any], tokenizer: Tokenizer, plan: Plan, eval_rows: int
) -> TrainerData:
    """Read training and held-out data as tokens; ``eval_rows`` are walked at once.

    Raises:
        ValueError: a setting is unknown, or records lack what their format needs.
    """
    if isinstance(settings, Mapping):
        settings = config.from_mapping({"data": settings}).data
    objective = plan.objective_facts
    train = training_set(
        settings,
        tokenizer,
        seed=plan.seed,
        every_word=plan.ranks_words,
        objective=objective,
    )
    if not settings.evaluates:
        return TrainerData(RowNumbers(train, settings), None)
    limit = settings.eval_limit
    held_out = HeldOut.read(
        settings,
        tokenizer,
        batch_size=eval_rows,
        limit=limit,
        seed=plan.seed,
        objective=objective,
    )
    if isinstance(held_out.rows, Encoded) and not objective.of_log_probabilities:
        return TrainerData(RowNumbers(train, settings), RowNumbers(held_out.rows, settings))
    return TrainerData(RowNumbers(train, settings), HeldOutNumbers(held_out))


def pairs_of(
    sets: Mapping[str, Any], tokenizer: Tokenizer, plan: Plan, length: int | None, eval_rows: int
) -> TrainerData:
    """Return data sets of pairs, ``train_dataset`` and ``eval_dataset``, as tokens.

    Raises:
        ValueError: a record judges nothing, or the plan's objective learns no pairs.
    """
    objective = plan.objective_facts
    settings = DataSettings() if length is None else DataSettings(max_length=length)
    train = encoded_pairs(sets["train_dataset"], "train_dataset", tokenizer, objective, length)
    dataset = sets.get("eval_dataset")
    if dataset is None:
        return TrainerData(RowNumbers(train, settings), None)
    rows = encoded_pairs(dataset, "eval_dataset", tokenizer, objective, length)
    held_out = HeldOut(rows, eval_rows, settings, rows.examples, objective=objective)
    return TrainerData(RowNumbers(train, settings), HeldOutNumbers(held_out))


def referenced(data: TrainerData, walker: Walker, batch_size: int) -> TrainerData:
    """Return data sets with the numbers of the reference, which is the walker's model as it is now,
    where the objective compares with one."""
    if not walker.plan.objective_facts.reference:
        return data
    train = data.train
    held_out = data.held_out
    multiple = train.settings.padding_multiple
    assert isinstance(train.rows, Encoded)
    rows = with_reference(walker, train.rows, batch_size, multiple)
    if isinstance(held_out, HeldOutNumbers):
        encoded = with_reference(walker, held_out.held_out.encoded, batch_size, multiple)
        measured = dataclasses.replace(held_out.held_out, rows=encoded)
        held_out = dataclasses.replace(held_out, held_out=measured)
    return TrainerData(dataclasses.replace(train, rows=rows), held_out)


def numbered(examples: Sequence[int]) -> dict[str, Tensor]:
    """Return numbers of examples as a loader's batch."""
    return {NUMBERS: torch.tensor(examples, dtype=torch.int64)}


def numbers_of_all(inputs: Mapping[str, Tensor], world: int) -> list[list[int]]:
    """Return the numbers of every rank's examples, by rank."""
    own = inputs[NUMBERS].tolist()
    if world == 1:
        return [own]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    return everyone
