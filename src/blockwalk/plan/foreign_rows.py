"""Rows for the names of settings in other tools: the one table that parsing asks
(:mod:`blockwalk.plan.foreign_names`) and that the page *Coming from* is written from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blockwalk.plan import foreign_values as to
from blockwalk.plan.losses import LOSSES
from blockwalk.plan.objectives import OBJECTIVES
from blockwalk.plan.table import spoken
from blockwalk.plan.update_rules import RULES

TRANSFORMERS = "transformers"
TRL = "TRL and PEFT"
AXOLOTL = "axolotl"
FACTORY = "LLaMA-Factory"
MLX = "mlx-lm"
OTHERS = "unsloth, DeepSpeed, bitsandbytes and others"
TOOLS = (TRANSFORMERS, TRL, AXOLOTL, FACTORY, MLX, OTHERS)
"""The tools whose names the table has, as the page heads them."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A row: names elsewhere for one thing, and its setting here."""

    ours: str
    """The setting that does it; empty where none does."""
    template: str
    """A sentence on the difference, or on what to use instead. ``{rules}``, ``{losses}`` and
    ``{objectives}`` are the names that the tables have."""
    names: Mapping[str, tuple[str, ...]]
    """Names by tool; nested ones have dots."""
    line: to.Line | None = None
    """The setting of ours and its value for a value of theirs; None where there is no setting."""
    example: Any = None
    """A value that theirs may have, for which ``line`` has an answer."""
    same: Callable[[Any], bool] | None = None
    """Whether a value means the same here, so that the name is taken, with a note; None: never."""
    idle: Callable[[Any], bool] | None = None
    """Whether a value changes nothing that is learnt here, so that it is left out, with a note;
    None: never."""
    refused: bool = False
    """Whether a run without it would learn something else, so that no file with it is
    converted."""

    @property
    def always_idle(self) -> bool:
        """Whether the name is left out whatever its value is."""
        return self.idle is _any

    @property
    def sentence(self) -> str:
        """The sentence, with the names of the rows that there are."""
        rules = self.template.replace("{rules}", spoken(RULES, "and"))
        losses = rules.replace("{losses}", spoken(LOSSES, "and"))
        return losses.replace("{objectives}", spoken(OBJECTIVES, "and"))

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every name of the row, each once."""
        return tuple(dict.fromkeys(name for names in self.names.values() for name in names))


def _names(**tools: str) -> dict[str, tuple[str, ...]]:
    keys = ("hf", "trl", "axolotl", "factory", "mlx", "other")
    headed = dict(zip(keys, TOOLS, strict=True))
    return {headed[tool]: tuple(names.split()) for tool, names in tools.items()}


def _any(value: Any) -> bool:
    return True


def _is_on(value: Any) -> bool:
    return not to.is_off(value)


def is_word(*words: str) -> Callable[[Any], bool]:
    return lambda value: to.word(value) in words


def _taken(
    ours: str, sentence: str, example: Any, same: Callable[[Any], bool] = _any, **tools: str
) -> Foreign:
    """Return a row whose names mean the same as ours."""
    return Foreign(ours, sentence, _names(**tools), to.same(ours), example, same)


def _other(
    ours: str,
    sentence: str,
    line: to.Line,
    example: Any,
    *,
    same: Callable[[Any], bool] | None = None,
    idle: Callable[[Any], bool] | None = None,
    **tools: str,
) -> Foreign:
    """Return a row whose value, or unit, differs from ours."""
    return Foreign(ours, sentence, _names(**tools), line, example, same, idle)


def _of_peft(name: str, example: Any, **tools: str) -> Foreign:
    """Return a row for a field of PEFT's LoraConfig."""
    sentence = "PEFT's own fields stand in lora.options."
    return Foreign(
        "lora.options", sentence, _names(**tools), to.option(name), example, idle=to.is_off
    )


def _none(
    sentence: str,
    idle: Callable[[Any], bool] | None = None,
    *,
    refused: bool = False,
    **tools: str,
) -> Foreign:
    """Return a row that nothing here does; what ``idle`` says of its values is so here anyway."""
    return Foreign("", sentence, _names(**tools), idle=idle, refused=refused)


def _is_padding(value: Any) -> bool:
    """Return whether special tokens are off, or those of padding alone."""
    return to.is_off(value) or (isinstance(value, Mapping) and set(value) <= {"pad_token"})


_STEPS = (
    _other(
        "batch_size",
        "A batch here is a whole step's: sequences of one device × accumulation × ranks.",
        to.whole_batch,
        4,
        hf="per_device_train_batch_size",
        axolotl="micro_batch_size",
        other="train_micro_batch_size_per_gpu per_gpu_train_batch_size per_device_batch_size"
        " device_batch_size",
    ),
    _taken(
        "batch_size",
        "It counts the sequences of a whole step in both.",
        8,
        other="train_batch_size global_batch_size total_batch_size effective_batch_size",
    ),
    _other(
        "eval_batch_size",
        "An evaluation batch here is that of all ranks together.",
        to.evaluated_together,
        8,
        hf="per_device_eval_batch_size",
        other="per_gpu_eval_batch_size",
    ),
    _other(
        "gradient_accumulation_steps",
        "The count is the same, and cuts a step's batch: multiply batch_size by it.",
        to.same("gradient_accumulation_steps"),
        2,
        mlx="grad_accumulation_steps",
        other="gradient_accumulation accumulate_grad_batches grad_accum_steps accumulation_steps"
        " accumulation",
    ),
    _other(
        "together",
        "It is a number of micro-batches now: 1 for micro_batch, all of a step for block.",
        to.visitors,
        "block",
        other="accumulation_order",
    ),
    _taken(
        "epochs",
        "Parts such as 0.5 are taken too; the default is 1.",
        3,
        hf="num_train_epochs",
        axolotl="num_epochs",
        other="num_epoch n_epochs max_epochs train_epochs",
    ),
    _taken(
        "max_steps",
        "It counts optimizer steps and wins over epochs; 0 leaves it to them.",
        1000,
        mlx="iters",
        other="max_train_steps num_training_steps num_train_steps num_steps max_iters train_steps",
    ),
    _none(
        "The batch that fits is foreseen: blockwalk plan RUN.yaml --hardware here --largest_batch.",
        to.is_off,
        hf="auto_find_batch_size",
    ),
)

_OPTIMIZER = (
    _taken(
        "optimizer.learning_rate",
        "The default is 1e-4; it stays constant unless optimizer.schedule is set.",
        2e-4,
        hf="learning_rate",
        axolotl="learning_rate",
        factory="learning_rate",
        mlx="learning_rate",
        other="lr optimizer.params.lr base_lr",
    ),
    _other(
        "optimizer.schedule",
        "The names are those of transformers; constant, the default, climbs through a warm-up as"
        " well.",
        to.schedule,
        "cosine",
        same=to.same_schedule,
        hf="lr_scheduler_type",
        axolotl="lr_scheduler",
        mlx="lr_schedule.name",
        other="scheduler lr_schedule scheduler.type learning_rate_schedule",
    ),
    _taken(
        "optimizer.cycles",
        "It counts the falls of cosine_with_restarts.",
        2,
        hf="lr_scheduler_kwargs.num_cycles",
        other="lr_scheduler_num_cycles",
    ),
    _taken(
        "optimizer.power",
        "It is the power of schedule polynomial.",
        1.0,
        hf="lr_scheduler_kwargs.power",
        other="lr_scheduler_power",
    ),
    _taken(
        "optimizer.cooldown_steps",
        "It counts the last steps of warmup_stable_decay, or is a share of the run.",
        100,
        hf="lr_scheduler_kwargs.num_decay_steps",
    ),
    _taken(
        "optimizer.min_ratio",
        "The last learning rate is written as a share of the highest.",
        0.1,
        hf="lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.min_lr_ratio",
        axolotl="cosine_min_lr_ratio",
        other="min_lr_ratio min_lr_rate",
    ),
    _other(
        "optimizer.min_ratio",
        "The last learning rate is written as a share of the highest.",
        to.last_rate,
        1e-5,
        hf="lr_scheduler_kwargs.min_lr lr_scheduler_kwargs.lr_end",
        other="min_lr lr_end",
    ),
    _none(
        "A schedule's numbers are settings: optimizer.min_ratio, cycles, power and cooldown_steps.",
        to.is_off,
        hf="lr_scheduler_kwargs",
        mlx="lr_schedule.arguments lr_schedule.warmup_init",
    ),
    _taken(
        "optimizer.warmup_steps",
        "It counts steps, or is a share of the run where it is below 1.",
        100,
        hf="warmup_steps",
        axolotl="warmup_steps",
        mlx="lr_schedule.warmup",
        other="num_warmup_steps lr_warmup_steps scheduler.params.warmup_num_steps warmup_num_steps",
    ),
    _other(
        "optimizer.warmup_steps",
        "A warm-up below 1 is a share of the run's steps.",
        to.share("optimizer.warmup_steps"),
        0.03,
        same=to.below_one,
        hf="warmup_ratio",
        axolotl="warmup_ratio",
        other="lr_warmup_ratio warmup_proportion lr_warmup_fraction",
    ),
    _taken(
        "optimizer.weight_decay",
        "It spares norms and biases unless optimizer.decay is all.",
        0.01,
        hf="weight_decay",
        axolotl="weight_decay",
        other="optimizer.params.weight_decay optimizer_config.adamw.weight_decay",
    ),
    _other(
        "optimizer.betas",
        "Both decays stand in one setting.",
        to.betas,
        0.9,
        hf="adam_beta1 adam_beta2",
        axolotl="adam_beta1 adam_beta2",
        other="beta1 beta2",
    ),
    _taken(
        "optimizer.betas",
        "The two numbers are AdamW's.",
        [0.9, 0.95],
        other="betas adam_betas optimizer.params.betas optimizer_config.adamw.betas",
    ),
    _taken(
        "optimizer.eps",
        "It is the number that AdamW adds to the root.",
        1e-8,
        hf="adam_epsilon",
        axolotl="adam_epsilon",
        other="adam_eps eps optimizer.params.eps optimizer_config.adamw.eps",
    ),
    _taken(
        "optimizer.max_grad_norm",
        "The default clips nothing, elsewhere often 1.0; updates then wait for the step's end.",
        1.0,
        hf="max_grad_norm",
        axolotl="max_grad_norm",
        other="gradient_clipping grad_clip gradient_clip_val clip_grad_norm max_norm",
    ),
    _other(
        "optimizer.name",
        "The rules are {rules}. Their moments are in 32 bits; optimizer_state says where they"
        " live.",
        to.rule,
        "adamw_8bit",
        same=to.same_rule,
        hf="optim",
        axolotl="optimizer",
        mlx="optimizer",
        other="optimizer.type optimizer_name optimizer_type",
    ),
    _taken(
        "optimizer.lora_b_ratio",
        "It is the learning rate of B over that of A.",
        16,
        axolotl="loraplus_lr_ratio",
        factory="loraplus_lr_ratio",
    ),
    _taken(
        "neftune_noise_alpha",
        "The alpha is the same.",
        5.0,
        axolotl="noisy_embedding_alpha",
        other="neftune_alpha",
    ),
    _none(
        "No rule has such options; the rules are {rules}.",
        to.is_off,
        refused=True,
        hf="optim_args optim_target_modules",
        factory="use_galore use_apollo use_badam",
        other="torchdistx_path",
    ),
    _none(
        "The losses are {losses}; a row of your own, or Walker(objective=...), brings another.",
        is_word("nll", "chunked_nll", "false", "none", "null", "0", "0.0"),
        refused=True,
        hf="label_smoothing_factor",
        trl="loss_type",
        other="label_smoothing",
    ),
    _none(
        "All trained matrices have one learning rate, B of an adapter apart"
        " (optimizer.lora_b_ratio).",
        to.is_off,
        refused=True,
        axolotl="lr_groups embedding_lr embedding_lr_scale loraplus_lr_embedding",
        factory="loraplus_lr_embedding",
    ),
)

_RUN = (
    _taken(
        "log_every",
        "It counts steps between lines; metrics.jsonl has every step.",
        10,
        hf="logging_steps",
        axolotl="logging_steps",
        mlx="steps_per_report",
        other="log_steps log_interval logging_interval steps_per_print print_every",
    ),
    _taken(
        "save_every",
        "It counts steps; the end of a run always saves.",
        500,
        hf="save_steps",
        axolotl="save_steps",
        other="save_interval steps_per_save checkpoint_interval",
    ),
    _other(
        "save_every",
        "Checkpoints come every so many steps, 0 for the end alone.",
        to.every("save_every", "save_steps"),
        "steps",
        hf="save_strategy",
        axolotl="save_strategy saves_per_epoch",
    ),
    _taken(
        "eval_every",
        "It counts steps; the first and the last are always evaluated.",
        500,
        hf="eval_steps",
        axolotl="eval_steps",
        mlx="steps_per_eval",
        other="eval_interval evaluate_every",
    ),
    _other(
        "eval_every",
        "Evaluations come every so many steps, 0 for the first and the last alone.",
        to.every("eval_every", "eval_steps"),
        "steps",
        hf="eval_strategy evaluation_strategy",
        axolotl="eval_strategy evals_per_epoch",
    ),
    _taken(
        "keep_checkpoints",
        "It counts the newest, which stay.",
        2,
        hf="save_total_limit",
        axolotl="save_total_limit",
    ),
    _taken(
        "eval_first",
        "It evaluates before the first step, which is the default here.",
        True,
        hf="eval_on_start",
    ),
    _other(
        "report_to",
        "Trackers are named in one list.",
        to.switch("report_to", ["wandb"]),
        True,
        idle=to.is_off,
        axolotl="use_wandb",
        mlx="wandb",
        other="wandb_enabled",
    ),
    _other(
        "report_to",
        "Trackers are named in one list.",
        to.switch("report_to", ["tensorboard"]),
        True,
        idle=to.is_off,
        axolotl="use_tensorboard",
    ),
    _other(
        "report_to",
        "Trackers are named in one list.",
        to.switch("report_to", ["swanlab"]),
        True,
        idle=to.is_off,
        factory="use_swanlab",
    ),
    _taken(
        "report_to",
        "The names of trackers are the same.",
        ["tensorboard"],
        other="log_with trackers logger",
    ),
    _none(
        "The environment names a tracker's project, as WANDB_PROJECT does.",
        _any,
        hf="project trackio_space_id trackio_bucket_id trackio_static_space_id",
        axolotl="wandb_project mlflow_experiment_name comet_project_name wandb_entity wandb_watch"
        " wandb_log_model wandb_mode",
        factory="swanlab_project",
    ),
    _taken(
        "run_name",
        "Trackers show it; the folder's name is the default.",
        "first",
        axolotl="wandb_name wandb_run_name",
        factory="swanlab_run_name",
        other="experiment_name exp_name",
    ),
    _other(
        "push_to_hub",
        "The repository itself is the value; an upload is at the end of the run.",
        to.same("push_to_hub"),
        "OWNER/NAME",
        same=to.is_text,
        idle=to.is_off,
        hf="hub_model_id",
        axolotl="hub_model_id",
        other="push_to_hub_model_id hub_repo_id",
    ),
    _none(
        "An upload is at the end of a run, private, with the token of hf auth login.",
        _any,
        hf="hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
    ),
    _other(
        "keep_best",
        "The checkpoint of the best evaluation is kept. adapter/ stays the last step's;"
        " --adapter CHECKPOINT uses the best.",
        to.switch("keep_best", "loss"),
        True,
        idle=to.is_off,
        hf="load_best_model_at_end metric_for_best_model",
        axolotl="load_best_model_at_end",
    ),
    _none(
        "Losses count as better the lower they are, accuracies the higher.",
        _any,
        hf="greater_is_better",
    ),
    _taken(
        "early_stopping",
        "It counts evaluations without a better one.",
        3,
        axolotl="early_stopping_patience",
        factory="early_stopping_steps",
    ),
    _other(
        "seed",
        "One seed serves data, adapters and dropout.",
        to.same("seed"),
        42,
        hf="data_seed",
        other="random_state random_seed",
    ),
    _other(
        "output_dir",
        "Adapters are written to output_dir/adapter.",
        to.same("output_dir"),
        "runs/first",
        mlx="adapter_path",
        other="out_dir save_path save_dir adapter_dir",
    ),
    _other(
        "resume_from_checkpoint",
        "The newest whole checkpoint is called latest.",
        to.switch("resume_from_checkpoint", "latest"),
        True,
        idle=to.is_off,
        axolotl="auto_resume_from_checkpoints",
        other="auto_resume resume",
    ),
    _none(
        "The command says what is done: blockwalk train, eval or generate.",
        _any,
        hf="do_train do_eval do_predict",
        mlx="train test",
    ),
    _none(
        "Curves and logs lie in output_dir, every figure of every step.",
        _any,
        hf="logging_dir logging_strategy logging_first_step log_level log_level_replica"
        " log_on_each_node"
        " logging_nan_inf_filter disable_tqdm include_num_input_tokens_seen skip_memory_metrics"
        " debug",
        axolotl="eval_table_size eval_max_new_tokens",
        factory="plot_loss",
    ),
    _none(
        "A checkpoint always holds the whole state, in safetensors.",
        _any,
        hf="save_only_model save_safetensors save_on_each_node",
        axolotl="save_only_model save_safetensors save_first_step",
    ),
    _none(
        "A run ends where a loss is not finite, and leaves the weights as they were.",
        _any,
        axolotl="loss_watchdog_threshold loss_watchdog_patience",
    ),
    _none("An unknown name is always an error.", _any, axolotl="strict"),
    _none("A run trains here; blockwalk generate and chat answer.", _any, factory="infer_backend"),
    _none(
        "Training continues with the same records in any case.",
        to.is_off,
        hf="ignore_data_skip restore_callback_states_from_checkpoint",
    ),
    _none(
        "An evaluation keeps losses, and the accuracies of a task.",
        _any,
        hf="eval_delay eval_accumulation_steps eval_do_concat_batches eval_use_gather_object"
        " include_for_metrics"
        " batch_eval_metrics prediction_loss_only",
    ),
    _none("Runs give the same bits again as they are.", _any, hf="full_determinism"),
    _none("A signal to stop saves a checkpoint first, always.", _any, hf="enable_jit_checkpoint"),
    _none(
        "Text is written by a command of its own: blockwalk generate RUN.yaml --max_new_tokens N.",
        hf="predict_with_generate generation_max_length",
        other="max_new_tokens do_sample top_p top_k",
    ),
)

_MEMORY = (
    _other(
        "compute_dtype",
        "One setting says what blocks compute in; auto takes the checkpoint's own.",
        to.words("compute_dtype", to.DTYPES, "auto"),
        True,
        idle=to.is_off,
        hf="bf16 bf16_full_eval",
        axolotl="bf16 bfloat16",
        factory="pure_bf16",
        other="bf16.enabled",
    ),
    _other(
        "compute_dtype",
        "Backpropagation scales no losses here: bfloat16 takes float16's place.",
        to.switch("compute_dtype", "bfloat16"),
        True,
        idle=to.is_off,
        hf="fp16 fp16_full_eval",
        axolotl="fp16 float16",
        other="fp16.enabled",
    ),
    _other(
        "compute_dtype",
        "It is what blocks compute in; weights keep the codec of frozen and trainable.",
        to.words("compute_dtype", to.DTYPES, "auto"),
        "bfloat16",
        same=to.same_dtype,
        hf="torch_dtype dtype",
        trl="bnb_4bit_compute_dtype",
        axolotl="torch_dtype",
        other="precision mixed_precision model_dtype",
    ),
    _none(
        "Products are PyTorch's own; nothing here changes their precision.",
        _any,
        hf="tf32",
        axolotl="tf32",
    ),
    _other(
        "frozen",
        "A codec of frozen weights does it, int4a in four bits; unless named, a run takes what"
        " fits memory.",
        to.quantised,
        True,
        **to.IN_4_BITS,
    ),
    _other(
        "frozen",
        "A codec of frozen weights does it.",
        to.quantised,
        True,
        idle=to.is_off,
        **to.IN_8_BITS,
    ),
    _other(
        "frozen",
        "A codec of frozen weights does it.",
        to.quantised,
        "nf4",
        idle=to.is_off,
        trl=to.KINDS_OF_BITS["trl"],
    ),
    _other(
        "frozen",
        "A codec of frozen weights does it; four bits of no kind are int4a.",
        to.quantised,
        4,
        idle=to.is_off,
        factory=to.KINDS_OF_BITS["factory"],
        other=to.KINDS_OF_BITS["other"],
    ),
    _none(
        "Scales are stored as the codec says; frozen: int4a takes 5 bits a weight in all.",
        to.is_off,
        trl="use_bnb_nested_quant bnb_4bit_quant_storage",
        factory="double_quantization quantization_method",
        other="bnb_4bit_use_double_quant llm_int8_threshold llm_int8_skip_modules"
        " llm_int8_has_fp16_weight bnb_config"
        " quantization_config",
    ),
    _other(
        "frozen",
        "Blocks are fetched from the tier of frozen: host is RAM, disk is a file.",
        to.offloaded("frozen"),
        "cpu",
        idle=is_word("false", "none", "null", "0"),
        axolotl="layer_offloading",
        other="cpu_offload offload_param offload_param.device"
        " zero_optimization.offload_param.device offload blocks_to_swap"
        " block_swap fsdp_offload_params fsdp_config.offload_params"
        " llm_int8_enable_fp32_cpu_offload offload_to_cpu"
        " num_layers_to_offload",
    ),
    _other(
        "optimizer_state",
        "A tier of the moments does it: host is RAM, disk is a file.",
        to.offloaded("optimizer_state"),
        "cpu",
        idle=is_word("false", "none", "null", "0"),
        other="offload_optimizer offload_optimizer.device"
        " zero_optimization.offload_optimizer.device optimizer_offload",
    ),
    _other(
        "activation",
        "A tier of activation checkpoints does it: host is RAM, disk is a file.",
        to.offloaded("activation"),
        True,
        idle=is_word("false", "none", "null", "0"),
        trl="activation_offloading",
        axolotl="activation_offloading",
        other="offload_activations cpu_checkpointing activation_checkpointing.cpu_checkpointing",
    ),
    _other(
        "budget",
        "A budget of device memory is kept; --device names the card.",
        to.memory,
        "8GiB",
        idle=to.is_off,
        axolotl="gpu_memory_limit",
        other="max_memory max_gpu_memory memory_limit gpu_memory_utilization",
    ),
    _other(
        "recompute",
        "Activations are computed anew in the backward walk (all) or kept (none).",
        to.switch("recompute", "all", "none"),
        True,
        hf="gradient_checkpointing activation_checkpointing",
        axolotl="gradient_checkpointing",
        mlx="grad_checkpoint",
        other="use_gradient_checkpointing checkpoint_activations",
    ),
    _other(
        "recompute",
        "Activations are computed anew in the backward walk (all) or kept (none).",
        to.switch("recompute", "none", "all"),
        True,
        factory="disable_gradient_checkpointing",
    ),
    _none(
        "The walk recomputes blocks by itself; such options have no place.",
        _any,
        hf="gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        axolotl="gradient_checkpointing_kwargs",
    ),
    _other(
        "compile",
        "Each kind of block is compiled once, where frozen weights are raw.",
        to.switch("compile", True),
        True,
        idle=to.is_off,
        hf="torch_compile",
        axolotl="torch_compile",
        other="use_torch_compile compile_model",
    ),
    _none(
        "PyTorch's defaults are taken.", to.is_off, hf="torch_compile_backend torch_compile_mode"
    ),
    _other(
        "loss",
        "The loss is computed over chunks of the vocabulary: all logits are never held.",
        to.always("loss", "chunked"),
        True,
        idle=_any,
        hf="use_liger_kernel liger_kernel_config",
        axolotl="liger_fused_linear_cross_entropy cut_cross_entropy",
        factory="enable_liger_kernel",
    ),
    _none(
        "Attention is PyTorch's own, which chooses the kernel for the device.",
        _any,
        trl="attn_implementation",
        axolotl="flash_attention sdp_attention xformers_attention flex_attention eager_attention",
        factory="flash_attn use_unsloth",
        other="use_flash_attention_2 use_flash_attention lora_mlp_kernel lora_qkv_kernel"
        " lora_o_kernel",
    ),
    _none(
        "Every token attends to all tokens before it.",
        to.is_off,
        refused=True,
        axolotl="s2_attention",
        factory="shift_attn",
    ),
    _none(
        "The walk's buffers stay from step to step.",
        _any,
        hf="torch_empty_cache_steps",
        axolotl="gc_steps",
    ),
    _none("A training forward keeps no cache.", _any, hf="use_cache"),
    _none(
        "Blocks come and go by themselves; frozen says where they wait.",
        _any,
        hf="device_map low_cpu_mem_usage",
    ),
    _none(
        "The flag --device names the device: blockwalk train RUN.yaml --device cpu.",
        _any,
        hf="use_cpu no_cuda",
    ),
)

_RANKS = (
    _other(
        "method",
        "Methods over ranks do it: zero3, zeropp, mics, fcdp, hzp; blockwalk train"
        " --nproc-per-node N starts ranks.",
        to.ranks,
        "full_shard",
        idle=to.is_off,
        hf="deepspeed fsdp fsdp_config parallelism_config",
        axolotl="deepspeed fsdp fsdp_config ddp",
        other="zero_optimization zero_optimization.stage zero_stage fsdp_version use_fsdp",
    ),
    _none(
        "Ranks are spread over the batch alone; methods zero3, fcdp and hzp spread the state.",
        to.is_off,
        axolotl="sequence_parallel_degree context_parallel_size tensor_parallel_size",
        other="tensor_parallel pipeline_parallel context_parallel",
    ),
    _none("Buffers need no setting.", to.is_off, trl="ignore_bias_buffers"),
    _none(
        "Processes find one another by themselves; start_timeout and interface are the settings.",
        _any,
        hf="ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb"
        " ddp_broadcast_buffers ddp_static_graph"
        " local_rank average_tokens_across_devices accelerator_config",
    ),
    _none(
        "The command starts ranks: blockwalk train RUN.yaml --nproc-per-node N.",
        other="world_size num_gpus",
    ),
)

_ADAPTERS = (
    _other(
        "lora",
        "lora: true trains adapters, lora: false all parameters; four bits are a matter of frozen.",
        to.adapter,
        "lora",
        **to.KINDS_OF_TRAINING,
    ),
    _other(
        "lora",
        "lora: false trains all parameters.",
        to.switch("lora", False, True),
        True,
        other="full_finetuning full_finetune",
    ),
    _taken(
        "lora.rank",
        "The rank is the same; the default is 8.",
        8,
        trl="lora_r r",
        axolotl="lora_r",
        factory="lora_rank",
        mlx="lora_parameters.rank",
        other="lora_dim peft_config.r",
    ),
    _taken(
        "lora.alpha",
        "Answers are multiplied by alpha over rank; the default is 16.",
        16,
        trl="lora_alpha",
        axolotl="lora_alpha",
        factory="lora_alpha",
        mlx="lora_parameters.alpha",
    ),
    _other(
        "lora.alpha",
        "Alpha is the scale times the rank.",
        to.scale,
        2.0,
        mlx="lora_parameters.scale",
        other="lora_scale",
    ),
    _taken(
        "lora.dropout",
        "The share is the same.",
        0.05,
        trl="lora_dropout",
        axolotl="lora_dropout",
        factory="lora_dropout",
        mlx="lora_parameters.dropout",
    ),
    _other(
        "lora.target_modules",
        "Names are PEFT's; all-linear, the default, is every linear layer but the head.",
        to.modules,
        ["q_proj", "v_proj"],
        same=to.same_modules,
        trl="lora_target_modules target_modules",
        axolotl="lora_target_modules",
        factory="lora_target",
        mlx="lora_parameters.keys",
    ),
    _other(
        "lora.target_modules",
        "all-linear, the default, is every linear layer but the head.",
        to.always("lora.target_modules", "all-linear"),
        True,
        idle=_is_on,
        axolotl="lora_target_linear",
    ),
    _of_peft(
        "modules_to_save",
        ["lm_head"],
        trl="lora_modules_to_save modules_to_save",
        axolotl="lora_modules_to_save",
        factory="additional_target",
    ),
    _of_peft("use_dora", True, trl="use_dora", axolotl="peft_use_dora", factory="use_dora"),
    _of_peft("use_rslora", True, trl="use_rslora", axolotl="peft_use_rslora", factory="use_rslora"),
    _of_peft("rank_pattern", {"q_proj": 4}, trl="rank_pattern"),
    _of_peft("alpha_pattern", {"q_proj": 4}, trl="alpha_pattern"),
    _of_peft("exclude_modules", ["o_proj"], trl="exclude_modules"),
    _of_peft(
        "target_parameters",
        ["experts.gate_up_proj"],
        trl="lora_target_parameters target_parameters",
    ),
    _of_peft(
        "layers_to_transform", [0, 1], trl="layers_to_transform", axolotl="peft_layers_to_transform"
    ),
    _of_peft("layers_pattern", "layers", trl="layers_pattern"),
    _of_peft(
        "init_lora_weights", "gaussian", trl="init_lora_weights", axolotl="peft_init_lora_weights"
    ),
    _none(
        "Every layer gets adapters; lora.options.layers_to_transform lists some.",
        is_word("-1"),
        mlx="num_layers lora_layers",
    ),
    _none(
        "Adapters train A and B alone; lora.options.modules_to_save names more.",
        is_word("none", "false", "null", "0"),
        refused=True,
        trl="bias lora_bias trainable_token_indices",
        factory="pissa_init pissa_iter pissa_convert",
    ),
    _none(
        "A language model is what is trained.",
        is_word("causal_lm"),
        refused=True,
        trl="task_type lora_task_type",
    ),
    _none(
        "Adapters are LoRA, rsLoRA and DoRA; PEFT's further kinds are not trained here.",
        to.is_off,
        refused=True,
        trl="loftq_config eva_config corda_config lora_ga_config velora_config monteclora_config"
        " kasa_config arrow_config"
        " use_qalora qalora_group_size use_bdlora alora_invocation_tokens layer_replication"
        " megatron_config megatron_core"
        " ensure_weight_tying",
    ),
    _none(
        "PEFT's notes to itself are written by training.",
        _any,
        trl="auto_mapping peft_version runtime_config",
    ),
    _none(
        "Training sets it by itself.",
        to.is_off,
        trl="inference_mode fan_in_fan_out",
        axolotl="lora_fan_in_fan_out",
    ),
    _other(
        "lora.from",
        "Training goes on from an adapter's folder.",
        to.same("lora.from"),
        "runs/first/adapter",
        idle=to.is_off,
        axolotl="lora_model_dir",
        factory="adapter_name_or_path",
        mlx="resume_adapter_file",
        other="peft_model_id",
    ),
    _none(
        "Adapters are merged by a command of its own: blockwalk merge BASE ADAPTER OUT.",
        to.is_off,
        axolotl="merge_lora",
        factory="export_dir export_size",
        other="merge_adapter",
    ),
)

_DATA = (
    _other(
        "data.train",
        "A file, a folder or a name on the hub is written down, or a list of them.",
        to.paths("data.train"),
        "train.jsonl",
        axolotl="datasets pretraining_dataset",
        factory="dataset",
        mlx="data",
    ),
    _taken(
        "data.train",
        "A file, a folder or a name on the hub is written down.",
        "train.jsonl",
        to.is_text,
        trl="dataset_name",
        other="train_file train_data training_data train_dataset dataset_path data_path"
        " train_path training_file",
    ),
    _other(
        "data.eval",
        "A file, a folder or a name on the hub is written down, or a list of them.",
        to.paths("data.eval"),
        "eval.jsonl",
        axolotl="test_datasets",
        factory="eval_dataset",
        other="validation_file eval_file val_file val_dataset eval_data val_data test_file"
        " eval_path",
    ),
    _taken(
        "data.eval_share",
        "A share of the training data is held out.",
        0.05,
        axolotl="val_set_size",
        factory="val_size",
        other="validation_split_percentage test_size eval_split_ratio",
    ),
    _taken(
        "data.subset",
        "It is the configuration of a hub data set.",
        "main",
        trl="dataset_config",
        other="dataset_config_name",
    ),
    _taken(
        "data.train_split",
        "It is the split of a hub data set.",
        "train",
        trl="dataset_train_split",
        other="train_split",
    ),
    _taken(
        "data.eval_split",
        "It is the split of a hub data set.",
        "test",
        trl="dataset_test_split",
        other="eval_split",
    ),
    _taken(
        "data.max_length",
        "It counts tokens; longer records are cut, and counted. The default is 512.",
        1024,
        trl="max_length max_seq_length",
        axolotl="sequence_len",
        factory="cutoff_len",
        mlx="max_seq_length",
        other="max_seq_len seq_length seq_len sequence_length block_size context_length"
        " model_max_length max_len",
    ),
    _taken(
        "data.packing",
        "A row holds several records; attention does not cross from one to the next.",
        True,
        trl="packing",
        axolotl="sample_packing",
        factory="packing neat_packing",
    ),
    _none(
        "Packed rows keep records apart, and nothing is cut: data.packing is the setting.",
        _any,
        trl="packing_strategy padding_free eval_packing",
        axolotl="eval_sample_packing pad_to_sequence_len sample_packing_group_size"
        " sample_packing_bin_size batch_flattening",
    ),
    _taken(
        "data.padding_multiple",
        "Sequences are padded to a multiple of it.",
        8,
        trl="pad_to_multiple_of",
    ),
    _other(
        "data.columns",
        "Columns of other names are listed by the field that they hold.",
        to.column("text"),
        "body",
        idle=is_word("text"),
        trl="dataset_text_field",
        other="text_column text_field",
    ),
    _other(
        "data.columns",
        "Columns of other names are listed by the field that they hold.",
        to.column("prompt"),
        "question",
        idle=is_word("prompt"),
        mlx="prompt_feature",
        other="prompt_column prompt_field input_column",
    ),
    _other(
        "data.columns",
        "Columns of other names are listed by the field that they hold.",
        to.column("completion"),
        "answer",
        idle=is_word("completion"),
        mlx="completion_feature",
        other="response_column completion_column output_column response_field",
    ),
    _other(
        "data.columns",
        "Columns of other names are listed by the field that they hold.",
        to.column("messages"),
        "chat",
        idle=is_word("messages"),
        axolotl="field_messages",
        mlx="chat_feature",
        other="messages_column",
    ),
    _other(
        "data.chat_template",
        "It is chatml, llama3, gemma, phi3, mistral or a file.",
        to.same("data.chat_template"),
        "chatml",
        trl="chat_template_path",
        axolotl="chat_template chat_template_jinja",
        factory="template",
        other="template_name prompt_template",
    ),
    _taken(
        "data.shuffle",
        "It is on by default.",
        True,
        trl="shuffle_dataset",
        axolotl="shuffle_merged_datasets",
        other="shuffle",
    ),
    _other(
        "data.weights",
        "Shares of the sources of data.train are a list, one for each.",
        to.numbers("data.weights"),
        "1.0",
        factory="interleave_probs",
        other="dataset_weights mixture_weights",
    ),
    _none(
        "Records that are too long are cut as their format needs, and counted.",
        is_word("keep_start"),
        trl="truncation_mode",
    ),
    _none(
        "Sources are mixed by data.weights.",
        is_word("concat"),
        factory="mix_strategy",
        other="dataset_mixer",
    ),
    _other(
        "data.eval_limit",
        "It counts held-out records that are evaluated; 0 takes all.",
        to.same("data.eval_limit"),
        200,
        other="max_eval_samples eval_samples limit_eval",
    ),
    _other(
        "data.max_samples",
        "It counts records of each source of data.train, the first ones.",
        to.same("data.max_samples"),
        1000,
        factory="max_samples",
        other="max_train_samples num_samples limit",
    ),
    _none(
        "Answers alone are learnt, whatever the format; records with a field text are learnt"
        " whole.",
        _is_on,
        trl="assistant_only_loss completion_only_loss",
        mlx="mask_prompt",
        other="train_on_responses_only train_on_completions_only",
    ),
    _none(
        "Answers alone are learnt, whatever the format; records with a field text are learnt"
        " whole.",
        to.is_off,
        refused=True,
        axolotl="train_on_inputs",
        factory="train_on_prompt",
    ),
    _none(
        "All answers of a conversation are learnt; a turn with weight: 0 is not.",
        to.is_off,
        refused=True,
        axolotl="roles_to_train train_on_eos",
        factory="mask_history",
    ),
    _none(
        "Records are tokenized at the start, and lie in files while the run goes on.",
        _any,
        trl="dataset_streaming dataset_num_proc",
        axolotl="dataset_prepared_path dataset_processes streaming dataset_keep_in_memory",
        factory="streaming buffer_size tokenized_path overwrite_cache preprocessing_num_workers"
        " preprocessing_batch_size",
    ),
    _none(
        "Records are text here, never tokens that were made elsewhere.",
        to.is_off,
        trl="dataset_kwargs",
        axolotl="skip_prepare_dataset",
    ),
    _none(
        "Batches are read from memory maps: there are no workers and no columns to remove.",
        _any,
        hf="dataloader_multiprocessing_context dataloader_num_workers dataloader_pin_memory"
        " dataloader_drop_last dataloader_prefetch_factor dataloader_persistent_workers"
        " dataloader_in_order"
        " remove_unused_columns label_names",
    ),
    _none(
        "Batches are drawn at random; their padding is small, and data.packing removes it.",
        is_word("false", "none", "null", "0", "no", "random", "length"),
        hf="group_by_length train_sampling_strategy length_column_name",
        axolotl="group_by_length",
    ),
    _none(
        "Tokens come from the tokenizer in the model's folder; lora.options.modules_to_save"
        " trains their rows.",
        _is_padding,
        trl="eos_token",
        axolotl="special_tokens tokens added_tokens_overrides tokenizer_config",
        factory="resize_vocab new_special_tokens",
        other="tokenizer_name tokenizer_name_or_path tokenizer",
    ),
    _none(
        "The tokenizer's own files say how it is read.",
        _any,
        axolotl="tokenizer_type tokenizer_use_fast",
        factory="use_fast_tokenizer",
    ),
    _none("Padding takes no part in the loss.", _any, trl="pad_token"),
    _none(
        "The model's own dropout is left as it is; lora.dropout is the adapters'.",
        to.is_off,
        trl="disable_dropout",
    ),
    _none(
        "Sources are named in data.train, one by one.",
        to.is_off,
        factory="dataset_dir media_dir eval_on_each_dataset",
        mlx="hf_dataset",
    ),
    _none(
        "data.eval_limit says how many records are evaluated.", _any, mlx="val_batches test_batches"
    ),
)

_MODEL = (
    _taken(
        "model",
        "A name on the hub, a folder or a GGUF file is taken.",
        "OWNER/NAME",
        to.is_text,
        trl="model_name_or_path",
        axolotl="base_model",
        factory="model_name_or_path",
        other="model_name model_id pretrained_model_name_or_path base_model_name_or_path"
        " checkpoint_dir model_path",
    ),
    _other(
        "model",
        "A revision is written behind the name, after @.",
        to.revision,
        "main",
        idle=to.is_off,
        trl="model_revision",
        axolotl="revision_of_model",
        other="revision",
    ),
    _none(
        "Code from a model's folder is never run.",
        _any,
        trl="trust_remote_code",
        axolotl="trust_remote_code",
        factory="trust_remote_code",
    ),
    _none("The model's configuration names its architecture.", _any, axolotl="model_type"),
    _none(
        "The model's configuration decides: edit config.json in its folder.",
        to.is_off,
        trl="model_init_kwargs router_aux_loss_coef",
        axolotl="overrides_of_model_config",
        factory="rope_scaling",
    ),
    _other(
        "objective",
        "An objective's settings stand below its name. The objectives are {objectives}.",
        to.objective,
        "dpo",
        idle=is_word(*to.OF_PLAIN_TRAINING),
        axolotl="rl rl_beta orpo_alpha simpo_gamma cpo_alpha dpo_label_smoothing"
        " kto_desirable_weight kto_undesirable_weight",
        factory="stage pref_beta pref_loss simpo_gamma dpo_label_smoothing kto_chosen_weight"
        " kto_rejected_weight",
        mlx="train_mode training_mode",
    ),
    _none(
        "The model that an objective compares with is its run's own, or reference: MODEL.",
        to.is_off,
        refused=True,
        factory="ref_model",
    ),
    _none(
        "Such a file does not say which objective it is for: write objective: dpo and"
        " objective.beta.",
        is_word("none", "null", "false"),
        refused=True,
        trl="beta f_divergence_type f_alpha_divergence_coef precompute_ref_log_probs"
        " precompute_ref_batch_size sync_ref_model ref_model_sync_steps ref_model_mixup_alpha"
        " use_weighting ld_alpha discopop_tau loss_weights",
        axolotl="reward_model",
        factory="pref_ftx reward_model",
        other="dpo_beta dpo loss_fn",
    ),
    _none(
        "Values of the original MeZO are settings zo.epsilon, zo.queries and zo.kind of method"
        " mezo.",
        refused=True,
        other="zo_method trainer num_perturb",
    ),
    _taken(
        "zo.epsilon",
        "The size of a perturbation is the same.",
        1e-3,
        other="zo_eps zo_epsilon perturbation_scale",
    ),
)

_TRAINER = {
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
}
"""Defaults of transformers' TrainingArguments (5.24) that differ from ours."""

DEFAULTS: dict[str, dict[str, Any]] = {
    TRANSFORMERS: _TRAINER,
    TRL: {
        **_TRAINER,
        "learning_rate": 2e-5,
        "max_length": 1024,
        "use_peft": False,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
    },
    AXOLOTL: {
        "micro_batch_size": 1,
        "lr_scheduler": "cosine",
        "max_grad_norm": 1.0,
        "num_epochs": 1,
        "sequence_len": 512,
        "adapter": "none",
    },
    FACTORY: {**_TRAINER, "cutoff_len": 2048, "finetuning_type": "lora", "lora_scale": 2.0},
    MLX: {
        "batch_size": 4,
        "learning_rate": 1e-5,
        "iters": 1000,
        "max_seq_length": 2048,
        "lora_parameters.scale": 20.0,
    },
    OTHERS: _TRAINER,
}
"""Values that a tool takes where its file says nothing, by its own names: TRL 1.16, axolotl's
schemas, LLaMA-Factory's arguments, and mlx-lm's ``lora``."""

ROWS = (*_MODEL, *_DATA, *_ADAPTERS, *_STEPS, *_OPTIMIZER, *_RUN, *_MEMORY, *_RANKS)
"""The table, in the order of the page."""
