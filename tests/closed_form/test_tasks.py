"""Oracle: prompts, scores and draws written down by hand from the paper's table and the original's
sampling, for each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockwalk.data.corpus import held_out_set, training_set
from blockwalk.data.dataset import Answers, Choices, Encoded
from blockwalk.data.metrics import exact_match, macro_f1, token_f1
from blockwalk.data.records import Record
from blockwalk.data.tasks import TASKS, demonstrations, part_of
from blockwalk.plan.run_config import DataSettings, RunConfig
from tests.support import data_files
from tests.support.data_files import jsonl
from tests.support.messages import refused

tokenizer = data_files.tokenizer
NO_YES = ("No", "Yes")
RECORDS: dict[str, tuple[dict[str, Any], str, tuple[str, ...], tuple[int, ...]]] = {
    "sst2": (
        {"sentence": "a fine film ", "label": 1},
        "a fine film It was",
        (" terrible", " great"),
        (1,),
    ),
    "sst5": (
        {"text": "so so .", "label": 2},
        "so so . It was",
        (" terrible", " bad", " okay", " good", " great"),
        (2,),
    ),
    "rte": (
        {"premise": "P.", "hypothesis": "H.", "label": 0},
        'P.\nDoes this mean that "H." is true? Yes or No?\n',
        ("Yes", "No"),
        (0,),
    ),
    "cb": (
        {"premise": "P.", "hypothesis": "H", "label": 2},
        'Suppose P. Can we infer that "H"? Yes, No, or Maybe?\n',
        ("Yes", "No", "Maybe"),
        (2,),
    ),
    "boolq": (
        {"passage": "P.", "question": "is it so", "label": 1},
        "P. Is it so?\n",
        NO_YES,
        (1,),
    ),
    "wsc": (
        {"text": "T.", "span1_text": "Ann", "span2_text": "She", "label": 1},
        'T.\nIn the previous sentence, does the pronoun "she" refer to Ann? Yes or No?\n',
        NO_YES,
        (1,),
    ),
    "wic": (
        {"word": "bank", "sentence1": "A.", "sentence2": "B.", "label": 0},
        'Does the word "bank" have the same meaning in these two sentences? Yes, No?\nA.\nB.\n',
        NO_YES,
        (0,),
    ),
    "multirc": (
        {"paragraph": "P.", "question": "Q?", "answer": "A", "label": 1},
        'P.\nQuestion: Q?\nI found this answer "A". Is that correct? Yes or No?\n',
        NO_YES,
        (1,),
    ),
    "copa": (
        {
            "premise": "It rained.",
            "question": "effect",
            "choice1": "I got wet.",
            "choice2": "The sun set.",
            "label": 1,
        },
        "It rained so",
        (" I got wet.", " the sun set."),
        (1,),
    ),
    "record": (
        {
            "passage": "Ann met Bob.\n@highlight\nThey sang",
            "query": "@placeholder sang with Bob.",
            "entities": ["Bob", "Ann", "Eve"],
            "answers": ["Eve", "Ann"],
        },
        "Ann met Bob.\n- They sang\n-",
        (" Bob sang with Bob.", " Ann sang with Bob.", " Eve sang with Bob."),
        (2, 1),
    ),
    "trec": (
        {"text": "Who ?", "coarse_label": 3},
        "Who ? Type:",
        (" Expression", " Entity", " Description", " Human", " Location", " Number"),
        (3,),
    ),
    "squad": (
        {
            "title": "T",
            "context": "C.",
            "question": "Q? ",
            "answers": {"text": ["one", "two"], "answer_start": [0, 1]},
        },
        "Title: T\nContext: C.\nQuestion: Q?\nAnswer:",
        (" one\n",),
        (0,),
    ),
    "drop": (
        {
            "passage": "P.",
            "question": "Q?",
            "answers_spans": {"spans": ["3", "three"], "types": ["number", "span"]},
        },
        "Passage: P.\nQuestion: Q?\nAnswer:",
        (" 3\n",),
        (0,),
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_prompt_and_the_candidates_of_a_task(name: str) -> None:
    fields, prompt, candidates, right = RECORDS[name]
    question = TASKS[name].question(Record(fields, "x"))
    assert (question.prompt, question.candidates, question.right) == (prompt, candidates, right)
    assert question.answers == {"squad": ("one", "two"), "drop": ("3", "three")}.get(name, ())
    for missing in fields:
        if missing in ("label", "coarse_label", "answers", "answers_spans", "entities"):
            without = {key: value for key, value in fields.items() if key != missing}
            with refused(ValueError, "x:"):
                TASKS[name].question(Record(without, "x"))


def test_variants_of_records_are_read() -> None:
    google = {"passage": "P.", "question": "Is it?", "answer": True}
    assert TASKS["boolq"].question(Record(google, "x")).right == (1,)
    flat = {"title": "T", "context": "C.", "question": "Q?", "answers": ["one"]}
    assert TASKS["squad"].question(Record(flat, "x")).answers == ("one",)


def test_demonstrations_are_answered_questions_with_blank_lines_between() -> None:
    asked = [TASKS[name].question(Record(RECORDS[name][0], "x")) for name in ("sst2", "squad")]
    assert demonstrations(asked) == (
        "a fine film It was great\n\nTitle: T\nContext: C.\nQuestion: Q?\nAnswer: one\n\n"
    )


# --- splits
# --------------------------------------------------------------------------------------------------


def test_the_split_is_the_originals() -> None:
    """The original's: numpy's global generator, seeded, permutes the training records; the first
    1,000 + 500 are taken, the last 500 of them for development; the evaluation's records are the
    first 1,000 of their own permutation."""
    records = [Record({"n": n}, "x") for n in range(2000)]
    np.random.seed(7)
    order = np.random.permutation(2000).tolist()
    settings = DataSettings(task="sst2", task_seed=7)

    def numbers(part: str, **changes: int) -> list[int]:
        found = part_of(records, DataSettings(task="sst2", task_seed=7, **changes), part, "x")  # type: ignore[arg-type]
        return [record.fields["n"] for record in found]

    assert settings.task_train == 1000
    assert numbers("train") == order[:1000]
    assert numbers("dev") == order[1000:1500]
    assert numbers("test") == order[:1000]
    assert numbers("train", task_train=0, task_dev=0) == order
    assert numbers("known")[:32] == order[:32]
    few = part_of(records[:600], settings, "train", "x")
    assert len(few) == 100
    with refused(ValueError, "x 250 data.task_dev=500"):
        part_of(records[:250], settings, "train", "x")


def test_a_local_file_stands_in_for_the_hub(tmp_path: Path, tokenizer: Any) -> None:
    """Records of ReCoRD have as many candidates as they have entities; several may be right, and
    one is learnt."""
    rows = [RECORDS["record"][0], {**RECORDS["record"][0], "entities": ["Ann", "Cy"]}]
    file = jsonl(tmp_path / "d.jsonl", *rows)
    settings = DataSettings(task="record", train=str(file), eval=str(file), task_dev=0)
    trained = training_set(settings, tokenizer)
    assert isinstance(trained, Encoded)
    learnt = {tokenizer.decode(trained[i][0][trained[i][1]]) for i in range(2)}
    assert learnt == {" Eve sang with Bob.", " Ann sang with Bob."}
    held_out, count = held_out_set(settings, tokenizer, 0)
    assert isinstance(held_out, Choices)
    assert (count, sorted(np.diff(held_out.firsts).tolist())) == (2, [2, 3])
    with refused(ValueError, "2 3 zo.objective loss"):
        training_set(settings, tokenizer, every_word=True).classes  # type: ignore[union-attr]  # noqa: B018
    shown, _ = held_out_set(DataSettings(**{**vars_of(settings), "shots": 1}), tokenizer, 0)
    assert isinstance(shown, Choices)
    longer = len(shown.rows.token_ids) - len(held_out.rows.token_ids)
    texts = [tokenizer.decode(shown.rows[i][0]) for i in range(len(shown.rows))]
    assert longer > 0
    assert all(text.count("- They sang") == 2 and "\n\nAnn met Bob." in text for text in texts)


def vars_of(settings: DataSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in DataSettings.__dataclass_fields__}


def test_generated_tasks_have_prompts_and_answers(tmp_path: Path, tokenizer: Any) -> None:
    file = jsonl(tmp_path / "d.jsonl", RECORDS["squad"][0])
    asked, _ = held_out_set(DataSettings(task="squad", eval=str(file)), tokenizer, 0)
    assert isinstance(asked, Answers)
    assert tokenizer.decode(asked.prompts[0]) == "<s>" + RECORDS["squad"][1]
    assert asked.answers == (("one", "two"),)
    ids, in_loss = asked.rows[0]
    assert tokenizer.decode(ids[in_loss]) == " one\n"


def test_settings_of_tasks_that_make_no_sense_are_refused(tokenizer: Any) -> None:
    with refused(ValueError, "data.task sst sst2"):
        training_set(DataSettings(task="sst"), tokenizer)
    for settings, message in (
        (DataSettings(task="sst2", template="{a} {label}", label_words=("a", "b")), "prompt"),
        (DataSettings(task="sst2", task_part="train"), "test dev"),
        (DataSettings(shots=3), "questions"),
        (DataSettings(task="sst2", task_dev=-1), "data.task_dev -1"),
    ):
        with refused(ValueError, message):
            RunConfig(data=settings)


# --- metrics
# --------------------------------------------------------------------------------------------------


def test_words_of_answers_are_compared() -> None:
    """By hand: "the red cat sat" and "a red cat" share 2 of 3 and of 2 words: precision 2/3, recall
    1, F1 0.8."""
    assert token_f1("The red cat sat!", ["A red cat"]) == pytest.approx(0.8)
    assert token_f1("red red", ["red"]) == pytest.approx(2 / 3)
    assert token_f1("dog", ["cat", "dog."]) == 1.0
    assert token_f1("", ["cat"]) == 0.0
    assert exact_match(" The  Red-cat, ", ["a dog", "redcat"]) == 1.0
    assert exact_match("red cat", ["redcat"]) == 0.0


def test_f1_over_classes() -> None:
    """By hand: class 0 has TP 1, FP 1, FN 0: 2/3; class 1 has TP 1, FP 0, FN 1: 2/3; class 2 never
    comes: 0."""
    assert macro_f1([0, 0, 1], [0, 1, 1], 3) == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)


def test_f1_over_classes_is_scikit_learns() -> None:
    """Oracle: scikit-learn, which the ``evaluate`` package's F1 calls, over draws in which classes
    are missing too."""
    metrics = pytest.importorskip("sklearn.metrics")
    for seed in range(20):
        chosen, targets = np.random.default_rng(seed).integers(0, 4, (2, 12)).tolist()
        expected = metrics.f1_score(
            targets, chosen, labels=range(5), average="macro", zero_division=0
        )
        assert macro_f1(chosen, targets, 5) == pytest.approx(expected)


def test_every_task_is_in_the_help_text_and_the_page() -> None:
    from blockwalk.cli import settings_help

    sentence = settings_help.described("data.task")[1]
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    for name in TASKS:
        assert name in sentence
        assert f"`{name}`" in page
    assert TASKS.keys() == RECORDS.keys()
