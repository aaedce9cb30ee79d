"""The table of what a walk makes of every field of ``TrainingArguments``, and of every method of
``transformers.Trainer`` that a subclass may override.

A field is followed; or it means nothing to a walk, which a note says where it is set; or it is
refused. One that is not in the table comes from a newer transformers, or from a subclass: away from
its default it is refused too."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from transformers import Trainer, TrainingArguments

FOLLOWED = frozenset(
    [
        "output_dir",
        "per_device_train_batch_size",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "bf16",
        "tf32",
        "neftune_noise_alpha",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "skip_memory_metrics",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "eval_on_start",
        "save_only_model",
        "save_strategy",
        "save_steps",
        "save_on_each_node",
        "save_total_limit",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "push_to_hub",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "full_determinism",
        "seed",
        "data_seed",
        "use_cpu",
        "accelerator_config",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "remove_unused_columns",
        "train_sampling_strategy",
        "length_column_name",
        "do_train",
        "do_eval",
        "do_predict",
        "resume_from_checkpoint",
        "local_rank",
    ]
)
"""Fields that do what they do in a Trainer."""

_RECOMPUTES = "the walk recomputes blocks by itself (recompute of the plan)"
_SENDS = "the walk exchanges what ranks share by itself"

MEANINGLESS = {
    "fp16": "the walk computes in bfloat16 instead, which needs no scale of the loss",
    "bf16_full_eval": "evaluation computes as training does (compute_dtype of the plan)",
    "fp16_full_eval": "evaluation computes as training does (compute_dtype of the plan)",
    "gradient_checkpointing": _RECOMPUTES,
    "gradient_checkpointing_kwargs": _RECOMPUTES,
    "activation_checkpointing": _RECOMPUTES,
    "activation_checkpointing_kwargs": _RECOMPUTES,
    "use_liger_kernel": "the walk's own loss never holds all logits",
    "liger_kernel_config": "the walk's own loss never holds all logits",
    "use_cache": "a training forward keeps no cache",
    "torch_empty_cache_steps": "the walk's buffers stay from step to step",
    "average_tokens_across_devices": "a loss is the mean over the tokens of all ranks",
    "ddp_find_unused_parameters": _SENDS,
    "ddp_bucket_cap_mb": _SENDS,
    "ddp_broadcast_buffers": _SENDS,
    "ddp_static_graph": _SENDS,
    "ddp_backend": _SENDS,
    "ddp_timeout": _SENDS,
}
"""Fields that mean nothing to a walk, and why."""

_RANKS = "BlockwalkTrainer walks on one rank; blockwalk train has methods over ranks"
_OPTIMIZER = "the update is the plan's (optimizer.*)"
_COMPILE = "a plan compiles blocks (compile: true)"

REFUSED = {
    "optim_args": _OPTIMIZER,
    "optim_target_modules": _OPTIMIZER,
    "label_smoothing_factor": "the walk computes the loss that its plan names (loss); a row of"
    " your own has settings such as this",
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "auto_find_batch_size": "the plan's budget says what fits, before the first step",
    "label_names": "the walk learns the column labels",
    "debug": "its hooks need the model in memory",
    "enable_jit_checkpoint": "its checkpoints on SIGTERM are not the walk's; blockwalk train has"
    " them",
    "parallelism_config": _RANKS,
    "fsdp": _RANKS,
    "fsdp_config": _RANKS,
    "deepspeed": _RANKS,
}
"""Fields that the walk does not follow, and why, or what does it instead."""

METHODS_FOLLOWED = frozenset(
    [
        "__init__",
        "_validate_args",
        "_build_accelerator_args",
        "create_accelerator_and_postprocess",
        "get_train_dataloader",
        "get_eval_dataloader",
        "get_test_dataloader",
        "num_examples",
        "_get_dataloader",
        "_get_train_sampler",
        "_get_eval_sampler",
        "_set_signature_columns_if_needed",
        "_remove_unused_columns",
        "_get_collator_with_removed_columns",
        "create_scheduler",
        "_get_learning_rate",
        "train",
        "_inner_training_loop",
        "_init_training_state",
        "_prepare_for_training",
        "_run_epoch",
        "_finalize_training",
        "training_step",
        "_maybe_log_save_evaluate",
        "get_batch_samples",
        "set_initial_training_values",
        "get_total_train_batch_size",
        "_track_num_input_tokens",
        "evaluate",
        "evaluation_loop",
        "end",
        "predict",
        "prediction_step",
        "_evaluate",
        "_get_output_dir",
        "_save_checkpoint",
        "_determine_best_metric",
        "_save_rng_state",
        "_save_optimizer_and_scheduler",
        "_load_from_checkpoint",
        "_load_best_model",
        "_load_rng_state",
        "_load_optimizer_and_scheduler",
        "_load_callback_state",
        "_issue_warnings_after_load",
        "save_model",
        "_save",
        "log",
        "log_metrics",
        "metrics_format",
        "save_metrics",
        "save_state",
        "store_flos",
        "floating_point_ops",
        "init_hf_repo",
        "create_model_card",
        "push_to_hub",
        "_push_from_checkpoint",
        "_finish_current_push",
        "add_callback",
        "pop_callback",
        "remove_callback",
        "is_local_process_zero",
        "is_world_process_zero",
    ]
)
"""Methods that are called as in a Trainer."""

PASSED = frozenset(
    [
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "processing_class",
        "callbacks",
        "compute_metrics",
        "preprocess_logits_for_metrics",
    ]
)
"""Arguments of ``Trainer()`` that are followed, beside model and args."""


def read_arguments(
    args: TrainingArguments,
    own_followed: Collection[str] = (),
    own_meaningless: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Set the fields that mean nothing to a walk to the defaults of ``TrainingArguments``, in
    ``args`` itself; answer a note for each that was set. A subclass such as TRL's ``SFTConfig`` has
    other defaults, which a Trainer would follow.

    Args:
        own_followed: fields of the subclass that are followed.
        own_meaningless: fields of the subclass that mean nothing to a walk, and why.

    Raises:
        ValueError: a field that the walk does not follow, or that this table does not know, is set.
    """
    neutral = _defaults(TrainingArguments, args)
    of_class = _defaults(type(args), args)
    transformers_names = {field.name for field in dataclasses.fields(TrainingArguments)}
    meaningless = {**MEANINGLESS, **own_meaningless}
    notes = []
    for field in dataclasses.fields(args):
        name = field.name
        if name in FOLLOWED or name in own_followed or not field.init:
            continue
        value = getattr(args, name, None)
        default = getattr(neutral if name in transformers_names else of_class, name, None)
        if value == default:
            continue
        if name not in meaningless:
            why = REFUSED.get(name, _unknown(type(args), name))
            raise ValueError(
                f"{name} is {value}, which BlockwalkTrainer does not follow: {why}; leave it out"
            )
        setattr(args, name, default)
        if value != getattr(of_class, name, None):  # a class's own default nobody has set
            notes.append(f"{name} means nothing here: {meaningless[name]}")
    own_names = [
        field.name for field in dataclasses.fields(args) if field.name not in transformers_names
    ]
    if own_names and not own_followed:
        notes.append(
            f"{type(args).__name__}'s own fields ({', '.join(own_names[:3])}, ...) are not read:"
            " records come as tokens, and the loss is the cross-entropy of their labels"
        )
    return notes


def _unknown(cls: type, name: str) -> str:
    """Return why a field that the table does not have is not followed."""
    if hasattr(TrainingArguments, name):
        return "this version of blockwalk does not know it"
    return f"it is a field of {cls.__name__}, which another trainer reads"


def _defaults(cls: type, args: TrainingArguments) -> Any:
    """Return arguments of a class as they are where nothing is set."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of defaults that transformers deprecates
            return cls(output_dir=str(args.output_dir), use_cpu=args.use_cpu)
    except (TypeError, ValueError):  # a subclass that asks for more
        return TrainingArguments(output_dir=str(args.output_dir), use_cpu=args.use_cpu)


def refuse_methods(cls: type, ours: type) -> None:
    """Raise ValueError where a subclass of ``ours`` overrides a method of Trainer that a walk never
    calls."""
    for name in _overridden(cls, ours):
        if name not in METHODS_FOLLOWED:
            raise ValueError(
                f"{cls.__name__} overrides {name}, which a walk never calls: it would change"
                " nothing; leave it out (Walker(objective=...) takes a loss that you write)"
            )


def _overridden(cls: type, ours: type) -> Iterator[str]:
    for base in cls.__mro__:
        if base not in ours.__mro__:
            yield from (
                name
                for name, value in vars(base).items()
                if callable(value) and hasattr(Trainer, name)
            )
