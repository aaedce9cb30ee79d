"""Oracle: what each setting means in the tool that has it, written down by hand for twelve files
with the settings that these tools publish; and the dry run of the file that is written."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockwalk.cli.main import main
from blockwalk.train import config
from blockwalk.train.conversion import tool_of
from tests.conftest import TinyRun
from tests.support.messages import says

ALL_LINEAR = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]

AXOLOTL_LORA = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "load_in_8bit": False,
    "load_in_4bit": False,
    "strict": False,
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "dataset_prepared_path": "last_run_prepared",
    "val_set_size": 0.1,
    "output_dir": "./outputs/lora-out",
    "adapter": "lora",
    "lora_model_dir": None,
    "sequence_len": 2048,
    "sample_packing": True,
    "eval_sample_packing": True,
    "pad_to_sequence_len": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": ALL_LINEAR,
    "wandb_project": None,
    "gradient_accumulation_steps": 2,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "optimizer": "adamw_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-4,
    "bf16": "auto",
    "fp16": None,
    "tf32": False,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "flash_attention": True,
    "loss_watchdog_threshold": 5.0,
    "loss_watchdog_patience": 3,
    "warmup_steps": 10,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}
FACTORY_LORA = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "saves/llama3-8b/lora/sft",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
TRL_LORA = {
    "model_name_or_path": "Qwen/Qwen2-0.5B",
    "dataset_name": "trl-lib/Capybara",
    "learning_rate": 2e-4,
    "num_train_epochs": 1,
    "packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "eos_token": "<|im_end|>",
    "eval_strategy": "steps",
    "eval_steps": 100,
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "output_dir": "Qwen2-0.5B-SFT",
}
UNSLOTH = {
    "model_name": "unsloth/Meta-Llama-3.1-8B",
    "max_seq_length": 2048,
    "dtype": None,
    "load_in_4bit": True,
    "r": 16,
    "target_modules": ALL_LINEAR,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "bias": "none",
    "use_gradient_checkpointing": "unsloth",
    "random_state": 3407,
    "use_rslora": False,
    "loftq_config": None,
    "dataset_text_field": "text",
    "dataset_num_proc": 2,
    "packing": False,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "warmup_steps": 5,
    "max_steps": 60,
    "learning_rate": 2e-4,
    "logging_steps": 1,
    "optim": "adamw_8bit",
    "weight_decay": 0.01,
    "lr_scheduler_type": "linear",
    "seed": 3407,
    "output_dir": "outputs",
    "report_to": "none",
}
MLX = {
    "model": "mlx_model",
    "train": True,
    "fine_tune_type": "lora",
    "optimizer": "adamw",
    "data": "train",
    "seed": 0,
    "num_layers": -1,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-5,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "resume_adapter_file": None,
    "adapter_path": "adapters",
    "save_every": 100,
    "test": False,
    "max_seq_length": 2048,
    "grad_checkpoint": False,
    "lora_parameters": {"keys": ["self_attn.q_proj"], "rank": 8, "scale": 20.0, "dropout": 0.0},
}


def without(settings: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    """Settings without some, and with others changed."""
    return {name: value for name, value in settings.items() if name not in names} | changes


def sft_config() -> dict[str, Any]:
    """A dump of TRL's own configuration, as ``to_dict`` gives it."""
    trl = pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = trl.SFTConfig(output_dir="x", use_cpu=True, bf16=False, report_to=[])
    return json.loads(arguments.to_json_string())


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "axolotl, lora": (
        AXOLOTL_LORA,
        {
            "model": "NousResearch/Llama-3.2-1B",
            "batch_size": 4,
            "epochs": 1.0,
            "lora.rank": 16,
            "lora.alpha": 32.0,
            "lora.target_modules": tuple(ALL_LINEAR),
            "data.eval_share": 0.1,
            "data.packing": True,
            "plan.optimizer.schedule": "cosine",
            "plan.optimizer.max_grad_norm": 1.0,
            "plan.recompute": "all",
        },
    ),
    "axolotl, qlora": (
        without(
            AXOLOTL_LORA,
            "warmup_steps",
            load_in_4bit=True,
            adapter="qlora",
            warmup_ratio=0.1,
            attn_implementation="flash_attention_2",
        ),
        {"plan.frozen.codec": "int4a", "plan.optimizer.warmup_steps": 0.1, "lora.rank": 16},
    ),
    "axolotl, 8 bits": (
        without(
            AXOLOTL_LORA,
            "lora_target_modules",
            load_in_8bit=True,
            lora_target_linear=True,
            model_type="LlamaForCausalLM",
            tokenizer_type="AutoTokenizer",
            chat_template="llama3",
            gradient_accumulation_steps=4,
        ),
        {"plan.frozen.codec": "int8", "batch_size": 8, "data.chat_template": "llama3"},
    ),
    "axolotl, all parameters": (
        without(
            AXOLOTL_LORA,
            *(name for name in AXOLOTL_LORA if name.startswith("lora") or name == "adapter"),
            optimizer="paged_adamw_8bit",
            gradient_checkpointing_kwargs={"use_reentrant": False},
            learning_rate=2e-5,
        ),
        {"lora": None, "plan.optimizer.name": "adamw", "plan.optimizer.learning_rate": 2e-5},
    ),
    "LLaMA-Factory, lora": (
        FACTORY_LORA,
        {
            "batch_size": 8,
            "epochs": 3.0,
            "lora.rank": 8,
            "lora.alpha": 16.0,  # twice the rank where the file does not say
            "lora.target_modules": "all-linear",
            "plan.optimizer.warmup_steps": 0.1,
            "plan.optimizer.max_grad_norm": 1.0,
            "plan.compute_dtype": "bfloat16",
            "data.max_length": 2048,
        },
    ),
    "LLaMA-Factory, qlora and lora+": (
        without(FACTORY_LORA, quantization_bit=4, loraplus_lr_ratio=16.0, lora_rank=16),
        {"plan.frozen.codec": "int4a", "plan.optimizer.lora_b_ratio": 16.0, "lora.alpha": 32.0},
    ),
    "LLaMA-Factory, all parameters": (
        without(
            FACTORY_LORA,
            "lora_rank",
            "lora_target",
            "warmup_ratio",
            finetuning_type="full",
            val_size=0.1,
            eval_strategy="steps",
            eval_steps=500,
            per_device_eval_batch_size=1,
            warmup_steps=0.1,
        ),
        {"lora": None, "eval_every": 500, "data.eval_share": 0.1, "eval_batch_size": 1},
    ),
    "TRL, lora": (
        without(TRL_LORA, "eos_token"),
        {
            "batch_size": 16,
            "lora.rank": 32,
            "lora.dropout": 0.05,
            "data.max_length": 1024,
            "plan.optimizer.schedule": "linear",
            "eval_every": 100,
        },
    ),
    "TRL, all parameters": (
        without(TRL_LORA, "eos_token", "use_peft", "lora_r", "lora_alpha", save_strategy="no"),
        {"lora": None, "save_every": 0, "plan.optimizer.learning_rate": 2e-4},
    ),
    "unsloth": (
        UNSLOTH,
        {
            "plan.frozen.codec": "int4a",
            "lora.rank": 16,
            "max_steps": 60,
            "batch_size": 8,
            "plan.seed": 3407,
            "plan.optimizer.schedule": "linear",
            "plan.optimizer.warmup_steps": 5,
        },
    ),
    "mlx-lm": (
        MLX,
        {
            "batch_size": 4,
            "max_steps": 1000,
            "lora.alpha": 160.0,
            "lora.target_modules": ("self_attn.q_proj",),
            "output_dir": "adapters",
            "plan.optimizer.schedule": "constant",
        },
    ),
}
"""Files by name, and what they mean."""


def converted(folder: Path, settings: dict[str, Any], suffix: str = "yaml") -> Path:
    """The file that the command writes for settings."""
    source = folder / f"theirs.{suffix}"
    source.write_text(json.dumps(settings) if suffix == "json" else yaml.safe_dump(settings))
    out = folder / "run.yaml"
    assert main(["convert-config", str(source), "--out", str(out)]) == 0
    return out


def dry_run(file: Path, tiny_run: TinyRun) -> int:
    """The exit code of a dry run of a file with a small model, on records that are there."""
    flags = {"model": tiny_run.model, "data.train": tiny_run.train, "data.format": "text"}
    flags |= {
        "data.max_length": 64,
        "output_dir": file.parent / "run",
        "max_steps": 100,
        "lora.target_modules": "all-linear",
    }
    run = config.load(file)
    if run.lora is None:
        del flags["lora.target_modules"]
    words = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return main(["train", str(file), "--dry-run", *words])


@pytest.mark.parametrize("case", CASES)
def test_a_file_means_the_same_here(
    case: str, tmp_path: Path, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = CASES[case]
    out = converted(tmp_path, theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every name is ours
        run = config.load(out)
    assert {name: attrgetter(name)(run) for name in ours} == ours
    assert dry_run(out, tiny_run) == 0, capsys.readouterr()


def test_a_dump_of_trls_own_configuration_is_converted(tmp_path: Path, tiny_run: TinyRun) -> None:
    """Oracle: the values of TRL's own object."""
    theirs = sft_config()
    out = converted(tmp_path, theirs, "json")
    run = config.load(out)
    rate = run.plan.optimizer
    assert (run.batch_size, run.epochs) == (theirs["per_device_train_batch_size"], 3.0)
    assert (rate.learning_rate, rate.schedule) == (theirs["learning_rate"], "linear")
    assert rate.max_grad_norm == theirs["max_grad_norm"]
    assert "# model:" in out.read_text()
    assert "# data.train:" in out.read_text()
    assert dry_run(out, tiny_run) == 0


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (without(FACTORY_LORA, stage="dpo", pref_loss="hinge"), "stage dpo pref_loss hinge"),
        (without(FACTORY_LORA, stage="ppo"), "stage ppo"),
        (without(AXOLOTL_LORA, rl="grpo"), "rl grpo"),
        (without(AXOLOTL_LORA, rl="orpo", rl_beta=-1), "rl orpo rl_beta -1"),
        (without(TRL_LORA, beta=0.1), "beta 0.1"),
        (without(AXOLOTL_LORA, train_on_inputs=True), "train_on_inputs true"),
        (without(AXOLOTL_LORA, s2_attention=True), "s2_attention true"),
        (without(FACTORY_LORA, use_galore=True), "use_galore true"),
        (without(FACTORY_LORA, pissa_init=True), "pissa_init true"),
        (without(TRL_LORA, label_smoothing_factor=0.1), "label_smoothing_factor 0.1"),
        (without(TRL_LORA, no_such_name=7), "no_such_name 7"),
        (without(AXOLOTL_LORA, load_in_8bit=True, load_in_4bit=True), "load_in_4bit true"),
        (without(UNSLOTH, full_finetuning=True, use_peft=True), "full_finetuning use_peft lora"),
        (without(AXOLOTL_LORA, warmup_ratio=3), "warmup_ratio 3"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_nothing_is_written(
    settings: dict[str, Any], facts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(settings))
    assert main(["convert-config", str(source), "--out", str(tmp_path / "run.yaml")]) == 2
    says(capsys.readouterr().err, facts, str(source))
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    ("settings", "name", "ours"),
    [
        (without(FACTORY_LORA, stage="dpo"), "dpo", {"beta": 0.1}),
        (
            without(FACTORY_LORA, stage="dpo", pref_loss="sigmoid", pref_beta=0.3),
            "dpo",
            {"beta": 0.3},
        ),
        (
            without(FACTORY_LORA, stage="dpo", pref_loss="simpo", simpo_gamma=1.5),
            "simpo",
            {"gamma": 1.5},
        ),
        (
            without(FACTORY_LORA, stage="kto", kto_chosen_weight=2, pref_beta=0.2),
            "kto",
            {"desirable_weight": 2, "beta": 0.2},
        ),
        (without(AXOLOTL_LORA, rl="orpo", orpo_alpha=0.2), "orpo", {"beta": 0.2}),
        (
            without(AXOLOTL_LORA, rl="ipo", rl_beta=0.4),
            "ipo",
            {"beta": 0.4},
        ),
        (without(MLX, train_mode="cpo"), "cpo", {"beta": 0.1}),
    ],
)
def test_an_objective_elsewhere_is_ours_with_its_settings(
    settings: dict[str, Any], name: str, ours: dict[str, float], tmp_path: Path
) -> None:
    """Oracle: the tools' documentation of each setting, read by eye."""
    plan = config.load(converted(tmp_path, settings)).plan
    assert plan.objective.partition("(")[0] == name
    assert {key: getattr(plan.objective_facts.settings, key) for key in ours} == ours


def test_pairs_of_the_register_become_their_file(tmp_path: Path) -> None:
    """Oracle: the entry of LLaMA-Factory's demo pairs, as it documents such entries."""
    (tmp_path / "data").mkdir()
    columns = {"messages": "conversations", "chosen": "better", "rejected": "rejected"}
    pairs = {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt"}
    register = {"pairs": {**pairs, "columns": columns}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(register))
    settings = without(FACTORY_LORA, stage="dpo", dataset="pairs")
    source = config.load(converted(tmp_path, settings)).data.train
    (source,) = source if isinstance(source, tuple | list) else (source,)
    assert (source.path, source.columns) == (
        str(tmp_path / "data" / "pairs.json"),
        ("chosen=better",),
    )


def test_what_has_no_counterpart_is_a_comment_with_the_reason(tmp_path: Path) -> None:
    text = converted(tmp_path, FACTORY_LORA).read_text()
    not_followed = text.partition("# Not followed:")[2].partition("# Left out")[0]
    assert "identity" in not_followed
    assert "max_samples: 1000" in text.partition("# Not followed:")[0]
    left_out = text.partition("# Left out")[2]
    assert all(name in left_out for name in ("plot_loss", "ddp_timeout", "overwrite_cache"))
    assert all(len(line) <= 100 for line in text.splitlines()[2:])  # the first two have paths


def test_names_of_the_register_become_files(tmp_path: Path) -> None:
    """Oracle: a register in the form that LLaMA-Factory documents."""
    (tmp_path / "data").mkdir()
    register = {
        "identity": {"file_name": "identity.json"},
        "alpaca_en_demo": {
            "hf_hub_url": "someone/alpaca",
            "columns": {"prompt": "question", "response": "output"},
        },
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(register))
    run = config.load(converted(tmp_path, FACTORY_LORA))
    first, second = run.data.train
    assert first == str(tmp_path / "data" / "identity.json")
    assert (second.path, second.columns) == ("someone/alpaca", ("instruction=question",))


def test_a_folder_of_mlx_lm_becomes_its_files(tmp_path: Path) -> None:
    """Oracle: the names that mlx-lm gives the files of its folder."""
    (tmp_path / "data").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"text": "a"}\n')
    data = config.load(converted(tmp_path, MLX | {"data": str(tmp_path / "data")})).data
    assert data.train == str(tmp_path / "data" / "train.jsonl")
    assert data.eval == str(tmp_path / "data" / "valid.jsonl")


def test_a_source_keeps_its_columns_and_says_what_is_not_read(tmp_path: Path) -> None:
    source = {"path": "a/b", "split": "train", "field_messages": "chat", "roles": {"user": ["me"]}}
    out = converted(tmp_path, without(AXOLOTL_LORA, datasets=[source]))
    (read,) = config.load(out).data.train
    assert (read.path, read.split, read.columns) == ("a/b", "train", ("messages=chat",))
    assert "roles: {user: [me]}" in out.read_text().partition("# Not followed:")[2]


def test_a_foreign_file_is_answered_in_one_line_that_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(AXOLOTL_LORA))
    assert main(["train", str(source), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    says(line, f"blockwalk convert-config {source}", "load_in_4bit datasets adapter")


def test_a_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = converted(tmp_path, TRL_LORA | {"eos_token": None})
    before = out.read_bytes()
    assert main(["convert-config", str(tmp_path / "theirs.yaml"), "--out", str(out)]) == 2
    says(capsys.readouterr().err, str(out))
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["", "- 1\n", "{", "just a word\n"])
def test_a_file_without_settings_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(text)
    assert main(["convert-config", str(source), "--out", str(tmp_path / "run.yaml")]) == 2
    says(capsys.readouterr().err, str(source))


def test_the_tool_is_known_by_its_names() -> None:
    assert tool_of(list(AXOLOTL_LORA)) == "axolotl"
    assert tool_of(list(FACTORY_LORA)) == "LLaMA-Factory"
    assert tool_of(list(TRL_LORA)) == "TRL and PEFT"
    assert tool_of(["learning_rate", "warmup_steps"]) == "transformers"


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    """Oracle: the interpreter's own list of modules."""
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(AXOLOTL_LORA))
    program = (
        "import sys; from blockwalk.cli.main import main;"
        f"code = main(['convert-config', {str(source)!r}, '--out', {str(tmp_path / 'r.yaml')!r}]);"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
