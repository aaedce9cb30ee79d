"""Oracle: transformers. Candidates ranked by its logits, answers by its ``generate``, a record at a
time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import blockwalk
from blockwalk.data.batching import left_padded
from blockwalk.data.dataset import Answers, Choices, Encoded
from blockwalk.data.metrics import exact_match, token_f1
from blockwalk.data.row_batch import collate
from blockwalk.plan.run_config import DataSettings
from blockwalk.program.program import Lane
from blockwalk.train.evaluation import HeldOut
from tests.models import tiny_model
from tests.support import data_files
from tests.support.processes import run_ranks

tokenizer = data_files.tokenizer


def random_rows(lengths: list[int], learnt: list[int], vocab: int = 101) -> Encoded:
    """Rows of random tokens, of which the last few are learnt."""
    draw = np.random.default_rng(1)
    in_loss = [np.arange(n) >= n - count for n, count in zip(lengths, learnt, strict=True)]
    tokens = draw.integers(3, vocab, sum(lengths)).astype(np.int32)
    return Encoded(tokens, np.concatenate(in_loss), np.cumsum([0, *lengths]), 0)


@torch.no_grad()
def log_probabilities(model: Any, rows: Encoded) -> list[torch.Tensor]:
    """Of each row's learnt tokens, from the model's own logits."""
    found = []
    for row in range(len(rows)):
        ids, in_loss = rows[row]
        ids_1S = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
        logs_SV = model.eval()(input_ids=ids_1S, use_cache=False).logits[0].log_softmax(-1)
        found.append(torch.stack([logs_SV[s - 1, ids[s]] for s in np.flatnonzero(in_loss)]))
    return found


@pytest.mark.parametrize("scores", ["mean", "sum"])
def test_candidates_that_differ_in_number_and_length_are_ranked(scores: str) -> None:
    model = tiny_model("llama")
    rows = random_rows([5, 9, 7, 4, 8, 6, 5, 3], [1, 4, 2, 1, 3, 2, 2, 1])
    choices = Choices(rows, np.array([0, 2, 5, 8]), ((0,), (2, 0), (1,)))
    logs = log_probabilities(model, rows)
    score = [float(each.mean() if scores == "mean" else each.sum()) for each in logs]
    chosen = [int(np.argmax(score[a:b])) for a, b in ((0, 2), (2, 5), (5, 8))]
    correct = sum(c in right for c, right in zip(chosen, choices.right, strict=True))
    learnt = torch.cat([logs[0], logs[4], logs[6]])
    with blockwalk.Walker(
        model, blockwalk.method("plain", compute_dtype="float32"), training=False
    ) as walker:
        found = HeldOut(
            choices, 2, DataSettings(padding_multiple=4, label_scores=scores), batches=3
        ).evaluate(walker)
    assert found.accuracy == pytest.approx(correct / 3)
    assert found.loss == pytest.approx(-float(learnt.mean()), rel=1e-5)
    assert (found.tokens, found.examples, found.f1) == (len(learnt), 3, None)


@pytest.mark.parametrize("method", ["plain", "mebp", "mezo", "zo2"])
def test_a_visit_computes_several_batches_and_fetches_once(method: str) -> None:
    """Each sequence's loss is that of one batch, but for rounding in products of other sizes; as
    many bytes travel."""
    batch = collate(random_rows([6, 9, 4, 8, 7], [3] * 5), range(5), 4)
    lora = {"rank": 2} if method == "mebp" else None
    plan = blockwalk.method(
        method, compute_dtype="float32", **({"trainable": "disk"} if method == "zo2" else {})
    )
    with blockwalk.Walker(tiny_model("llama", hidden_size=64), plan, lora=lora) as walker:
        one = walker.label_losses(batch)
        torch.testing.assert_close(walker.label_losses(batch, batches=3), one, rtol=1e-6, atol=0.0)
        assert walker.evaluate(batch, batches=2).loss_sum == pytest.approx(
            float(one.sum()), rel=1e-6
        )
        walker.timeline = []
        for batches in (1, 3):
            walker.evaluate(batch, batches=batches)
        (once, _), (thrice, _) = walker.timeline
        assert once.bytes_by_lane() == thrice.bytes_by_lane()
        computed = [
            sum(op.lane is Lane.COMPUTE for op in program.ops) for program in (once, thrice)
        ]
        assert computed[1] == 3 * computed[0]


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "gemma2"])
def test_prompts_of_unequal_length_are_continued_as_by_themselves(kind: str) -> None:
    model = tiny_model(kind).eval()
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, 101, n).astype(np.int32) for n in (3, 9, 6)]
    ids_BS, mask_BS = left_padded(prompts, 0)
    assert mask_BS.sum(1).tolist() == [3, 9, 6]
    alone = [
        model.generate(
            torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    with blockwalk.Walker(
        model, blockwalk.method("plain", compute_dtype="float32"), training=False
    ) as walker:
        written = walker.generate(ids_BS, 6, attention_mask=mask_BS)[:, ids_BS.shape[1] :]
    assert written.tolist() == alone


def answering(tokenizer: Any) -> tuple[Any, tuple[np.ndarray, ...], list[str]]:
    """A model of bytes that was never trained, prompts, and what transformers lets it answer. It
    ends a line where it would say Y, which only the first answer does."""
    model = tiny_model("llama", vocab_size=len(tokenizer)).eval()
    line_end, letter = (
        tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in ("a\n", "Y")
    )
    with torch.no_grad():
        model.lm_head.weight[[line_end, letter]] = model.lm_head.weight[[letter, line_end]]
    prompts = tuple(
        np.array(tokenizer(text)["input_ids"], dtype=np.int32)
        for text in ("Q: 1?", "Question: 23?", "Why")
    )
    written = []
    for prompt in prompts:
        ids = model.generate(
            torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0),
            max_new_tokens=50,
            do_sample=False,
            eos_token_id=[2, line_end],
        )[0, len(prompt) :]
        written.append(tokenizer.decode(ids, skip_special_tokens=True).partition("\n")[0])
    assert len(written[0]) < len(written[1]) - 20
    return model, prompts, written


def test_generated_answers_are_scored(tokenizer: Any) -> None:
    """A model of bytes that was never trained, and the texts that transformers decodes of it as
    right answers: all are found, whatever the batches; another answer scores what its words
    share."""
    model, prompts, written = answering(tokenizer)
    rows = random_rows([4, 4, 4], [1, 1, 1], vocab=len(tokenizer))
    right = [(each,) for each in written]
    wrong = ("nothing of it",)
    with blockwalk.Walker(
        model, blockwalk.method("plain", compute_dtype="float32"), training=False
    ) as walker:
        for answers in (right, [right[0], right[1], wrong]):
            asked = Answers(rows, prompts, tuple(answers))
            found = HeldOut(asked, 2, DataSettings(), tokenizer=tokenizer).evaluate(walker)
            texts = list(zip(written, answers, strict=True))
            assert found.exact_match == pytest.approx(
                np.mean([exact_match(text, a) for text, a in texts])
            )
            assert found.f1 == pytest.approx(np.mean([token_f1(text, a) for text, a in texts]))
    assert found.exact_match == pytest.approx(2 / 3)


def _ask(
    rank: int, method: str, mesh: dict[str, int], asked: Answers, tokenizer: Any
) -> tuple[Any, set[int]]:
    model, _, _ = answering(tokenizer)
    plan = blockwalk.method(method, mesh={"world": 2, **mesh}, compute_dtype="float32")
    with blockwalk.Walker(model, plan, device="cpu") as walker:
        walked = set()
        own = walker.next_logits
        walker.next_logits = lambda batch: walked.add(len(batch["input_ids"])) or own(batch)  # type: ignore[method-assign, func-returns-value]
        found = HeldOut(asked, 2, DataSettings(), tokenizer=tokenizer).evaluate(walker)
    return (found.f1, found.exact_match), walked


@pytest.mark.parametrize(
    ("method", "mesh"), [("mezo", {"data": 2}), ("mezo", {"perturb": 2}), ("zero3", {})]
)
def test_ranks_share_the_questions(method: str, mesh: dict[str, int], tokenizer: Any) -> None:
    """In batches of two each rank walks one question, and both know the figures of all: what
    transformers answers is right, once with the last answer wrong. A batch's answers end at
    different places; gathered blocks are gathered to its last."""
    _, prompts, written = answering(tokenizer)
    rows = random_rows([4, 4, 4], [1, 1, 1], vocab=len(tokenizer))
    for last, exact in ((written[2], 1.0), ("nothing of it", 2 / 3)):
        asked = Answers(rows, prompts, ((written[0],), (written[1],), (last,)))
        f1 = np.mean([1.0, 1.0, token_f1(written[2], (last,))])
        for figures, walked in run_ranks(2, _ask, method, mesh, asked, tokenizer):
            assert figures == (pytest.approx(f1), pytest.approx(exact))
            assert walked == {1}
