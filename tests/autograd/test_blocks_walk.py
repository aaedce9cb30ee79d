"""Oracle: the model's own forward and autograd, its own modules and generators, and Python's
reference counts."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from blockwalk.cutting import verify
from blockwalk.cutting import verify as verification
from blockwalk.cutting.anatomy import CallTrace, dissect, layer_candidates, watch
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from blockwalk.numerics.codecs.weights import DenseWeight
from tests.support.control import assert_same, control, tiny_batch, tiny_config, tiny_model, walk
from tests.support.messages import refused


def cut_and_values(model_type: str, **settings: object):
    config = tiny_config(model_type, **settings)
    cut = certified(build_skeleton(config))
    return cut, {name: p.detach() for name, p in tiny_model(config).named_parameters()}


def bind(cut: CutModel, unit: int, values):
    return cut.bind(unit, {spec.name: values[spec.name] for spec in cut.spec().units[unit].params})


def test_spec_names_every_parameter_once_in_execution_order() -> None:
    """Oracle: `named_parameters()`, and OPT's forward, which applies the final norm that it
    registers first last."""
    config = tiny_config("opt")
    cut = certified(build_skeleton(config))
    spec = cut.spec()
    model = tiny_model(config)
    named = dict(model.named_parameters())
    listed = [param.name for param in spec.params()]
    assert sorted(listed) == sorted(named)
    assert listed != list(named)
    assert [unit.name for unit in spec.blocks] == [
        f"model.decoder.layers.{i}" for i in range(len(spec.blocks))
    ]
    assert [p.name for p in spec.epilogue.params] == [
        "model.decoder.final_layer_norm.weight",
        "model.decoder.final_layer_norm.bias",
    ]
    assert spec.tied == (("lm_head.weight", "model.decoder.embed_tokens.weight"),)
    for param in spec.params():
        assert param.shape == tuple(named[param.name].shape)
        assert param.quantizable == (named[param.name].ndim == 2)
    assert spec.hidden_size, spec.vocab_size == (config.hidden_size, config.vocab_size)


def test_kinds_tell_apart_what_runs_differently() -> None:
    """Oracle: the layers' own attributes: sliding or full attention, dense or expert
    feed-forward."""
    cut = certified(build_skeleton(tiny_config("gemma3_text")))
    kinds = {}
    for unit, block in enumerate(cut.spec().blocks, 1):
        kinds.setdefault(block.kind, set()).add(cut.modules(unit)[0].self_attn.is_sliding)
    assert len(kinds) == 2
    assert all(len(sliding) == 1 for sliding in kinds.values())
    mixed = certified(build_skeleton(tiny_config("deepseek_v3"))).spec().blocks
    experts = [any("experts" in p.name for p in block.params) for block in mixed]
    assert len({(block.kind, has) for block, has in zip(mixed, experts, strict=True)}) == 2
    assert any(p.quantizable and len(p.shape) == 3 for block in mixed for p in block.params)


def test_dropout_is_reproduced_and_the_global_generator_left_alone() -> None:
    """Oracle: the block's own output under the same seed; torch's global generator state."""
    cut, values = cut_and_values("gpt2")
    batch = tiny_batch(160)
    bind(cut, 0, values)
    bind(cut, 1, values)
    before = torch.get_rng_state()
    first, again, other = (cut.prologue(batch, seed) for seed in (1, 1, 2))
    assert torch.equal(first.hidden_BSD, again.hidden_BSD)
    assert not torch.equal(first.hidden_BSD, other.hidden_BSD)
    hidden = first.hidden_BSD.detach()
    with torch.no_grad():
        plain = cut.forward(first.calls[0], hidden, seed=7)
    recomputed = cut.forward(first.calls[0], hidden.requires_grad_(), seed=7)
    assert torch.equal(plain, recomputed)
    assert not torch.equal(plain, cut.forward(first.calls[0], hidden, seed=8))
    assert torch.equal(before, torch.get_rng_state())
    cut.model.eval()
    assert torch.equal(
        cut.forward(first.calls[0], hidden, seed=7), cut.forward(first.calls[0], hidden, seed=8)
    )


def test_nothing_bound_outlives_unbind() -> None:
    """Oracle: weak references to the tensors and providers that were bound."""
    cut, values = cut_and_values("llama")
    bind(cut, 0, values)
    prologue = cut.prologue(tiny_batch(160))
    fresh = {spec.name: values[spec.name].clone() for spec in cut.spec().blocks[0].params}
    lazy_name = next(spec.name for spec in cut.spec().blocks[0].params if spec.quantizable)
    cut.model.requires_grad_(False)
    frozen = certified(cut.model)
    fresh[lazy_name] = DenseWeight(fresh[lazy_name])
    watched = [weakref.ref(value) for value in fresh.values()]
    storages = [weakref.ref(v.tensor if isinstance(v, DenseWeight) else v) for v in fresh.values()]
    frozen.bind(1, fresh)
    hidden = frozen.forward(prologue.calls[0], prologue.hidden_BSD.detach().requires_grad_())
    hidden.sum().backward()
    frozen.unbind(1)
    del fresh, hidden
    gc.collect()
    assert [ref() for ref in watched + storages] == [None] * (len(watched) + len(storages))
    assert all(param.is_meta for param in frozen.modules(1)[0].parameters())


def test_bound_trainables_are_leaves_over_the_same_memory() -> None:
    """Oracle: `data_ptr`, and autograd on the leaf that `bind` answers."""
    cut, values = cut_and_values("llama")
    bind(cut, 0, values)
    leaves = bind(cut, 1, values)
    assert leaves.keys() == {spec.name for spec in cut.spec().blocks[0].params}
    for name, leaf in leaves.items():
        assert leaf.requires_grad
        assert leaf.is_leaf
        assert leaf.data_ptr() == values[name].data_ptr()
        assert not values[name].requires_grad
    own = values["model.layers.0.mlp.up_proj.weight"].clone().requires_grad_()
    assert (
        cut.bind(1, {"model.layers.0.mlp.up_proj.weight": own})["model.layers.0.mlp.up_proj.weight"]
        is own
    )


def test_a_real_model_hands_over_its_parameters() -> None:
    """Oracle: the model's own tensors before they were taken, and its own autograd."""
    config = tiny_config("gpt2")
    model = tiny_model(config).eval()
    batch = tiny_batch(config.vocab_size)
    own = control(model, batch, [], seeded=False)
    pointers = {name: param.data_ptr() for name, param in model.named_parameters()}
    cut = certified(model)
    values = cut.take_parameters()
    assert {name: value.data_ptr() for name, value in values.items()} == pointers
    assert all(param.is_meta for param in model.parameters())
    assert_same(walk(cut, values, batch), own, 2e-6)
    assert cut.take_parameters() == {}


def test_prefix_tuning_gives_each_block_a_view_of_its_cache() -> None:
    """Oracle: autograd of the whole PeftModel: the prefix is a key-value cache that reaches every
    layer."""
    from peft import PrefixTuningConfig, get_peft_model

    config = tiny_config("llama")
    model = get_peft_model(
        tiny_model(config), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    batch = tiny_batch(config.vocab_size)
    own = control(model, batch, [], seeded=False)
    cut = certified(model)
    values = cut.take_parameters()
    walked = walk(cut, values, batch)
    (name,) = walked[2]
    assert name == "prompt_encoder.embedding.weight"
    loss, logits, (grad,) = own[0], own[1], own[2].values()
    assert_same(walked, (loss, logits, {name: grad}), 2e-6)


def test_blocks_write_into_the_cache_of_a_generation() -> None:
    """Oracle: the model's own logits for the whole sequence at once."""
    from transformers import DynamicCache

    cut, values = cut_and_values("qwen3", tie_word_embeddings=False)
    cut.model.eval()
    for unit in range(cut.epilogue_index + 1):
        bind(cut, unit, values)
    ids = tiny_batch(160)["input_ids"][:1]
    cache = DynamicCache(config=cut.base.config)
    rows = []
    with torch.no_grad():
        for piece in (ids[:, :6], ids[:, 6:7], ids[:, 7:]):
            batch = {"input_ids": piece, "past_key_values": cache, "use_cache": True}
            prologue = cut.prologue(batch)
            hidden = prologue.hidden_BSD
            for call in prologue.calls:
                hidden = cut.forward(call, hidden)
            rows.append(cut.logits(prologue, hidden, batch))
        assert cache.get_seq_length() == ids.shape[1]
        whole = cut.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(rows, dim=1), whole)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states, notes=None, mask=None):
        if notes is not None:
            notes["seen"] = hidden_states
        if mask is not None:
            mask.add_(1)
        return self.linear(hidden_states)


def _toy(config, forward) -> nn.Module:
    """A model of three linear layers, whose forward is given."""
    from transformers import PreTrainedModel

    class Toy(PreTrainedModel):
        config_class = type(config)
        _no_split_modules = ("_Layer",)

        def __init__(self) -> None:
            super().__init__(config)
            self.embed = nn.Embedding(9, 4)
            self.layers = nn.ModuleList(_Layer() for _ in range(3))

        def get_output_embeddings(self):
            return None

    Toy.forward = forward
    return Toy()


def _toy_cut(forward) -> CutModel:
    from transformers import LlamaConfig

    model = _toy(LlamaConfig(vocab_size=9, hidden_size=4, num_attention_heads=1), forward)
    trace = CallTrace()
    layers = layer_candidates(model)
    handles = watch(model, layers, trace)
    model(input_ids=torch.arange(3)[None])
    for handle in handles:
        handle.remove()
    return CutModel(model, dissect(model, layers, trace))


def test_work_between_layers_is_refused() -> None:
    """Oracle: the toy's own code, which doubles the hidden state between its layers."""

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden) * 2
        return hidden

    with refused(ValueError, "layers"):
        _toy_cut(forward).prologue({"input_ids": torch.arange(3)[None]})


@pytest.mark.parametrize("argument", ["notes", "mask"])
def test_state_handed_on_is_refused(argument: str) -> None:
    """Oracle: the toy's own code, whose layers write into a dict or a tensor that all of them are
    given."""

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        shared = {argument: {} if argument == "notes" else torch.zeros(1)}
        for layer in self.layers:
            hidden = layer(hidden, **shared)
        return hidden

    cut = _toy_cut(forward)
    prologue = cut.prologue({"input_ids": torch.arange(3)[None]})
    with refused(ValueError, "layers state"):
        cut.forward(prologue.calls[0], prologue.hidden_BSD.detach())


@pytest.mark.parametrize("order", [(0, 1), (0, 2, 1), (0, 1, 2, 0)])
def test_a_step_that_calls_its_layers_otherwise_is_refused(order: tuple[int, ...]) -> None:
    """Oracle: the toy's own code, which in some steps skips, reorders or repeats layers."""

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for index in order if input_ids.shape[1] > 3 else (0, 1, 2):
            hidden = self.layers[index](hidden)
        return hidden

    cut = _toy_cut(forward)
    assert len(cut.prologue({"input_ids": torch.arange(3)[None]}).calls) == 3
    if order == (
        0,
        1,
        2,
        0,
    ):  # the pass ends at the last layer: a repetition shows at the next comparison only
        return
    with refused(ValueError, "layers"):
        cut.prologue({"input_ids": torch.arange(4)[None]})


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(24, "too many open files"), RuntimeError("can't allocate memory")],
)
def test_what_the_machine_refused_is_no_verdict(error, tmp_path, monkeypatch) -> None:
    """Oracle: the study itself, once the machine has room again; in this process and in one that
    reads its file."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path))
    monkeypatch.setattr(verification, "_verdicts", {})
    model = build_skeleton(tiny_config("gpt2"))
    with monkeypatch.context() as full:
        full.setattr(verification, "compare", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            verify.certified_anatomy(model)
    assert not list(tmp_path.rglob("*.json"))
    assert verify.certified_anatomy(model) == verify.study(type(model), model.config)


def test_verdicts_are_kept_in_a_file(tmp_path, monkeypatch) -> None:
    """Oracle: the verdict of the study itself; a second process would read the same file."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path))
    monkeypatch.setattr(verification, "_verdicts", {})
    studies = []
    study = verify.study
    monkeypatch.setattr(verification, "study", lambda *a, **k: studies.append(a) or study(*a, **k))
    good, bad = (build_skeleton(tiny_config(name)) for name in ("gpt2", "hrm_text"))
    anatomy = verify.certified_anatomy(good)
    with refused(ValueError, "looped"):
        verify.certified_anatomy(bad)
    assert len(list(tmp_path.iterdir())) == len(studies) == 2
    verify._verdicts.clear()
    assert verify.certified_anatomy(good) == anatomy
    with refused(ValueError, "looped"):
        verify.certified_anatomy(bad)
    assert len(studies) == 2
