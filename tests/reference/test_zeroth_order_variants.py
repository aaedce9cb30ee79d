"""Oracle: whole-model loops written out here: scales of codes alone, and forwards rounded
stochastically by numpy's words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockwalk import method
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.noise import numpy_words
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import fill_
from blockwalk.numerics.row_tiles import NarrowProducts
from blockwalk.plan.placement import Codec
from blockwalk.reference.mezo import own_loss, trainables
from blockwalk.reference.zeroth_order import masters_of
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.codecs import decode, encode
from tests.support.messages import refused
from tests.support.tier_runs import assert_equal, run
from tests.support.zeroth_order_runs import assert_same, trained

SEED = 7
RATE = 1e-3
EPSILON = 1e-3


def loss_with(model: nn.Module, values: dict[str, torch.Tensor], batch: Any) -> float:
    for name, parameter in trainables(model):
        parameter.data.copy_(values[name])
    model.eval()
    with torch.no_grad(), NarrowProducts():
        return float(own_loss(model, batch))


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.NF4])
@pytest.mark.parametrize(("noise", "most"), [("gaussian", 0.0), ("rademacher", 0.2)])
def test_scales_are_trained_alone(codec: Codec, noise: Any, most: float, tmp_path: Path) -> None:
    """Losses, g, which may be clipped, and decoded weights, bit for bit; codes and vectors stay."""
    model = tiny_model("opt", tied=True)
    control = copy.deepcopy(model)
    weights = masters_of(model)
    layouts = {name: Layout(tuple(w.shape), codec) for name, w in weights.items() if w.dim() == 2}
    coded = {
        name: encode(weights[name], codec, torch.empty(each.nbytes, dtype=torch.uint8))
        for name, each in layouts.items()
    }
    codes = {name: layouts[name].codes(each).clone() for name, each in coded.items()}

    def decoded(moved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = dict(weights)
        for name, layout in layouts.items():
            changed_P = coded[name].clone()
            layout.scales(changed_P).copy_(moved[name])
            out[name] = decode(changed_P, layout.shape, codec, torch.empty(layout.shape))
        return out

    zo = {"target": "scales", "epsilon": EPSILON / 10, "noise": noise}
    settings = {"update": {"rounding": "nearest"}, "seed": SEED, "optimizer.max_grad_norm": most}
    plan = method(
        "mezo",
        loss="model",
        trainable=f"device × {codec}",
        zo=zo,
        **settings,
        **{"optimizer.learning_rate": RATE / 100},
    )
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(1, 4):
            found = walker.step(random_batch(seed=step))
            losses = []
            scales = {name: layout.scales(coded[name]) for name, layout in layouts.items()}
            z = {
                name: fill_(torch.empty(s.shape), NoiseKey(SEED, step, 0, name), kind=noise)
                for name, s in scales.items()
            }
            for sign in (1, -1):
                factor = torch.tensor(sign * EPSILON / 10)
                moved = decoded({name: s.float() + factor * z[name] for name, s in scales.items()})
                losses.append(loss_with(control, moved, random_batch(seed=step)))
            g = (losses[0] - losses[1]) / (2 * EPSILON / 10)
            assert not most or abs(g) > most
            g = max(-most, min(g, most)) if most else g
            assert (found.loss, found.projected_grad) == (losses[0], g)
            for name, s in scales.items():
                s.copy_(s.float() + torch.tensor(-RATE / 100 * g) * z[name])
        assert_same(
            trained(walker),
            decoded({name: layout.scales(coded[name]) for name, layout in layouts.items()}),
        )
    assert all(torch.equal(layouts[name].codes(coded[name]), each) for name, each in codes.items())


def test_forwards_are_rounded_by_one_draw(tmp_path: Path) -> None:
    """Losses and g, bit for bit: the same draws for both sides, and masters in float32 that are
    never rounded."""
    model = tiny_model("opt", tied=True)
    control = copy.deepcopy(model).to(torch.bfloat16)
    masters = masters_of(model)
    plan = method(
        "mezo", loss="model", compute_dtype="bfloat16", zo={"rounding": "stochastic"}, seed=SEED
    )
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(1, 4):
            found = walker.step(random_batch(seed=step))
            losses = []
            for sign in (1, -1):
                rounded = {}
                for name, master in masters.items():
                    z = fill_(torch.empty_like(master), NoiseKey(SEED, step, 0, name))
                    moved = master + torch.tensor(sign * EPSILON) * z
                    key = NoiseKey(SEED, step, 0, name, "forward")
                    words = numpy_words.draws(key.philox_key(), 0, moved.numel())
                    bits = numpy_words.round_bfloat16(moved.flatten().numpy(), words).view("int16")
                    rounded[name] = torch.from_numpy(bits).view(torch.bfloat16).view(master.shape)
                losses.append(loss_with(control, rounded, random_batch(seed=step)))
            g = (losses[0] - losses[1]) / (2 * EPSILON)
            assert (found.loss, found.projected_grad) == (losses[0], g)
            for name, master in masters.items():
                z = fill_(torch.empty_like(master), NoiseKey(SEED, step, 0, name))
                master += torch.tensor(-plan.optimizer.learning_rate * g) * z
        assert_same(trained(walker), masters)


VARIANTS: dict[str, dict[str, Any]] = {
    "scales, int4": {"codec": "int4", "zo": {"target": "scales", "queries": 2, "epsilon": 1e-4}},
    "scales, fp8": {
        "codec": "fp8",
        "zo": {"target": "scales", "noise": "rademacher", "epsilon": 1e-5},
    },
    "stochastic": {
        "codec": "fp32",
        "zo": {"rounding": "stochastic", "kind": "fzoo", "queries": 2},
        "compute_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants_on_every_tier(variant: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the same run with everything resident."""
    settings = dict(variant)
    model = tiny_model("llama", tied=True)
    codec, settings["optimizer"] = settings.pop("codec"), {"learning_rate": 1e-5}
    expected = run("mezo", model, tmp_path / "mezo", trainable=f"device × {codec}", **settings)
    for tier, flush_every in (("host", 1), ("disk", 4)):
        placed = {"trainable": f"{tier} × {codec}", "update": {"flush_every": flush_every}}
        assert_equal(run("zo2", model, tmp_path / tier, **placed, **settings), expected)


def test_stochastic_rounding_moves_weights_in_expectation() -> None:
    """Closed form: of weights at 1 in bfloat16, eps of 1e-3 moves some hundredth if rounded to
    nearest, and the mean of z·(what a weight moved by) is eps under stochastic rounding."""
    from blockwalk.engine.bucket_tensors import BucketTensor
    from blockwalk.estimators.zeroth_order.draws import Elementwise
    from blockwalk.estimators.zeroth_order.perturbed_weight import PerturbedWeight
    from blockwalk.numerics.scratch import ScratchArena

    ones = torch.ones(256, 256)
    key = NoiseKey(1, 2, 0, "w")
    layout = Layout((256, 256), Codec.BF16)
    master = BucketTensor(
        layout, encode(ones, Codec.BF16, torch.empty(layout.nbytes, dtype=torch.uint8))
    )
    z = fill_(torch.empty(256, 256), key)
    moved = []
    for rounding in (None, NoiseKey(1, 2, 0, "w", "forward")):
        made = PerturbedWeight(
            master,
            Elementwise(key, "gaussian"),
            EPSILON,
            torch.bfloat16,
            ScratchArena(),
            rounding=rounding,
        )
        moved.append(made.whole().float() - 1)
    assert (moved[0] != 0).float().mean() < 0.05
    assert float((moved[1] * z).mean()) == pytest.approx(EPSILON, rel=0.1)
    assert float((moved[0] * z).mean()) < 0.6 * EPSILON


@pytest.mark.parametrize(("settings", "told"), [
    ({"zo": {"target": "scales"}}, "int8 fp8 int4 nf4"),
    ({"zo": {"target": "scales", "noise": "lowrank"}, "trainable": "device × int4"},
     "gaussian rademacher"),
    ({"zo": {"target": "scales"}, "trainable": "device × int4a"}, "scale"),
])  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], told: str) -> None:
    with refused(ValueError, told):
        method("mezo", **settings)
