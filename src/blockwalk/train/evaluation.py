"""Loss, accuracy and scores of answers of a walker on held-out records."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from blockwalk.data.batch import Batch
from blockwalk.data.batching import by_length, left_padded
from blockwalk.data.corpus import held_out_set
from blockwalk.data.dataset import Answers, Choices, Encoded
from blockwalk.data.formats import ANSWERS_ALONE
from blockwalk.data.metrics import exact_match, macro_f1, token_f1
from blockwalk.data.rendered import Tokenizer
from blockwalk.data.tasks import ANSWER_TOKENS
from blockwalk.estimators.objectives import of_sequences
from blockwalk.plan.objectives import BASELINE, REFERENCE, ObjectiveFacts
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.plan.words import counted
from blockwalk.program.program import Shape
from blockwalk.train.baseline import baseline_of
from blockwalk.walk.walker import Walker


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss over the learnt tokens; and the scores of what is chosen or generated, each from 0
    to 1."""

    loss: float
    tokens: int
    examples: int
    accuracy: float | None = None
    """The share of records of which a right candidate ranks first."""
    f1: float | None = None
    """F1: the mean over classes; of generated answers over words, the mean over records."""
    exact_match: float | None = None
    """The share of generated answers that have the words of a right one."""
    reward_accuracy: float | None = None
    """The share of pairs whose chosen answer has the higher reward; of single answers of those
    beyond the baseline on their side."""
    margin: float | None = None
    """The mean margin of rewards."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that a line of ``evaluations.jsonl`` tells of. Raises TypeError for
        a name that it does not know."""
        of_the_log = ("step", "seconds", "records")
        return cls(**{name: value for name, value in line.items() if name not in of_the_log})

    @property
    def scores(self) -> dict[str, float]:
        """The scores that there are, in percent, by their names."""
        named = {
            "accuracy": self.accuracy,
            "F1": self.f1,
            "exact match": self.exact_match,
            "reward accuracy": self.reward_accuracy,
        }
        return {name: 100 * value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        scores = "".join(f"{name} {value:.1f}%  " for name, value in self.scores.items())
        margin = "" if self.margin is None else f"margin {self.margin:.4f}  "
        return (
            f"{scores}{margin}loss {self.loss:.4f}  ({counted(self.examples, 'example')},"
            f" {counted(self.tokens, 'token')})"
        )


@dataclass(frozen=True)
class HeldOut:
    """Held-out records as tokens."""

    rows: Encoded | Choices | Answers
    batch_size: int
    settings: DataSettings
    records: int = 0
    """That ``data.eval`` has."""
    batches: int = 1
    """Batches that a visit of a block computes."""
    tokenizer: Tokenizer = None
    """The tokenizer that reads generated answers; None where none are generated."""
    objective: ObjectiveFacts = ANSWERS_ALONE
    """The row of the objective that is evaluated."""

    @staticmethod
    def read(
        settings: DataSettings,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        limit: int = 0,
        batches: int = 1,
        seed: int = 0,
        objective: ObjectiveFacts = ANSWERS_ALONE,
    ) -> HeldOut:
        """Read and encode ``data.eval``: all of its records, or ``limit`` of them, drawn at random,
        the same in every run. ``seed`` draws those that ``data.eval_share`` holds out, and
        ``objective`` is the row that reads them.

        Raises:
            ValueError: a record lacks what its format needs; file, line and field are named.
        """
        rows, count = held_out_set(settings, tokenizer, limit, seed, objective)
        return HeldOut(
            rows,
            batch_size,
            settings,
            count,
            batches,
            tokenizer if isinstance(rows, Answers) else None,
            objective,
        )

    @staticmethod
    def of_run(run: RunConfig, tokenizer: Tokenizer, *, limit: int = 0) -> HeldOut:
        """Read and encode what a run evaluates: ``data.eval``, or the share of ``data.train``; see
        :meth:`read`."""
        size = eval_batch_size(run)
        batches = run.eval_batches
        return HeldOut.read(
            run.data,
            tokenizer,
            batch_size=size,
            limit=limit,
            batches=batches,
            seed=run.plan.seed,
            objective=run.plan.objective_facts,
        )

    @property
    def encoded(self) -> Encoded:
        """Every sequence that is measured."""
        return self.rows if isinstance(self.rows, Encoded) else self.rows.rows

    @property
    def examples(self) -> int:
        """The number of records that are measured."""
        return self.rows.examples if isinstance(self.rows, Encoded) else len(self.rows)

    @property
    def has_numbers(self) -> bool:
        """Whether the rows have what the objective compares with."""
        return not self.objective.reference or REFERENCE in self.encoded.numbers

    def fingerprint(self) -> str:
        """Return a digest of the records, with the answers that count as right: 16 hexadecimal
        digits."""
        right: Any = ()
        if isinstance(self.rows, Choices):
            right = (self.rows.firsts.tolist(), self.rows.right)
        elif isinstance(self.rows, Answers):
            right = ([list(map(int, prompt)) for prompt in self.rows.prompts], self.rows.answers)
        text = json.dumps([self.encoded.fingerprint(), right])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def visit(self, shares: int) -> tuple[Shape, int]:
        """Return the largest visit of a block: the shape of one of so many shares of a batch's
        rows, and how many batches there are."""
        encoded = self.encoded
        examples = min(encoded.examples, self.batch_size * self.batches)
        multiple = self.settings.padding_multiple
        longest = encoded.summary.longest
        batches = -(-examples // self.batch_size)
        rows = -(-examples // (batches * shares)) * encoded.group
        return Shape(rows, -(-longest // multiple) * multiple), batches

    @property
    def shortest(self) -> int:
        """Tokens of the rows of the shortest batch."""
        lengths = np.sort(self.encoded.lengths().max(axis=1))
        longest = int(lengths[min(self.batch_size * self.batches, len(lengths)) - 1])
        multiple = self.settings.padding_multiple
        return -(-longest // multiple) * multiple

    def notes(self) -> list[str]:
        """Return one sentence for each thing that a user should know of: records that were cut or
        dropped."""
        return [f"data.eval: {line}" for line in self.encoded.report.warnings()]

    def evaluate(self, walker: Walker, watch: Callable[[int], None] = lambda _: None) -> Evaluation:
        """Measure the walker; its weights stay as they are.

        Args:
            watch: told before each batch how many records are done, on every rank alike; what it
                raises ends the evaluation.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        if isinstance(self.rows, Choices):
            evaluation = self._ranked(walker, self.rows, watch)
        elif self._has_objective(walker):
            evaluation = self._objective(walker, watch)
        else:
            evaluation = self._losses(walker, watch)
            if isinstance(self.rows, Answers):
                f1, exact = self._generated(walker, self.rows, watch)
                evaluation = replace(evaluation, f1=f1, exact_match=exact)
        if not math.isfinite(evaluation.loss):
            raise FloatingPointError(
                f"the held-out loss is {evaluation.loss} after step {walker.steps_done}: go on"
                " from an earlier checkpoint with a lower optimizer.learning_rate, or set"
                " compute_dtype: float32"
            )
        return evaluation

    def _visits(self, watch: Callable[[int], None]) -> Iterator[tuple[list[int], Batch, int]]:
        """Yield row numbers, batch, and the number of batches that the visit is cut into."""
        measured = 0
        visit = self.batch_size * self.batches
        multiple = self.settings.padding_multiple
        group = self.encoded.group
        for rows, batch in by_length(self.encoded, visit, multiple):
            watch(measured * self.examples // len(self.encoded))
            yield rows, batch, -(-len(rows) // (self.batch_size * group))
            measured += len(rows)

    def _losses(self, walker: Walker, watch: Callable[[int], None]) -> Evaluation:
        results = [walker.evaluate(batch, batches=cuts) for _, batch, cuts in self._visits(watch)]
        tokens = sum(result.tokens for result in results)
        return Evaluation(
            math.fsum(result.loss_sum for result in results) / tokens, tokens, self.examples
        )

    def _has_objective(self, walker: Walker) -> bool:
        """Return whether the objective is measured: it is a function of log-probabilities, and what
        it compares with is known."""
        is_trained = walker.plan.objective_facts.of_log_probabilities
        return self.objective.of_log_probabilities and self.has_numbers and is_trained

    def _objective(self, walker: Walker, watch: Callable[[int], None]) -> Evaluation:
        """Measure the objective from the log-probability of each sequence."""
        facts = self.objective
        encoded = self.encoded
        sums_R = -self._row_losses(walker, watch, packs=True)
        tokens_R = np.array([encoded.predicted_of(row) for row in range(len(encoded))])
        numbers = dict(encoded.numbers)
        if facts.baseline:
            multiple = self.settings.padding_multiple
            rows = range(len(encoded))
            baseline = baseline_of(walker, encoded, rows, self.batch_size, multiple)
            numbers[BASELINE] = np.full(len(encoded), baseline)
        answer = of_sequences(facts, sums_R, tokens_R, numbers)
        return Evaluation(answer.pop("loss"), int(tokens_R.sum()), self.examples, **answer)

    def _ranked(self, walker: Walker, choices: Choices, watch: Callable[[int], None]) -> Evaluation:
        """One pass over every record with every candidate gives all figures: the loss is that of
        the right one."""
        losses_R = self._row_losses(walker, watch)
        tokens_R = choices.rows.learnt()
        scores_R = self._scores(losses_R, tokens_R)
        chosen = [int(scores_R[a:b].argmax()) for a, b in pairwise(choices.firsts.tolist())]
        correct = sum(choice in right for choice, right in zip(chosen, choices.right, strict=True))
        learnt = choices.firsts[:-1] + choices.targets
        tokens = int(tokens_R[learnt].sum())
        same = len(np.unique(np.diff(choices.firsts))) == 1
        return Evaluation(
            math.fsum(losses_R[learnt].tolist()) / tokens,
            tokens,
            len(choices),
            correct / len(choices),
            macro_f1(chosen, choices.targets.tolist(), choices.classes) if same else None,
        )

    def scores(self, walker: Walker, choices: Choices) -> npt.NDArray[np.float64]:
        """Return the score of each row, a record with one candidate, float64 [R]: the highest of a
        record's ranks first."""
        losses_R = self._row_losses(walker, lambda _: None)
        return self._scores(losses_R, choices.rows.learnt())

    def _scores(
        self, losses_R: npt.NDArray[np.float64], tokens_R: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        return -losses_R / tokens_R if self.settings.label_scores == "mean" else -losses_R

    def _row_losses(
        self, walker: Walker, watch: Callable[[int], None], *, packs: bool = False
    ) -> npt.NDArray[np.float64]:
        """Return the loss summed over each row's learnt tokens, float64 [R]."""
        losses_R = np.zeros(len(self.encoded))
        for rows, batch, cuts in self._visits(watch):
            losses = walker.label_losses(batch, batches=cuts, packs=packs)
            losses_R[rows] = losses.numpy()
        return losses_R

    def _generated(
        self, walker: Walker, answers: Answers, watch: Callable[[int], None]
    ) -> tuple[float, float]:
        """Return F1 and exact match of answers that the walker writes, greedily, to the end of a
        line. Prompts of like length go together, and ranks share them."""
        line_end = self.tokenizer("a\n", add_special_tokens=False)["input_ids"][-1]
        stops = {line_end, self.tokenizer.eos_token_id} - {None}
        order = sorted(range(len(answers)), key=lambda row: len(answers.prompts[row]))
        ranks = walker.ranks
        scores: list[float] = []
        for start in range(0, len(order), self.batch_size):
            watch(start)
            rows = order[start : start + self.batch_size]
            # Each rank writes as many answers: the last ones may be written twice.
            share = -(-len(rows) // ranks.world)
            local_rows = (rows * ranks.world)[ranks.rank * share :][:share]
            local_scores: list[float] = []
            prompts = [answers.prompts[row] for row in local_rows]
            ids_BS, mask_BS = left_padded(prompts, answers.rows.pad_id)
            written_BS = walker.generate(
                ids_BS, ANSWER_TOKENS, attention_mask=mask_BS, stop_ids=stops, shared=True
            )
            answers_BS = written_BS[:, ids_BS.shape[1] :].tolist()
            for row, ids in zip(local_rows, answers_BS, strict=True):
                answer = self.tokenizer.decode(ids, skip_special_tokens=True).partition("\n")[0]
                references = answers.answers[row]
                local_scores += [token_f1(answer, references), exact_match(answer, references)]
            everyone = ranks.exchange(local_scores)
            scores += list(chain.from_iterable(everyone))[: 2 * len(rows)]
        return math.fsum(scores[::2]) / len(order), math.fsum(scores[1::2]) / len(order)


def eval_batch_size(run: RunConfig) -> int:
    """Return sequences of an evaluation batch: a micro-batch's, unless the settings say
    otherwise."""
    return run.eval_batch_size or run.batch_size // run.plan.gradient_accumulation_steps
