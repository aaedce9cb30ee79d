"""Oracle: the parser itself, which reads the line that each error offers; and a list of 108 names
of four tools, each with the setting that does the same, written down by hand."""

from __future__ import annotations

import operator
import shlex
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from blockwalk.plan.foreign_names import BY_NAME
from blockwalk.plan.foreign_rows import ROWS, Foreign
from blockwalk.plan.losses import LOSSES, LossFacts, whole_logits
from blockwalk.plan.parsing import Loader, did_you_mean, flat
from blockwalk.plan.row_settings import setting
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.update_rules import RULES, RuleFacts
from blockwalk.train import config
from blockwalk.train.foreign_settings import WRITE, Note
from tests.support.messages import missing, says
from tests.support.rows import registered

pytestmark = pytest.mark.fast

NO_SETTING: dict[str, set[str]] = {
    "dataloader_num_workers": set(),
    "group_by_length": set(),
    "assistant_only_loss": set(),
    "completion_only_loss": set(),
    "train_on_inputs": set(),
    "special_tokens": set(),
    "mask_history": set(),
    "flash_attn": set(),
    "mask_prompt": set(),
}
"""Names of four tools for what no setting does here."""

_PAIRS = """
per_device_train_batch_size=batch_size per_device_eval_batch_size=eval_batch_size
num_train_epochs=epochs learning_rate=optimizer.learning_rate lr_scheduler_type=optimizer.schedule
warmup_ratio=optimizer.warmup_steps warmup_steps=optimizer.warmup_steps
weight_decay=optimizer.weight_decay adam_beta1=optimizer.betas adam_epsilon=optimizer.eps
max_grad_norm=optimizer.max_grad_norm logging_steps=log_every save_steps=save_every
eval_steps=eval_every save_total_limit=keep_checkpoints save_strategy=save_every
eval_strategy=eval_every bf16=compute_dtype fp16=compute_dtype gradient_checkpointing=recompute
optim=optimizer.name report_to=report_to run_name=run_name hub_model_id=push_to_hub
push_to_hub=push_to_hub load_best_model_at_end=keep_best seed=seed data_seed=seed
torch_compile=compile deepspeed=method fsdp=method neftune_noise_alpha=neftune_noise_alpha
max_length=data.max_length max_seq_length=data.max_length packing=data.packing
dataset_text_field=data.columns chat_template_path=data.chat_template
gradient_accumulation_steps=gradient_accumulation_steps max_steps=max_steps output_dir=output_dir
overwrite_output_dir=overwrite_output_dir resume_from_checkpoint=resume_from_checkpoint
eval_on_start=eval_first pad_to_multiple_of=data.padding_multiple base_model=model
adapter=lora,frozen load_in_4bit=frozen load_in_8bit=frozen lora_r=lora.rank lora_alpha=lora.alpha
lora_dropout=lora.dropout lora_target_linear=lora.target_modules
lora_target_modules=lora.target_modules lora_modules_to_save=lora.options lora_model_dir=lora.from
datasets=data.train test_datasets=data.eval val_set_size=data.eval_share
sequence_len=data.max_length sample_packing=data.packing micro_batch_size=batch_size
num_epochs=epochs optimizer=optimizer.name lr_scheduler=optimizer.schedule wandb_project=environment
chat_template=data.chat_template early_stopping_patience=early_stopping evals_per_epoch=eval_every
saves_per_epoch=save_every layer_offloading=frozen activation_offloading=activation
model_name_or_path=model finetuning_type=lora,frozen lora_rank=lora.rank
lora_target=lora.target_modules dataset=data.train eval_dataset=data.eval
template=data.chat_template cutoff_len=data.max_length val_size=data.eval_share
adapter_name_or_path=lora.from quantization_bit=frozen use_dora=lora.options use_rslora=lora.options
additional_target=lora.options loraplus_lr_ratio=optimizer.lora_b_ratio iters=max_steps
grad_checkpoint=recompute steps_per_report=log_every steps_per_eval=eval_every save_every=save_every
adapter_path=output_dir batch_size=batch_size data=data.train
grad_accumulation_steps=gradient_accumulation_steps resume_adapter_file=lora.from
max_samples=data.max_samples
"""
SETTING_OF = {
    name: set(ours.split(",")) for name, _, ours in (pair.partition("=") for pair in _PAIRS.split())
}
"""Names of four tools, and the setting that does it here."""

KNOWN = frozenset(config.setting_names())


def answer(
    settings: dict[str, Any], flags: bool = False
) -> tuple[RunConfig | None, str, list[str]]:
    """The run that settings are read as, or else the first error, and its further ones and the
    notes."""
    given: Any = ({}, settings.items()) if flags else (settings, ())
    further: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = config.from_mapping(*given, as_flags=flags)
            error = ""
        except ValueError as problem:
            run = None
            error, *further = getattr(problem, "problems", [str(problem)])
    notes = [str(each.message) for each in caught if issubclass(each.category, Note)]
    return run, error, [*further, *notes]


def pasted(error: str) -> tuple[RunConfig, set[str]]:
    """The run of the line that an error offers, and the names that the line sets."""
    line = error.rpartition(WRITE)[2]
    assert "\n" not in line
    settings = yaml.load(line, Loader=Loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return config.from_mapping(settings), set(flat(settings))


def sets(name: str, row: Foreign) -> bool:
    """Whether a name is the row's setting, a part of it, or one that does the same."""
    return (
        name == row.ours
        or name.startswith(f"{row.ours}.")
        or (row.ours == "lora" and name.startswith(("lora", "frozen")))
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.all_names[0])
def test_each_name_is_taken_or_its_error_has_a_line_that_can_be_pasted(row: Foreign) -> None:
    for name in row.all_names:
        run, error, notes = answer({name: row.example})
        if run is not None:
            assert notes, name
            assert row.ours in notes[0] or row.idle is not None, name
        elif row.ours == "lora.from":
            assert error.endswith(f"{WRITE}lora.from: {row.example}")
        elif row.ours in KNOWN and row.ours not in (
            "compile",
            "data.weights",
        ):  # which need others beside them
            _, names = pasted(error)
            assert all(sets(each, row) for each in names), error
        else:
            assert row.sentence in error, error
            assert WRITE not in error, error


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.ours in KNOWN], ids=lambda row: row.all_names[0]
)
def test_a_line_for_the_command_line_is_a_flag_that_can_be_pasted(row: Foreign) -> None:
    _, error, _ = answer({row.all_names[0]: row.example}, flags=True)
    if WRITE in error:
        words = shlex.split(error.rpartition(WRITE)[2])
        flags, others = config.split_flags(words)
        assert (len(flags), others) == (1, [])
        assert sets(flags[0][0], row)
        if row.ours == "lora.from":
            return  # a folder that is not there
        config.from_mapping({}, flags)


def test_whatever_the_value_a_line_can_be_pasted() -> None:
    """Each row meets four of the values, and each value a quarter of the rows."""
    values = [
        "many",
        "",
        None,
        True,
        False,
        0,
        -1,
        7,
        0.3,
        "a: b",
        "x\ny",
        "[1",
        [],
        ["é", "#"],
        "''",
        10**30,
    ]
    for place, row in enumerate(ROWS):
        for value in values[place % 4 :: 4]:
            _, error, notes = answer({row.all_names[-1]: value})
            for text in (error, *notes):
                if WRITE in text and row.ours != "lora.from":
                    pasted(text)


def test_108_names_of_four_tools_lead_to_their_setting_and_to_no_other() -> None:
    """Oracle: the list above."""
    assert len(SETTING_OF) + len(NO_SETTING) >= 108 - 10  # some of the 108 are of two tools
    for name, ours in (SETTING_OF | NO_SETTING).items():
        if name in KNOWN:
            assert name in ours
            continue
        row = BY_NAME[name]
        assert row.sentence
        assert row.ours in ours or (not row.ours and ours <= {"environment"}), name
        hint = did_you_mean(name, sorted(KNOWN))
        assert hint in ("", f"; did you mean {row.ours!r}?"), name
        assert (hint != "") == bool(ours & KNOWN), name


def test_no_name_elsewhere_is_guessed_by_its_spelling() -> None:
    """Oracle: the table. And one wrong letter in a name of ours is still found."""
    for name, row in BY_NAME.items():
        assert did_you_mean(name, sorted(KNOWN)) in ("", f"; did you mean {row.ours!r}?"), name
    for wrong, right in (
        ("batchsize", "batch_size"),
        ("lora.rnk", "lora.rank"),
        ("learnin_rate", "optimizer.learning_rate"),
    ):
        assert did_you_mean(wrong, sorted(KNOWN)) == f"; did you mean {right!r}?"
    assert answer({"save_stps": 5})[1].startswith("unknown setting 'save_stps'")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, "batch_size: 8"),
        ({"micro_batch_size": 2, "mesh": {"world": 3}, "method": "fcdp"}, "batch_size: 6"),
        ({"training_args": {"learning_rate": 2e-5}}, "optimizer.learning_rate: 2.0e-05"),
        ({"training_args": {"output_dir": "runs/a"}}, "output_dir: runs/a"),
        ({"lora": {"target": "all"}}, "lora.target_modules: all-linear"),
        ({"lora_parameters": {"rank": 4, "scale": 2.5}}, "lora.alpha: 10"),
        (
            {"datasets": [{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl"}]},
            "data.train: [a.jsonl, b.jsonl]",
        ),
        ({"adam_beta2": 0.95}, "optimizer.betas: [0.9, 0.95]"),
        (
            {"lr_scheduler_kwargs": {"min_lr": 1e-5}, "optimizer": {"learning_rate": 1e-4}},
            "optimizer.min_ratio: 0.1",
        ),
        ({"load_in_4bit": True}, "frozen.codec: int4a"),
        ({"load_in_4bit": False}, "frozen.codec: raw"),
        ({"bf16": True}, "compute_dtype: bfloat16"),
        ({"frozen": "nf4"}, "frozen.codec: nf4"),
        ({"frozen": "cpu"}, "frozen.tier: host"),
        ({"optim": "adamw_8bit"}, "optimizer.name: adamw"),
        ({"optimizer": "paged_adamw_8bit"}, "optimizer.name: adamw"),
        ({"optimizer": {"name": "adamw_torch"}}, "optimizer.name: adamw"),
        ({"optimizer": {"schedule": "cosine_with_min_lr"}}, "optimizer.schedule: cosine"),
        ({"recompute": True}, "recompute: all"),
        ({"method": "qlora"}, "frozen.codec: int4a"),
        ({"hub_model_id": "me/x", "push_to_hub": True}, "push_to_hub: me/x"),
        ({"max_steps": -1}, "max_steps: 0"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "frozen.tier: disk"),
        ({"dataset_text_field": "body"}, "data.columns: [text=body]"),
        ({"data": "train.jsonl"}, "data.train: train.jsonl"),
        ({"model": "a/b", "model_revision": "v2"}, "model: a/b@v2"),
        ({"warmup_ratio": 1.0}, "optimizer.warmup_steps: 0.03"),
    ],
)
def test_the_line_holds_what_the_value_means(settings: dict[str, Any], line: str) -> None:
    """Oracle: the meaning of each value in the tool that has it, by hand."""
    _, error, notes = answer(settings)
    assert any(text.endswith(f"{WRITE}{line}") for text in (error, *notes)), (error, notes)


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"num_train_epochs": 3}, "epochs", 3.0),
        ({"num-train-epochs": 3}, "epochs", 3.0),
        ({"batch-size": 4}, "batch_size", 4),
        ({"lora": {"r": 4}}, "lora.rank", 4),
        ({"optimizer": {"lr": 2e-4}}, "plan.optimizer.learning_rate", 2e-4),
        (
            {"lr_scheduler_type": "cosine_with_restarts"},
            "plan.optimizer.schedule",
            "cosine_with_restarts",
        ),
        ({"optim": "adamw_torch"}, "plan.optimizer.name", "adamw"),
        ({"optimizer": "adamw_torch_fused"}, "plan.optimizer.name", "adamw"),
        ({"warmup_ratio": 0.03}, "plan.optimizer.warmup_steps", 0.03),
        ({"save_total_limit": 5}, "keep_checkpoints", 5),
        ({"data": {"max_seq_length": 99}}, "data.max_length", 99),
        ({"load_in_8bit": False}, "batch_size", 8),
        ({"deepspeed": None}, "batch_size", 8),
        ({"fp16": False}, "batch_size", 8),
        ({"save_total_limit": None}, "keep_checkpoints", 2),
        ({"optimizer": None}, "plan.optimizer.name", "adamw"),
        ({"val_set_size": 0.05}, "data.eval_share", 0.05),
    ],
)
def test_what_means_the_same_is_taken_with_a_note(
    settings: dict[str, Any], name: str, value: Any
) -> None:
    """Oracle: the value that went in."""
    run, error, notes = answer(settings)
    assert error == ""
    assert len(notes) == 1
    assert operator.attrgetter(name)(run) == value


def test_a_setting_under_two_names_is_refused_and_a_flag_wins_over_a_file() -> None:
    _, error, _ = answer({"epochs": 2, "num_epochs": 3})
    assert error.startswith("epochs and num_epochs are both given")
    _, error, _ = answer({"lr": 2, "learning_rate": 3})
    assert error.startswith("lr and learning_rate are both given")
    for file, flag in (({"num_epochs": 3}, ("epochs", 5)), ({"epochs": 3}, ("num_epochs", "5"))):
        with pytest.warns(Note):
            run = config.from_mapping(file, [flag])
        assert run.epochs == 5


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"adapter": "qlora", "load_in_4bit": True}, "frozen.codec: int4a"),
        ({"quantization_bit": 4, "finetuning_type": "qlora"}, "frozen.codec: int4a"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "frozen.codec: nf4"),
        ({"bnb_config": {"bnb_4bit_quant_type": "nf4"}, "adapter": "qlora"}, "frozen.codec: nf4"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "frozen.codec: int8"),
    ],
)
def test_several_names_of_one_thing_lead_to_one_line(settings: dict[str, Any], line: str) -> None:
    """Oracle: every line that a file of theirs is answered with."""
    _, error, notes = answer(settings)
    lines = {text.rpartition(WRITE)[2] for text in (error, *notes) if WRITE in text}
    assert lines == {line}


def test_four_and_eight_bits_at_once_lead_to_no_line() -> None:
    _, error, notes = answer({"load_in_4bit": True, "load_in_8bit": True})
    assert len(notes) == 1
    assert not any("frozen.codec" in text for text in (error, *notes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"frozen": "disk × int4a", "frozen.codec": "nf4"}, "int4a nf4 frozen.codec"),
        ({"frozen.codec": "nf4", "frozen": "disk × int4a"}, "int4a nf4 frozen.codec"),
        ({"frozen": {"codec": "int4a"}, "frozen.codec": "nf4"}, "int4a nf4 frozen.codec"),
        ({"trainable": "host x fp16", "trainable.tier": "disk"}, "host disk trainable.tier"),
        ({"optimizer": {"eps": 1e-6}, "optimizer.eps": 1e-7}, "1.0e-06 1.0e-07 optimizer.eps"),
        ({"lora": False, "lora.rank": 4}, "false lora.rank 4"),
        ({"lora": {"rank": 8}, "lora.rank": 4}, "8 lora.rank 4"),
    ],
)
def test_two_values_of_one_setting_are_refused(settings: dict[str, Any], words: str) -> None:
    """Oracle: both values, which the error names; alone each is taken."""
    says(answer(settings)[1], words, "both")
    for name, value in settings.items():
        assert answer({name: value})[1] == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"frozen": "disk × int4a", "frozen.codec": "int4a"},
        {"frozen": "disk", "frozen.codec": "nf4"},
        {"lora": True, "lora.rank": 4},
        {"lora": False, "lora.rank": None},
    ],
)
def test_two_names_that_agree_are_taken(settings: dict[str, Any]) -> None:
    assert answer(settings)[1] == ""


def test_a_flag_wins_over_the_file_and_over_the_flag_before() -> None:
    file = {"frozen": "disk × int4a", "max_steps": 1}
    flags = [("frozen.codec", "nf4"), ("max_steps", "2"), ("max_steps", "3")]
    run = config.from_mapping(file, flags, as_flags=True)
    assert (str(run.plan.frozen.codec), run.max_steps) == ("nf4", 3)


def test_a_name_without_a_value_is_as_if_it_were_absent() -> None:
    """Oracle: the defaults, and a file's value under an override without one."""
    sections = {name.partition(".")[0] for name in KNOWN if "." in name}
    for name in sorted(KNOWN | sections):
        run, error, _ = answer({name: None})
        assert (error, run) == ("", config.from_mapping({})), name
    assert config.from_mapping({"max_steps": 4}, [("max_steps", None)]).max_steps == 4
    source = {"path": "a.jsonl", "weight": None}
    assert answer({"data": {"train": [source]}})[1] == ""
    says(answer({"no_such_setting": None})[1], "no_such_setting")


def test_every_problem_is_said_at_once() -> None:
    _, error, notes = answer({"bf16": True, "load_in_4bit": True, "dpo_beta": 0.1})
    assert error.startswith("unknown setting 'bf16'")
    assert [note.partition(":")[0] for note in notes] == [
        "unknown setting 'load_in_4bit'",
        "unknown setting 'dpo_beta'",
    ]


def test_flags_of_other_tools_are_settings_and_those_of_a_command_are_its_own() -> None:
    """Oracle: the arguments, by hand: a switch has no value, and --adapter is an option of
    generate."""
    words = [
        "run.yaml",
        "--num_train_epochs",
        "2",
        "--bf16",
        "--lora-r=4",
        "--adapter",
        "x",
        "--nonsense",
        "1",
    ]
    pairs, others = config.split_flags(words, {"adapter"})
    assert pairs == [("num_train_epochs", "2"), ("bf16", "true"), ("lora-r", "4")]
    assert others == ["run.yaml", "--adapter", "x", "--nonsense", "1"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.all_names[0])
def test_a_sentence_is_short(row: Foreign) -> None:
    assert len(row.sentence.split()) <= 20
    assert row.sentence.endswith(".")


def test_sentences_read_the_tables() -> None:
    """Oracle: the tables. A rule and a loss from outside stand in the sentences that name what
    there is, and a setting that is called after one leads to it."""

    @dataclass(frozen=True)
    class Own:
        epsilon: float = setting(0.1, least=0, most=1)

    def said(**theirs: object) -> str:
        with pytest.raises(ValueError) as refusal:
            config.from_mapping(theirs)
        return str(refusal.value)

    for name in RULES:
        assert not missing(said(optim_args="x"), name)
    assert "label_smoothing:" not in said(label_smoothing_factor=0.1)
    with (
        registered(RULES, "lion", RuleFacts(states=("velocity",))),
        registered(RULES, "muon", RuleFacts()),
    ):
        assert not missing(said(optim_args="x"), "lion", "muon")
        assert not missing(said(optim="paged_lion_8bit"), "optimizer.name: lion")
        with pytest.warns(Note):
            assert config.from_mapping({"optim": "muon"}).plan.optimizer.name == "muon"
    LOSSES.register("label_smoothing", lambda own: LossFacts("m:f", whole_logits), Own)
    try:
        text = said(label_smoothing_factor=0.2)
        assert not missing(text, "loss: label_smoothing", "loss.epsilon: 0.2"), text
        with pytest.raises(ValueError) as refusal:
            config.from_mapping({}, [("label_smoothing_factor", "0.2")], as_flags=True)
        assert not missing(str(refusal.value), "--loss label_smoothing --loss.epsilon 0.2")
    finally:
        LOSSES.unregister("label_smoothing")
