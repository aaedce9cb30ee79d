"""Oracle: the value that went in, to be given back by YAML, flags and the saved file; PyYAML for
what YAML 1.1 says."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.cli import main, settings_help
from blockwalk.plan import parsing, run_config
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.placement import Codec, Placement, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.simulate import hardware
from blockwalk.train import config
from tests.support.messages import refused

pytestmark = pytest.mark.fast

EXAMPLE = """
model: some/model
method: mebp
data: {train: a.jsonl, template: "{text} It was {label}.", label_words: [no, yes]}
lora: {rank: 4, target_modules: [q_proj, v_proj], options: {use_rslora: true}}
optimizer: {learning_rate: 1e-4, betas: [0.9, 0.95]}
budget: 2GB
frozen: disk × int8
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


WORDS = {"data.template": "{text} is {label}", "data.label_words": ["a", "b", "c"]}


def test_yaml(tmp_path: Path) -> None:
    run = config.load(write(tmp_path, EXAMPLE))
    assert yaml.safe_load("1e-4") == "1e-4", "YAML 1.1, which PyYAML reads, has no such number"
    assert yaml.safe_load("[no, yes]") == [False, True], "nor these words"
    assert run.plan == method(
        "mebp",
        frozen="disk × int8",
        budget=2 * 10**9,
        optimizer={"learning_rate": 1e-4, "betas": (0.9, 0.95)},
    )
    assert run.data.label_words == ("no", "yes")
    assert run.lora == LoraSettings(
        rank=4, target_modules=("q_proj", "v_proj"), options={"use_rslora": True}
    )
    assert (run.model, run.data.train, run.batch_size) == ("some/model", "a.jsonl", 8)


def test_flags_win_under_the_same_names(tmp_path: Path) -> None:
    flags = [
        "--optimizer.learning_rate",
        "3e-5",
        "--frozen.tier=host",
        "--lora.options.use_rslora",
        "false",
    ]
    flags += [
        "--data.label_words",
        "[bad,good]",
        "--data.template",
        "{text}:{label}",
        "--data.packing",
        "true",
    ]
    flags += ["--batch_size", "1e2", "--resume_from_checkpoint", "true"]
    run = config.load(write(tmp_path, EXAMPLE), config.split_flags(flags)[0])
    assert run.plan.optimizer.learning_rate == 3e-5
    assert run.plan.frozen == Placement(Tier.HOST, Codec.INT8)
    assert run.batch_size == 100
    assert run.lora == LoraSettings(
        rank=4, target_modules=("q_proj", "v_proj"), options={"use_rslora": False}
    )
    assert run.data.label_words == ("bad", "good")
    assert run.data.template == "{text}:{label}"
    assert run.data.packing is True
    assert run.resume_from_checkpoint == "latest"
    assert (
        config.load(write(tmp_path, EXAMPLE), config.split_flags(["--lora", "false"])[0]).lora
        is None
    )
    with refused(ValueError, "lora lora.rank 2"):
        config.load(None, [("lora", False), ("lora.rank", "2")])


def test_lora_is_what_a_row_with_block_coded_weights_means() -> None:
    assert config.from_mapping({}).lora == LoraSettings()
    assert config.from_mapping({"frozen": "disk"}).lora == LoraSettings(), (
        "whatever codec the row is then given"
    )
    assert config.from_mapping({"lora": False, "frozen": "disk"}).lora is None
    assert config.from_mapping({"method": "mezo"}).lora is None
    assert config.from_mapping({"method": "mezo", "lora": True}).lora == LoraSettings()
    assert config.from_mapping({"method": "mezo", "frozen": "disk × int4"}).lora == LoraSettings()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"optimiser": {"learning_rate": 1}}, "optimiser.learning_rate optimizer.learning_rate"),
        ({"optimizer": {"learning_rat": 1}}, "optimizer.learning_rat optimizer.learning_rate"),
        ({"learning_rat": 1}, "learning_rat optimizer.learning_rate"),
        ({"lora": {"rnk": 1}}, "lora.rnk lora.rank"),
        ({"data": {"max_lenght": 1}}, "data.max_length"),
        ({"batchsize": 1}, "batch_size"),
        ({"method": "mebb"}, "method mebb mebp"),
        ({"batch_size": "many"}, "batch_size many"),
        ({"batch_size": 2.5}, "batch_size 2.5"),
        ({"batch_size": True}, "batch_size True"),
        ({"batch_size": 0}, "batch_size 0 1"),
        ({"model": 7}, "model 7"),
        ({"data": {"packing": "perhaps"}}, "data.packing perhaps"),
        ({"data": {"label_words": [0, 1]}}, "data.label_words 0 1"),
        ({"data": {"template": "{text}{label}"}}, "data.template data.label_words"),
        ({"data": "a.jsonl"}, "a.jsonl data.train"),
        ({"lora": {"rank": 0}}, "lora.rank 0"),
        ({"lora": {"options": {"r": 4}}}, "lora.options.r PEFT lora.rank"),
        ({"lora": {"options": 3}}, "lora.options 3"),
        ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate fast"),
        ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate -1.0"),
        ({"frozen": "disk × int5"}, "frozen int5"),
        ({"frozen": "disk × int4 × node × world"}, "frozen int4"),
        ({"frozen": {"teir": "disk"}}, "frozen.teir frozen.tier"),
        ({"budget": "much"}, "budget much 18GB"),
        ({"gradient_accumulation_steps": 3, "update": {"timing": "step"}}, "batch_size 8"),
        ({"optimizer.max_grad_norm": "much"}, "optimizer.max_grad_norm much"),
        ({"lora.options.init_lora_weights": "[1"}, "lora.options.init_lora_weights [1 YAML"),
        ({3: 4}, "setting 3"),
    ],
)
def test_what_is_wrong_is_said(setting: dict[Any, Any], message: str) -> None:
    with refused(ValueError, message):
        config.from_mapping(setting)


def test_module_names_with_commas_are_a_list_and_a_pattern_is_one_text() -> None:
    """Oracle: PEFT's own reading: a list holds names, one text is a regular expression."""
    for text, modules in (
        ("q_proj, v_proj", ("q_proj", "v_proj")),
        (r".*\.[0-9]{1,2}\..*q_proj", r".*\.[0-9]{1,2}\..*q_proj"),
    ):
        run = config.from_mapping({}, config.split_flags(["--lora.target_modules", text])[0])
        assert run.lora is not None
        assert run.lora.target_modules == modules


@pytest.mark.parametrize("word", ["true", "yes", "on", "1", "false", "no", "off", "0"])
def test_every_switch_reads_the_same_words(word: str) -> None:
    """Oracle: the words themselves; of the run's switches and of the plan's, as flags and as YAML
    1.2 has them."""
    flags, _ = config.split_flags(
        f"--{name}={word}" for name in ("data.packing", "data.shuffle", "compile", "lora")
    )
    run = config.from_mapping({"method": "plain"}, flags)
    switched = word in ("true", "yes", "on", "1")
    assert (run.data.packing, run.data.shuffle, run.plan.compile, run.lora is not None) == (
        switched,
    ) * 4


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "YAML"), ("- a", "settings"), ("seed: 1\nseed: 2", "seed")]
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    with refused(ValueError, message):
        config.load(write(tmp_path, text))


@pytest.mark.parametrize("load", [config.load, hardware.load])
@pytest.mark.parametrize("data", [b"a: [", b"a: \xa3\x00"])
def test_a_file_that_cannot_be_read_is_named(load: Any, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(data)
    with refused(ValueError, "broken.yaml YAML"):
        load(path)


@pytest.mark.parametrize(
    ("flags", "message"), [(["--seed"], "--seed"), (["--seed", "--lora"], "--seed")]
)
def test_flags_that_are_none(flags: list[str], message: str) -> None:
    with refused(ValueError, message):
        config.split_flags(flags)


def test_a_setting_has_one_meaning() -> None:
    own = {f.name for f in dataclasses.fields(RunConfig)} - {"plan"}
    assert not own & {f.name for f in dataclasses.fields(Plan)}


texts = st.one_of(
    st.text(),
    st.sampled_from(
        ["no", "on", "1e-4", "007", "null", "~", "", "0x1f", "1_000", ".5", "{a", "=", "<<"]
    ),
)
floats = st.floats(min_value=0, max_value=1e9)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(METHODS)),
    text=texts,
    words=st.lists(texts, min_size=1),
    lora=st.none()
    | st.builds(
        LoraSettings, rank=st.integers(1, 1 << 16), alpha=floats, target_modules=texts.filter(bool)
    ),
    rate=floats,
    options=st.dictionaries(
        texts, st.one_of(st.booleans(), st.integers(), texts, st.floats(allow_nan=False))
    ),
    budget=st.none() | st.integers(1, 1 << 62),
)
def test_round_trip(
    name: str,
    text: str,
    words: list[str],
    lora: LoraSettings | None,
    rate: float,
    options: dict[str, Any],
    budget: Any,
) -> None:
    run = RunConfig(
        model=text,
        plan=method(name, optimizer={"learning_rate": rate}, budget=budget),
        data=run_config.DataSettings(template="x", label_words=tuple(words)),
        lora=lora and dataclasses.replace(lora, options=options),
    )
    assert config.from_mapping(yaml.load(config.dump(run), Loader=parsing.Loader)) == run
    assert config.from_mapping(run.to_mapping()) == run


@pytest.mark.parametrize("name", ["mebp", "fcdp"])
def test_compile_is_refused_and_not_ignored(name: str) -> None:
    """Oracle: the setting's own words. A flag that does nothing would look like one that gains
    nothing."""
    with refused(ValueError, "compile: false"):
        method(name, compile=True)
    assert not method(name, compile=False).compile


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"method": "mezo", "batch_size": 16}, 16),
        ({"method": "mezo", "batch_size": 16, "mesh.world": 4, "mesh.data": 4}, 4),
        (
            {
                "method": "mezo",
                "batch_size": 16,
                "mesh.world": 4,
                "mesh.data": 2,
                "gradient_accumulation_steps": 2,
            },
            4,
        ),
        ({"method": "mezo", "batch_size": 16, "zo.objective": "label_words", **WORDS}, 48),
        (
            {
                "method": "mezo",
                "batch_size": 16,
                "zo.objective": "f1",
                "mesh.world": 8,
                "mesh.data": 8,
                **WORDS,
            },
            6,
        ),
        ({"method": "mezo", "batch_size": 16, **WORDS}, 16),
        ({"method": "plain", "batch_size": 16, "gradient_accumulation_steps": 2}, 8),
        ({"method": "zero3", "batch_size": 18, "mesh.world": 4, "lora": False}, 5),
    ],
)
def test_rows_that_one_rank_walks_at_once(settings: dict[str, Any], rows: int) -> None:
    """Closed form: batch / (micro-batches × ranks that cut the batch), rounded up, × label words
    where they are ranked."""
    assert config.from_mapping({"model": "m", **settings}).micro_batch_rows == rows


def test_help_lists_every_setting_once_with_its_sentence() -> None:
    """Oracle: the dataclasses' own fields, defaults and docstrings."""
    whole = [
        name
        for name in config.setting_names()
        if not name.startswith(tuple(f"{p}." for p in config.PLACEMENTS))
    ]
    listed = [
        name for _, names, _ in settings_help.GROUPS for name in settings_help.settings_of(names)
    ]
    assert sorted(listed) == sorted(whole)
    for name in listed:
        form, sentence = settings_help.described(name)
        assert form
        assert sentence.endswith("."), name
    text = " ".join(" ".join(settings_help.lines("train")).split())
    assert (
        "--data.max_length N The most tokens of a sequence; longer records are cut, and counted."
        " (default: 512)" in text
    )
    assert "--optimizer.name adamw|sgd|momentum|sign The update rule" in text
    assert "--update.timing block|step|deferred " in text
    assert f"(default: {RunConfig().plan.frozen})" in text


@pytest.mark.parametrize(("command", "reads", "leaves"), [
    ("eval", "--data.template", "--optimizer"), ("generate", "--compute_dtype", "--data.train"),
    ("plan", "--zo.kind", "--prompt"),
])  # fmt: skip
def test_help_of_a_command_lists_what_it_reads(command: str, reads: str, leaves: str) -> None:
    """Oracle: what each command asks of its configuration."""
    text = "\n".join(settings_help.lines(command))
    assert reads in text
    assert leaves not in text


def test_a_text_in_braces_stays_a_text_where_no_mapping_goes() -> None:
    """Oracle: the text that a shell hands over."""
    pairs, _ = config.split_flags(
        ["--data.prompt", "{question}", "--data.columns={prompt: q}", "--lora", "{rank: 2}"]
    )
    assert pairs == [
        ("data.prompt", "{question}"),
        ("data.columns", {"prompt": "q"}),
        ("lora", {"rank": 2}),
    ]
    run = config.from_mapping({}, pairs)
    assert (run.data.prompt, run.data.columns, run.lora and run.lora.rank) == (
        ("{question}",),
        ("prompt=q",),
        2,
    )


def test_the_name_of_a_module_is_a_list_of_one_and_a_pattern_stays_one() -> None:
    for text, modules in (
        ("q_proj", ("q_proj",)),
        ("all-linear", "all-linear"),
        (".*q_proj", ".*q_proj"),
    ):
        run = config.from_mapping({"lora": {"target_modules": text}})
        assert run.lora is not None
        assert run.lora.target_modules == modules


def test_settings_are_listed_by_the_beginning_of_their_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the names of a run's file."""
    assert main.main(["settings", "lora"]) == 0
    listed = re.findall(r"^  --(\S+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert sorted(listed) == sorted(
        name for name in config.setting_names() if name.startswith("lora")
    )


def test_a_switch_needs_no_value() -> None:
    """Oracle: other tools' command lines, where the name alone is true."""
    words = ["--overwrite_output_dir", "--data.packing", "--batch_size", "2"]
    pairs, others = config.split_flags(words)
    assert not others
    run = config.from_mapping({}, pairs)
    assert run.overwrite_output_dir
    assert run.data.packing
    assert run.batch_size == 2
    with refused(ValueError, "output_dir value"):
        config.split_flags(["--output_dir"])
