"""Oracle: autograd over the model in memory on whole sequences. Blocks, the last norm and the loss
by tiles of the sequence have its losses and gradients; what a tile's run allocates is counted by
the meter, and models that look along the sequence outside their attention stay whole."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from blockwalk import method
from blockwalk.cutting import rule_masks, tile_trial, verify
from blockwalk.cutting.block_tiles import EPILOGUE, kind_of
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import small_batch
from blockwalk.numerics import rule_mask
from blockwalk.numerics.sequence_tiles import Positionwise, by_tiles
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import Tiling
from blockwalk.program.program import Shape
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.messages import refused

LENGTH = 150
TILE = 64
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gemma3_text": {
        **SMALL,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {**SMALL, "num_local_experts": 2},
    "gpt2": {
        "n_embd": 16,
        "max_position_embeddings": 256,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
    },
}


def batch_of(kind: str) -> dict[str, Tensor]:
    """Two padded rows, or one of two documents."""
    rows = 1 if kind == "packed" else 2
    ids = torch.randint(3, 101, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    if kind == "packed":
        positions = torch.cat([torch.arange(90), torch.arange(LENGTH - 90)])[None]
        labels = ids.masked_fill(positions == 0, -100)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}
    mask = torch.ones_like(ids)
    mask[1, 100:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def tiled(name: str, **settings: Any) -> Plan:
    return method(name, compute_dtype="float32", sequence_tile=TILE, **settings)


def tiles_of(walker: Walker) -> list[int]:
    """The lengths of the sequences that the first block's feed-forward is called with from now
    on."""
    lengths: list[int] = []
    (block,) = walker.engine.cut.modules(1)
    mlp: Any = getattr(block, "mlp", None)
    mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    return lengths


def check(family: str, batch: dict[str, Tensor]) -> None:
    """Compare loss and gradients by tiles with the model's own."""
    model = tiny_model(family, **FAMILIES[family])
    control = copy.deepcopy(model)
    with Walker(model, tiled("plain", recompute="all"), device="cpu") as walker:
        assert walker.engine.cut.anatomy.against_tiles == ""
        assert walker.engine.cut.tile(LENGTH) == TILE
        found = walker.gradients(batch)
        loss = walker.evaluate(batch).loss
    theirs = control(**batch, use_cache=False).loss
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-6)
    largest = max(float(p.grad.norm()) for p in control.parameters() if p.grad is not None)
    for name, parameter in control.named_parameters():
        difference = float((found[name] - parameter.grad).norm())
        scale = max(float(parameter.grad.norm()), 1e-3 * largest)
        assert difference <= 2e-6 * scale, (name, difference / scale)


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_have_autograds_losses_and_gradients(family: str, kind: str) -> None:
    if kind == "packed" and family == "gpt2":
        pytest.skip("it learns positions, and keeps no documents apart by them")
    check(family, batch_of(kind))


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_keys_under_a_rule_are_not_copied_for_each_head(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads of queries read one of keys: under a window, behind padding, among documents."""
    shapes = []
    attention = rule_mask._attention

    def noting(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append((query.shape[1], key.shape[1]))
        return attention(query, key, *args, **kwargs)

    monkeypatch.setattr(rule_mask, "_attention", noting)
    monkeypatch.setattr(rule_masks, "LARGEST_WHOLE_MASK", 1)
    batch = batch_of(kind)
    if kind == "padded":  # on the left, where it stays
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
    check("gemma3_text", batch)
    assert set(shapes) <= {(2, 1)}
    assert shapes or kind == "packed"


@pytest.mark.parametrize("kept", ["all", "none"])
def test_adapters_learn_as_they_do_on_whole_sequences(kept: str) -> None:
    """The oracle is the same walk on whole sequences, in float32. Closed form: a kept graph is made
    once, by tiles too."""
    batch = batch_of("padded")
    passes = 1 if kept == "none" else 2
    runs = []
    for tile in (TILE, "off"):
        settings = {"compute_dtype": "float32", "recompute": kept, "frozen": "disk"}
        plan = method("mebp", **settings, sequence_tile=tile)
        torch.manual_seed(0)
        model = tiny_model("llama", **SMALL)
        with Walker(model, plan, lora=LoraSettings(rank=2), device="cpu") as walker:
            lengths = tiles_of(walker)
            runs.append(([walker.step(batch).loss for _ in range(2)], walker.gradients(batch)))
            assert (max(lengths) == TILE) == (tile == TILE)
            assert sum(lengths) == 3 * passes * 256  # three walks over 250 tokens, filled up
    (losses, gradients), (expected_losses, expected) = runs
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


@pytest.mark.parametrize("frozen", ["disk", "host × raw"])
def test_kept_graphs_of_tiles_are_let_go_of(frozen: str) -> None:
    """Oracle: the garbage collector's list of tensors with a graph. In a tile's second run a norm
    leads nowhere: in file maps, and by places in slots, its saved answer would hold its graph."""

    def with_graph() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) and o.grad_fn is not None for o in gc.get_objects())

    before = with_graph()
    tier = "disk" if frozen == "disk" else "device"
    plan = tiled("mebp", recompute="none", frozen=frozen, activation=tier)
    model = tiny_model("llama", **SMALL)
    with Walker(model, plan, lora=LoraSettings(rank=2), device="cpu") as walker:
        walker.step(batch_of("padded"))
        walker.step(batch_of("padded"))
    assert with_graph() == before


class _LooksBack(nn.Module):
    """A feed-forward that adds the position before it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        answer: Tensor = self.mlp(hidden_BSD)
        return answer + torch.nn.functional.pad(hidden_BSD, (0, 0, 1, 0))[:, :-1]


def test_what_looks_along_the_sequence_stays_whole() -> None:
    """A mutant of one block: its kind alone stays whole, as a layer that is a convolution does."""
    model = tiny_model("llama", **SMALL).eval()
    batch = small_batch(model.config)
    cut = CutModel(model, verify.certified_anatomy(model))
    verdict = tile_trial.try_tiles(cut, batch)
    layers: Any = model.model.layers
    kind = kind_of(layers[0])
    assert verdict.reason == ""
    assert verdict.by_tiles == tuple(sorted([kind, EPILOGUE]))
    layers[0].mlp = _LooksBack(layers[0].mlp)
    anatomy = verify._dissected(model, batch)
    verdict = tile_trial.try_tiles(CutModel(model, anatomy), batch)
    assert "model.layers.0 differs by" in verdict.reason
    assert verdict.by_tiles == tuple(sorted([kind, EPILOGUE]))
    layers[1].mlp = _LooksBack(layers[1].mlp)
    assert tile_trial.try_tiles(CutModel(model, anatomy), batch).by_tiles == (EPILOGUE,)


def test_kinds_are_told_apart_in_a_larger_model_with_adapters() -> None:
    """Convolutions beside attention: layers with attention go by tiles, and gradients are
    autograd's."""
    settings = {**SMALL, "layer_types": ["conv", "full_attention"]}
    model = tiny_model("lfm2", **settings)
    control: Any = copy.deepcopy(model)
    batch = batch_of("padded")
    with Walker(model, tiled("plain", recompute="all"), device="cpu") as walker:
        cut = walker.engine.cut
        sizes = [cut.tile(LENGTH, block) for unit in (1, 2) for block in cut.modules(unit)]
        assert sizes == [0, TILE]
        gradients = walker.gradients(batch)
    control(**batch, use_cache=False).loss.backward()
    for name, parameter in control.named_parameters():
        difference = float((gradients[name] - parameter.grad).norm())
        assert difference <= 2e-6 * max(float(parameter.grad.norm()), 1e-3), name
    larger: Any = tiny_model("lfm2", **{**settings, "hidden_size": 32, "num_attention_heads": 4})
    adapted: Any = get_peft_model(larger, LoraConfig(r=2, target_modules="all-linear"))
    kinds = [kind_of(layer) for layer in adapted.get_base_model().model.layers]
    assert [kind in cut.anatomy.by_tiles for kind in kinds] == [False, True]


def test_a_model_that_stays_whole_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", **SMALL)
    cut = CutModel(model, verify.certified_anatomy(model))
    cut.tiling = Tiling(TILE, TILE)
    cut.anatomy = dataclasses.replace(
        cut.anatomy, against_tiles="model.layers.0 differs by 0.5 on tiles", by_tiles=()
    )
    with caplog.at_level(logging.WARNING):
        assert cut.tile(LENGTH) == cut.tile(LENGTH) == 0
    assert caplog.text.count("model.layers.0 differs by 0.5") == 1


@pytest.mark.parametrize("keeps_graphs", [False, True])
def test_a_function_by_tiles_sums_its_parameters_in_float32(keeps_graphs: bool) -> None:
    """Closed form: the gradient of a bfloat16 factor of 1 is the sum of all elements, which
    bfloat16 could not add up."""
    factor = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    x_1S = torch.ones(1, 300, dtype=torch.bfloat16)
    work = Positionwise(lambda _, parts: [parts[0] * factor], (1,), (1,), torch.enable_grad)
    (out_1S,) = by_tiles(work, [x_1S], [factor], 1, keeps_graphs=keeps_graphs)
    (grad,) = torch.autograd.grad(out_1S, [factor], torch.ones_like(out_1S))
    assert float(grad) == 300


def test_the_forecast_knows_tiles() -> None:
    """Closed form: a feed-forward of width W holds 3·W·S numbers of a whole sequence, of a tile
    3·W·T."""
    wide = 4096
    config = tiny_model("llama", **{**SMALL, "intermediate_size": wide}).config
    costs = UnitCosts(config, lora=LoraSettings(rank=2))
    kind = costs.spec().blocks[0].kind
    shape = Shape(1, 8 * TILE)
    whole, tiles = (
        costs(method("mebp", sequence_tile=tile, compute_dtype="float32"), shape).of(kind)
        for tile in ("off", TILE)
    )
    saved = whole.forward_transient - tiles.forward_transient
    assert saved >= 2 * wide * (shape.sequence - TILE) * 4
    assert tiles.backward_transient < whole.backward_transient / 4
    assert tiles.saved < whole.saved / 4


def test_a_window_over_a_long_sequence_is_foreseen_without_its_mask() -> None:
    """Closed form: what a block of a tile holds for a token is the same at any length."""
    config = tiny_model("mistral", **SMALL, sliding_window=300, max_position_embeddings=1 << 15)
    costs = UnitCosts(config.config, lora=LoraSettings(rank=2))
    kind = costs.spec().blocks[0].kind
    plan = method("mebp", compute_dtype="float32")
    short, long = (costs(plan, Shape(1, length)).of(kind) for length in (2560, 10240))
    assert long.forward_transient < 4.25 * short.forward_transient
    assert long.backward_transient < 4.25 * short.backward_transient


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"sequence_tile": 8}, "sequence_tile 8 64"),
        ({"sequence_tile": "on"}, "sequence_tile 'on' auto off"),
        ({"sequence_tile": 512, "compile": True}, "sequence_tile 512 compiled"),
    ],
)
def test_settings_that_no_run_could_honour(settings: dict[str, Any], facts: str) -> None:
    with refused(ValueError, facts):
        method("plain", **settings)


def test_zeroth_order_takes_no_tiles() -> None:
    with refused(ValueError, "sequence_tile 512 auto"):
        method("mezo", sequence_tile=512)
