"""A run as a value: model, plan, data, adapters, and everything else that a YAML file may set."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockwalk.plan.choices import Adapters, LoraSettings, PrefixSettings
from blockwalk.plan.data_source import Source, Sources, listed, weights_of
from blockwalk.plan.methods import method
from blockwalk.plan.parsing import fields_of, host_and_port, plain_values, setting_of
from blockwalk.plan.plan import Plan, refuse_dropout
from blockwalk.plan.ranges import beyond, by_name
from blockwalk.plan.row_settings import bare
from blockwalk.plan.table import spoken


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The data sets, and how records become tokens (``data.*``)."""

    train: str | tuple[str | Source, ...] = ""
    """Training data: a JSON, CSV, Parquet or text file, a folder of them, or a hub name. A list
    names several sources. A source may have settings of its own: ``{path: a.jsonl, weight: 2,
    columns: {prompt: question}}``."""
    eval: str | tuple[str | Source, ...] = ""
    """Held-out data in the same form; empty: no evaluation."""
    weights: tuple[float, ...] = ()
    """Shares of the sources of ``data.train`` in a mixture, one for each. Records are drawn by them
    until every source has been seen whole. A short one comes again and again. Empty: every record
    once."""
    max_samples: int = 0
    """The number of records of each source of ``data.train`` that are read, the first ones; 0:
    all."""
    eval_share: float = 0.0
    """The share of ``data.train`` that is held out for evaluation, such as 0.05; 0: none. ``seed``
    draws it."""
    eval_limit: int = 200
    """The number of held-out records that a run evaluates, drawn at random once; 0: all."""
    subset: str = ""
    """The configuration of a hub data set; empty: the only one."""
    train_split: str = "train"
    """The split of a hub data set that is trained on."""
    eval_split: str = "validation"
    """The split of a hub data set that is evaluated on."""
    format: str = ""
    """The form of records: messages, sharegpt, alpaca, completion, classification or text. Empty:
    as the columns of each source's first record say, or as ``objective`` needs them."""
    columns: tuple[str, ...] = ()
    """Fields that a format asks for, and the columns that hold them: ``[prompt=question,
    completion=answer]``."""
    prompt: Sequence[str] = ()
    """The text before each answer, with columns in braces, in place of a chat template. Of several
    texts the first whose columns are all filled is taken."""
    task: str = ""
    """A task of MeZO's: sst2, sst5, rte, cb, boolq, wsc, wic, multirc, copa, record, trec, squad or
    drop. It brings prompt, candidates and metric. Where ``data.train`` or ``data.eval`` is empty,
    its data come from the hub."""
    task_part: str = "test"
    """A task's held-out records: test, drawn from the evaluation data, or dev, drawn from the
    training data."""
    task_train: int = 1000
    """Records of a task that are trained on, drawn by ``data.task_seed``; 0: all but those for
    development."""
    task_dev: int = 500
    """Records of a task's training data that are held out for development."""
    task_eval: int = 1000
    """Records of a task's evaluation data that are drawn; 0: all."""
    task_seed: int = 0
    """Seed of a task's draws and of its demonstrations: numpy's legacy permutation, as MeZO
    draws."""
    shots: int = 0
    """In-context learning: training records, with answers, before each held-out question of a task
    or template."""
    template: str = ""
    """Classification: the text, with fields and the label's place in braces: ``{text} It was
    {label}``."""
    label_words: tuple[str, ...] = ()
    """Classification: the word of each class, in the order of the classes' numbers."""
    label_field: str = "label"
    """Classification: the record's field that holds the class, as a number or as its word."""
    label_scores: str = "mean"
    """Classification: the score that ranks label words. mean: the mean of the log-probabilities of
    a word's tokens, as in MeZO. sum: their sum."""
    chat_template: str = ""
    """The chat template of conversations: a file, or chatml, llama3, gemma, phi3 or mistral. Empty:
    the tokenizer's own. It is saved with what is trained."""
    chat_template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``{enable_thinking: false}``."""
    max_length: int = 512
    """The most tokens of a sequence; longer records are cut, and counted."""
    allow_truncation: bool = False
    """Whether a run may begin where more than half of its records are longer than ``max_length``,
    and are cut."""
    packing: bool = False
    """Whether a row of ``max_length`` tokens holds several records. Each stays by itself: positions
    begin anew, and attention does not cross. Nothing is cut."""
    padding_multiple: int = 8
    """Sequences of up to 2,048 tokens are padded to a multiple of this many tokens, for fewer
    shapes."""
    shuffle: bool = True
    """Whether records come in a new order for each epoch; false: in the file's. The longest comes
    in the first batch, where too little memory shows at once. The fullest batch is second."""
    appended: str = "refuse"
    """The choice of a resumed run where ``data.train`` has grown at its end: refuse, or follow. It
    then learns the new records behind the others of the epoch. Packed and mixed data and those of
    an ``eval_share`` are refused."""
    show_first: bool = True
    """Whether the first record is printed at the start, with the part that is learnt marked."""

    def __post_init__(self) -> None:
        for name in ("train", "eval"):
            object.__setattr__(self, name, _sources(getattr(self, name)))
        object.__setattr__(
            self, "prompt", (self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt)
        )
        for prompt in (
            *self.prompt,
            *(text for source in (self.train, self.eval) for text in _prompts(source)),
        ):
            if not fields_of(prompt, "data.prompt"):
                raise ValueError(
                    f"data.prompt {prompt!r} names no column of the records in braces, as"
                    f" {{instruction}} does"
                )
        if self.weights and weights_of(self.train):
            raise ValueError(
                "data.weights is given, and sources of data.train have weights of their own:"
                " leave one out"
            )

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out records."""
        return bool(self.eval or self.eval_share or self.task)

    @property
    def shares(self) -> tuple[float, ...]:
        """The weights of the sources of ``train``, however they are given; empty: every record
        once."""
        return self.weights or weights_of(self.train)


def _prompts(sources: Sources) -> Iterator[str]:
    """Yield the prompts that sources have of their own."""
    for source in listed(sources):
        yield from source.prompt


def _sources(names: Sources) -> Sources:
    """Return several sources with commas between them, as a command line gives them; a file may
    have a comma in its name."""
    if not isinstance(names, str) or "," not in names or os.path.exists(os.path.expanduser(names)):
        return names
    return tuple(name.strip() for name in names.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that ``blockwalk train`` needs.

    Raises:
        ValueError: a setting out of range; the message names it.
    """

    model: str = ""
    """The model: a hub name (``owner/name``, ``owner/name@revision``), a downloaded folder, a GGUF
    file or a block store."""
    import_: tuple[str, ...] = ()
    """Modules with rows of your own, whose code runs: losses, rules, codecs, methods and others. A
    flag names a file, or a module that is looked up in the working folder and among installed
    ones. A file's list is followed with that flag alone, but in the folder of a run of yours. Each
    is kept with a digest of its source, as ``my_rows@0123456789abcdef``."""
    plan: Plan = field(default_factory=lambda: method("mebp", frozen="disk × auto"))
    data: DataSettings = field(default_factory=DataSettings)
    lora: LoraSettings | None = None
    """Whether adapters are trained (true, or any of the settings below) or all parameters (false).
    Unless given, the method decides."""
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    reference: str = ""
    """The model of the same tokenizer that dpo, ipo and kto compare with, in the form of ``model``.
    Empty: this run's own before its first step, with the adapter of ``lora.from``."""
    batch_size: int = 8
    """Sequences of a whole step, whatever ``gradient_accumulation_steps`` cuts them into; of an
    objective of pairs, pairs."""
    eval_batch_size: int = 0
    """Sequences of an evaluation batch, which ranks share; 0: those of a micro-batch."""
    eval_batches: int = 4
    """The number of evaluation batches for which a block is fetched and decoded once."""
    max_steps: int = 0
    """Optimizer steps; 0: as many as ``epochs`` takes."""
    epochs: float = 1.0
    """The times that every record is trained on, where ``max_steps`` is 0. Parts such as 0.5 are
    taken too. The last batch goes on with the records that come next: none comes twice more than
    another."""
    eval_every: int = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    eval_first: bool = True
    """Whether there is an evaluation before the first step."""
    keep_best: str = ""
    """Score of the evaluation whose checkpoint is kept beside the newest ones: loss or accuracy;
    empty: none is."""
    early_stopping: int = 0
    """The number of evaluations in a row without a better one, after which the run ends; 0: never.
    ``keep_best`` says what is better, else the loss does."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end, and when a signal ends the run."""
    keep_checkpoints: int = 2
    """Checkpoints that stay; older ones are removed."""
    skip_nonfinite: int = 0
    """The number of batches that may be left out because their loss or gradients are not finite.
    The step is taken with the next batch. One more ends the run; with 0 the first does."""
    log_every: int = 10
    """Steps between lines of figures, which stay on a terminal."""
    start_timeout: float = 120.0
    """Seconds that a rank waits at the start for all others to come."""
    interface: str = ""
    """The network interface, such as ib0, that ranks of several machines talk over. Empty: torch
    chooses. Ranks that are started here talk over the loopback interface."""
    elastic: str = ""
    """Zeroth order: the address at which ranks may come and go, ``host:port``, such as
    127.0.0.1:29600. Each of them is started by ``blockwalk train run.yaml --join``. Empty: none."""
    report_to: tuple[str, ...] = ()
    """Trackers of every figure: tensorboard, wandb, trackio, mlflow, swanlab and others of
    accelerate's names. all: those that are installed. none: none. WANDB_PROJECT and the like name
    the project, else it is blockwalk."""
    run_name: str = ""
    """The run's name at trackers; empty: the name of ``output_dir``."""
    push_to_hub: str = ""
    """The hub repository (``owner/name``) that gets what was trained, with a model card. Where
    there is none, a private one is made before the run."""
    output_dir: str = "runs/blockwalk"
    """The folder of the run: its configuration, metrics, checkpoints, and trained weights."""
    overwrite_output_dir: bool = False
    """Whether a run may replace an earlier run's files in ``output_dir``. They are checkpoints,
    ledger, metrics and trained weights, and files under their names that no run made. They stay in
    ``output_dir/replaced`` until this run's first checkpoint is whole. Trained weights stay until
    the new ones are whole."""
    resume_from_checkpoint: str = ""
    """A checkpoint's folder, or latest: the newest whole one in ``output_dir``, if there is any."""
    named: frozenset[str] | None = field(default=None, compare=False, repr=False)
    """The settings of its plan that a file or a flag gave, no setting itself; None: whoever made
    the plan chose all of it. The machine decides some of the others
    (:func:`blockwalk.program.settling.settle`)."""

    def __post_init__(self) -> None:
        for name in PATHS:
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        for refusals in (_ranges, _sources_against, _evaluation_against, _objective, _together):
            for message in refusals(self):
                raise ValueError(message)
        refuse_dropout(self.plan, self.adapters)
        if self.elastic:
            self._require_elastic()

    def _require_elastic(self) -> None:
        plan = self.plan
        try:
            host_and_port(self.elastic)
        except ValueError as error:
            raise ValueError(f"elastic is {error}") from None
        reason = ""
        if not plan.estimator.facts.shares_forwards:
            reason = (
                f"method {plan.method!r} differentiates; use mezo, zo2 or distzo2, or leave it out"
            )
        elif plan.mesh.world > 1:
            reason = (
                f"mesh.world is {plan.mesh.world}, and ranks that come and go are one process"
                " each, with whole weights; start one, and others with --join"
            )
        elif plan.noise.in_place:
            reason = "zo.noise: mezo perturbs the host's own weights in place; use torch"
        if reason:
            raise ValueError(f"elastic is {self.elastic!r}: {reason}")

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained; None: all parameters are."""
        return self.lora or self.prefix or None

    @property
    def adapters_at_start(self) -> Adapters | str | None:
        """The adapters as a walker takes them: the folder of those that are gone on from, else the
        settings of new ones."""
        return self.lora.from_ if self.lora is not None and self.lora.from_ else self.adapters

    def saves_before(self, step: float) -> bool:
        """Return whether checkpoints may be saved after earlier steps than this one."""
        evaluates = self.data.evaluates and 0 < self.eval_every < step
        return 0 < self.save_every < step or (bool(self.keep_best) and evaluates)

    @property
    def micro_batch_rows(self) -> int:
        """Rows that one rank walks at once in training: its part of a micro-batch, with every label
        word of each sequence where ``zo.objective`` ranks them, and both answers of a pair."""
        plan = self.plan
        words = max(1, len(self.data.label_words)) if plan.ranks_words else 1
        return -(-self.batch_size // plan.cuts) * words * plan.objective_facts.group

    def to_mapping(self) -> dict[str, Any]:
        """Return every setting, nested as in YAML, in plain types:
        ``from_mapping(config.to_mapping()) == config``."""
        names = [
            f.name for f in dataclasses.fields(self) if f.name not in ("plan", "lora", "named")
        ]
        settings = {setting_of(name): plain_values(getattr(self, name)) for name in names}
        lora = False if self.lora is None else plain_values(self.lora)
        plan = {f.name: plain_values(getattr(self.plan, f.name)) for f in dataclasses.fields(Plan)}
        return {
            "model": settings.pop("model"),
            "method": plan.pop("method"),
            **settings,
            "lora": lora,
            **plan,
        }

    def shared(self) -> dict[str, Any]:
        """Return settings that must be equal on all ranks of a run: every one but the places where
        each finds model, data, output and network, and those of its plan that are its own."""
        of_rank = {"model", "output_dir", "interface", *(f.name for f in dataclasses.fields(Plan))}
        settings = {name: value for name, value in self.to_mapping().items() if name not in of_rank}
        for source in ("train", "eval"):
            del settings["data"][source]
        return {**settings, **self.plan.shared()}


PATHS = ("model", "reference", "output_dir", "resume_from_checkpoint")
"""Settings that are a path, or may be one: a ``~`` at its beginning is the user's home. Those of
``data`` are expanded where they are read."""

LEAST = by_name(
    (0, "eval_batch_size max_steps eval_every early_stopping save_every skip_nonfinite"),
    (1, "batch_size eval_batches keep_checkpoints log_every data.padding_multiple"),
    (
        0,
        "data.task_train data.task_dev data.task_eval data.task_seed data.shots data.max_samples"
        " prefix.num_virtual_tokens",
    ),
    (2, "data.max_length"),
)
"""The least that a setting may be."""


def _ranges(run: RunConfig) -> Iterator[str]:
    """Yield the single settings that are out of range, and what each must be."""
    yield from beyond(run, checked=("plan",))
    for name, least in LEAST.items():
        number = operator.attrgetter(name)(run)
        if number < least:
            yield f"{name} is {number}; it must be at least {least}"
    data = run.data
    if not 0 < run.epochs < math.inf:
        yield f"epochs is {run.epochs}; it must be above 0, such as 3 or 0.5"
    if run.start_timeout <= 0:
        yield f"start_timeout is {run.start_timeout}; it must be above 0 seconds"
    if data.eval_limit < 0:
        yield (
            f"data.eval_limit is {data.eval_limit}; it must be at least 0, which evaluates all"
            " records"
        )
    if not 0 <= data.eval_share < 1:
        yield (
            f"data.eval_share is {data.eval_share}; it must be at least 0 and below 1, such as 0.05"
        )
    for setting, words in WORDS.items():
        word = operator.attrgetter(setting)(run)
        if word not in words:
            yield f"{setting} is {word!r}; it must be {spoken(filter(None, words))}"


def _sources_against(run: RunConfig) -> Iterator[str]:
    """Yield what settings of the training data ask of each other."""
    data = run.data
    if data.task and (data.template or data.format or data.packing):
        yield (
            f"data.task={data.task} brings its own prompt and format; leave data.template,"
            " data.format and data.packing out"
        )
    if data.shots and not (data.task or (data.template and data.train)):
        yield (
            f"data.shots={data.shots} needs questions and where to take them from: set data.task,"
            " or data.template and data.train"
        )
    sources = len(listed(data.train))
    shares = data.shares
    if shares and (len(shares) != sources or not all(0 < share < math.inf for share in shares)):
        yield (
            f"data.weights is {list(shares)}; data.train has {sources} sources, and each needs a"
            " weight above 0"
        )
    if bool(data.template) != bool(data.label_words):
        yield "classification needs both data.template and data.label_words; one of them is missing"


def _evaluation_against(run: RunConfig) -> Iterator[str]:
    """Yield what else speaks against holding out a share of the training data."""
    data = run.data
    if not data.eval_share:
        return
    other = "data.eval" if data.eval else "data.task" if data.task else ""
    if other:
        yield f"data.eval_share and {other} both say what is evaluated; leave one of them out"
    if data.shots:
        yield (
            f"data.shots={data.shots} are taken of data.train, of which data.eval_share holds out"
            " a part: set data.eval instead of it"
        )


def _objective(run: RunConfig) -> Iterator[str]:
    """Yield what the objective and other settings ask of each other."""
    facts = run.plan.objective_facts
    name = bare(run.plan.objective)
    if run.reference and not facts.reference:
        yield (
            f"reference is {run.reference}, and objective: {name} compares with none; leave it out"
        )
    if not facts.of_log_probabilities:
        return
    if run.elastic:
        yield (
            f"objective is {name}, and elastic is {run.elastic}: ranks that come and go learn by"
            " the loss alone; leave elastic out, or set objective: sft"
        )
    if facts.reference and run.data.appended == "follow":
        yield (
            f"objective is {name}, whose reference is evaluated before the first step, and"
            " data.appended: follow brings records after it; set data.appended: refuse"
        )


def _together(run: RunConfig) -> Iterator[str]:
    """Yield what adapters, batch and plan ask of each other."""
    if run.prefix and run.lora is not None:
        yield "prefix and lora are both given, and a run trains one of them; leave the other out"
    if run.prefix and run.data.packing:
        yield "data.packing begins positions anew in a row, which no prefix allows; leave one out"
    steps = run.plan.gradient_accumulation_steps
    parts = run.plan.mesh.data
    if run.batch_size % steps:
        yield (
            f"batch_size is {run.batch_size} sequences a step, which"
            f" gradient_accumulation_steps={steps} does not divide; change one of them"
        )
    if run.plan.estimator.facts.shares_forwards and run.batch_size % (steps * parts):
        yield (
            f"batch_size is {run.batch_size} sequences a step, which mesh.data={parts} parts of"
            f" gradient_accumulation_steps={steps} micro-batches do not divide; change batch_size,"
            f" or share the forwards instead (mesh.perturb: up to {run.plan.forward_passes})"
        )


WORDS = {
    "keep_best": ("", "loss", "accuracy"),
    "data.appended": ("refuse", "follow"),
    "data.label_scores": ("mean", "sum"),
    "data.task_part": ("test", "dev"),
}
"""Settings that take one of a few words, and the words."""
