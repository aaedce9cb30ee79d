"""Callbacks of a Trainer whose step is a walk. They are told of every event as in a Trainer; what
they change of the optimizer is followed, and what a walk cannot follow is refused with the
callback's name.

A walk streams its weights, and has made its update when its step ends: callbacks get a view of the
model and one of the optimizer, which let through the names of the lists below and refuse every
other."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from transformers import TrainerCallback

RATES = ("lr", "weight_decay", "betas", "eps")
"""Fields of a parameter group that a first-order step reads."""

MODEL_NAMES = frozenset(
    ["config", "generation_config", "model_tags", "name_or_path", "peft_config", "training"]
)
"""Attributes of the model that callbacks may read."""

OPTIMIZER_NAMES = frozenset(["defaults", "zero_grad"])
"""Attributes of the optimizer that callbacks may read, beside its parameter groups."""

TAKEN_AT_START = ("gradient_accumulation_steps", "max_grad_norm")
"""Fields of TrainingArguments that a Trainer reads at every step, and a plan is made with."""

_INSTEAD = (
    "a walk has no weights and no gradients in memory between its steps; trainer.walker evaluates,"
    " generates and saves"
)


class ModelView:
    """The model as a callback sees it."""

    def __init__(self, trainer: Any, caller: str) -> None:
        self.__dict__["_trainer"] = trainer
        self.__dict__["_caller"] = caller

    def num_parameters(self, only_trainable: bool = False, **_: Any) -> int:
        """Return the number of the model's parameters, or of those that are trained."""
        spec = self._trainer.walker.spec
        trainable = int(spec.numel(trainable=True))
        return trainable if only_trainable else trainable + int(spec.numel(trainable=False))

    def __getattr__(self, name: str) -> Any:
        module = self._trainer.walker.engine.module
        if name == "model_tags":
            return getattr(self._trainer.model, name, None)
        if name in MODEL_NAMES:
            return getattr(module, name)
        if not hasattr(module, name):
            raise AttributeError(f"{type(module).__name__} has no attribute {name!r}")
        raise ValueError(f"{self._caller} uses model.{name}, which has no effect here: {_INSTEAD}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "model_tags":
            raise ValueError(f"{self._caller} sets model.{name}, which has no effect here")
        setattr(self._trainer.model, name, value)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ValueError(f"{self._caller} calls the model, which is not in memory: {_INSTEAD}")


class GroupView(MutableMapping[str, Any]):
    """A parameter group as a callback sees it: without its parameters."""

    def __init__(self, group: dict[str, Any], followed: tuple[str, ...], caller: str) -> None:
        self._group = group
        self._followed = followed
        self._caller = caller

    def __getitem__(self, name: str) -> Any:
        if name == "params":
            raise ValueError(
                f"{self._caller} uses params of a parameter group, which are not here: {_INSTEAD}"
            )
        return self._group[name]

    def __setitem__(self, name: str, value: Any) -> None:
        followed = [field for field in self._followed if field in self._group]
        if name not in followed:
            raise ValueError(
                f"{self._caller} sets {name} of a parameter group to {value}, which the walk does"
                f" not follow; it follows {', '.join(followed)}"
            )
        self._group[name] = value

    def __delitem__(self, name: str) -> None:
        raise ValueError(f"{self._caller} removes {name} of a parameter group")

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._group if name != "params")

    def __len__(self) -> int:
        return len(self._group) - 1


class OptimizerView:
    """The optimizer as a callback sees it."""

    def __init__(self, trainer: Any, caller: str) -> None:
        self.__dict__["_trainer"] = trainer
        self.__dict__["_caller"] = caller

    @property
    def param_groups(self) -> list[GroupView]:
        """Parameter groups, as a Trainer makes them: the parameters that decay, then the others."""
        followed = followed_rates(self._trainer)
        groups = self._trainer.optimizer.param_groups
        return [GroupView(group, followed, self._caller) for group in groups]

    def __getattr__(self, name: str) -> Any:
        if name in OPTIMIZER_NAMES or not hasattr(self._trainer.optimizer, name):
            return getattr(self._trainer.optimizer, name)
        raise ValueError(
            f"{self._caller} uses optimizer.{name}, which has no effect here: the walk keeps the"
            " optimizer's states"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"{self._caller} sets optimizer.{name}, which has no effect here")


def followed_rates(trainer: Any) -> tuple[str, ...]:
    """Return the fields of a parameter group that the steps of a Trainer's plan read. A ledger has
    the others in its header, for all of its steps."""
    return ("lr",) if trainer.walker.plan.estimator.facts.ledger else RATES


def tell(trainer: Any, event: str, args: Any, state: Any, control: Any, **values: Any) -> Any:
    """Call every callback of a Trainer for an event, and return the control that they answer.

    Raises:
        ValueError: a callback changes what the walk does not follow, or overrides an event that
            never comes; callback, event and field are named.
    """
    handler = trainer.callback_handler
    for callback in handler.callbacks:
        caller = f"{type(callback).__name__}.{event}"
        _require_events(trainer, callback)
        untouched = _not_followed(trainer, event)
        answer = getattr(callback, event)(
            args,
            state,
            control,
            model=ModelView(trainer, caller),
            processing_class=handler.processing_class,
            optimizer=None if trainer.optimizer is None else OptimizerView(trainer, caller),
            lr_scheduler=handler.lr_scheduler,
            train_dataloader=handler.train_dataloader,
            eval_dataloader=handler.eval_dataloader,
            **values,
        )
        for name, value in _not_followed(trainer, event).items():
            if untouched.get(name, value) != value:
                raise ValueError(
                    f"{caller} changes {name} from {untouched[name]} to {value}, which the walk"
                    " does not follow then; on_step_begin and on_step_end may change"
                    f" {', '.join(followed_rates(trainer))} of the parameter groups"
                )
        control = control if answer is None else answer
    return control


def _require_events(trainer: Any, callback: TrainerCallback) -> None:
    """Raise ValueError for a callback of the end of micro-batches, where a step has several: they
    are parts of one walk."""
    overrides = type(callback).on_substep_end is not TrainerCallback.on_substep_end
    count = trainer.walker.plan.gradient_accumulation_steps
    if overrides and count > 1:
        raise ValueError(
            f"{type(callback).__name__} overrides on_substep_end, which never comes: the {count}"
            " micro-batches of gradient_accumulation_steps are one walk; use on_step_end"
        )


def _not_followed(trainer: Any, event: str) -> dict[str, Any]:
    """Return what callbacks of an event may reach and a walk does not follow, by name: fields of
    the arguments, of parameter groups and of the parameters that stand for the model's."""
    values = {f"args.{name}": getattr(trainer.args, name) for name in TAKEN_AT_START}
    if trainer.optimizer is None:
        return values
    # The walk has made its update by then.
    late = event == "on_pre_optimizer_step"
    followed = () if late else followed_rates(trainer)
    groups = trainer.optimizer.param_groups
    values["the number of parameter groups"] = len(groups)
    for number, group in enumerate(groups):
        for name in group.keys() - {"params", "initial_lr", *followed}:
            values[f"{name} of parameter group {number}"] = group[name]
        values[f"parameters of group {number}"] = [
            (id(p), p.requires_grad, p.grad is None, p._version) for p in group["params"]
        ]
    return values
