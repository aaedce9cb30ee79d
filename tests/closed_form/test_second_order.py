"""Oracles of calibrated packing: GPTQ's published step taken densely; the inputs of transformers'
own layers."""

import json
from pathlib import Path

import pytest
import torch

from blockwalk.cli.main import main
from blockwalk.data.corpus import sample
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.engine.calibrate import Calibrated
from blockwalk.engine.pack import pack
from blockwalk.engine.second_order import (
    DAMPING,
    TOWARDS,
    compensated,
    encode_fitted,
    encode_with_inputs,
    fitted,
)
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.matrix_codec import matrix_codec
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store.store import BlockStore
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.codecs import decode, encode
from tests.support.messages import refused


def gptq(weight_ND: torch.Tensor, gram_DD: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The values of a rounded matrix, float64: equations 2 and 3 of the paper, an inverse for each
    column (Frantar et al., 2023), on the scales that a search finds."""
    grid = matrix_codec(layout.codec).grid
    assert grid is not None
    order = gram_DD.diagonal().argsort(descending=True)
    scales = fitted(grid, weight_ND, gram_DD.diagonal(), layout)
    weight_ND = weight_ND.double()
    hessian_DD = gram_DD.double()
    hessian_DD += (
        DAMPING * hessian_DD.diagonal().mean() * torch.eye(len(order), dtype=torch.float64)
    )
    for i, column in enumerate(order.tolist()):
        later = order[i:]
        scale = scales[:, column // layout.group_size].unsqueeze(1)
        values = weight_ND[:, column].float().view(-1, 1, 1)
        value_N = grid.values(grid.nearest(values, scale), scale).double().flatten()
        inverse_KK = torch.linalg.inv(hessian_DD[later][:, later])
        error_N = (weight_ND[:, column] - value_N) / inverse_KK[0, 0]
        weight_ND[:, later] -= torch.outer(error_N, inverse_KK[0])
        weight_ND[:, column] = value_N
    return weight_ND.float()


@pytest.mark.parametrize(("codec", "size"), [(Codec.INT4, 32), (Codec.INT4, 64), (Codec.INT4A, 32)])
@pytest.mark.parametrize("columns", [176, 64, 24])
def test_the_published_step_and_the_error_of_the_outputs(
    codec: Codec, size: int, columns: int
) -> None:
    """Oracle: the dense reference, in float64 (a code may differ where float32 stands at a border);
    and the squared error of X W^T is at most half that of rounding to nearest."""
    torch.manual_seed(columns)
    x_TD = torch.randn(300, columns) @ (torch.randn(columns, columns) / columns**0.5) + torch.randn(
        columns
    )
    weight_ND = torch.randn(48, columns)
    gram_DD = x_TD.t() @ x_TD
    layout = Layout((48, columns), codec, group_size=size)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    encode_with_inputs(weight_ND, gram_DD, buffer, layout)
    found = torch.empty(48, columns)
    nearest = torch.empty(48, columns)
    decode(buffer, layout.shape, codec, found, group_size=size)
    expected = gptq(weight_ND, gram_DD, layout)
    same_N = (found - expected).abs().amax(1) < 1e-3 * weight_ND.abs().amax()
    assert same_N.float().mean() >= 0.8, same_N  # a row is another from its first border case on

    encode(weight_ND, codec, buffer, group_size=size)
    decode(buffer, layout.shape, codec, nearest, group_size=size)
    errors = [
        ((w_ND - weight_ND) @ x_TD.t()).square().sum().item() for w_ND in (found, nearest, expected)
    ]
    assert errors[0] <= 0.5 * errors[1]
    assert errors[0] == pytest.approx(errors[2], rel=0.05)


def test_scales_have_no_more_error_than_the_whole_range() -> None:
    """Oracle: the codec's own encoding of groups with an outlier each, of which a narrower range is
    better."""
    x_RD = torch.cat(
        [
            torch.full((4, 31), 0.1) + torch.randn(4, 31) * 0.02,
            torch.tensor([[0.5], [0.9], [0.3], [0.15]]),
        ],
        1,
    )
    layout = Layout((4, 32), Codec.INT4)
    grid = matrix_codec(Codec.INT4).grid
    assert grid is not None

    def error(scales: torch.Tensor) -> torch.Tensor:
        groups = x_RD.unsqueeze(1)
        return (grid.values(grid.nearest(groups, scales), scales) - groups).square().sum(2)

    found = error(fitted(grid, x_RD, torch.ones(32), layout))
    whole = error(grid.fit(x_RD.unsqueeze(1)))
    assert (found <= whole).all()
    assert (found < 0.9 * whole).any()


def test_a_matrix_makes_up_for_what_its_outputs_lack() -> None:
    """Oracle: torch's least squares in float64, the damping as rows of their own; without damping
    nothing is left that any other matrix could explain."""
    torch.manual_seed(0)
    own_TD = torch.randn(200, 24)
    weight_ND = torch.randn(16, 24)
    given_TD = own_TD + 0.3 * torch.randn(200, 24)
    lacking_TN = torch.randn(200, 16)
    gram_DD = given_TD.t() @ given_TD
    goal_TN = own_TD @ weight_ND.t() + lacking_TN
    found = compensated(weight_ND, gram_DD, (goal_TN - given_TD @ weight_ND.t()).t() @ given_TD)
    damping = (TOWARDS * gram_DD.diagonal().mean()).sqrt() * torch.eye(24)
    rows = (
        torch.cat([given_TD, damping]).double(),
        torch.cat([goal_TN, damping @ weight_ND.t()]).double(),
    )
    expected = torch.linalg.lstsq(*rows).solution.t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_are_rounded_to_nearest_on_fitted_scales() -> None:
    """Oracle: the codec's decoding: a row at a time or all at once, no more error than on the whole
    range, and each element the nearest of its group's sixteen values."""
    torch.manual_seed(0)
    weight_ND = torch.randn(40, 96)
    layout = Layout((40, 96), Codec.INT4)
    found = torch.empty(40, 96)
    nearest = torch.empty(40, 96)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    for start in (0, 30):
        encode_fitted(weight_ND[start : start + 30], buffer, layout, start)
    decode(buffer, layout.shape, Codec.INT4, found)
    values_NG16 = layout.scales(buffer).float().unsqueeze(2) * torch.arange(-8, 8)
    distances = (weight_ND.view(40, 3, 32, 1) - values_NG16.unsqueeze(2)).abs()
    assert torch.allclose((found - weight_ND).abs().view(40, 3, 32), distances.amin(3), atol=1e-6)
    encode(weight_ND, Codec.INT4, buffer)
    decode(buffer, layout.shape, Codec.INT4, nearest)
    assert (found - weight_ND).norm() < 0.97 * (nearest - weight_ND).norm()


def inputs_of(
    model: torch.nn.Module, modules: list[torch.nn.Module], ids: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What modules are given in a model's own forward, float32 [T, D]."""
    found: list[list[torch.Tensor]] = [[] for _ in modules]
    hooks = [m.register_forward_pre_hook(lambda _, x, to=to: to.append(x[0][0]))
             for m, to in zip(modules, found, strict=True)]  # fmt: skip
    with torch.no_grad():
        for each in ids:
            model(each.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_makes_up_for_what_is_rounded_before(tmp_path: Path, *, tied: bool) -> None:
    """Oracle: two of transformers' models, one as it came and one with all that is before a layer
    rounded: the layer's goal by float64's inverse, from what hooks say that both are given, and
    what has been added up in both."""
    from transformers import AutoModelForCausalLM

    tiny_model("llama", num_hidden_layers=2, tied=tied).save_pretrained(tmp_path / "model")
    own, made = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        for _ in range(2)
    )
    sequences = [torch.randint(3, own.config.vocab_size, (length,)) for length in (60, 24)]
    pack(tmp_path / "model", tmp_path / "store", Codec.INT4, sequences=sequences)
    store = BlockStore(tmp_path / "store")
    for end in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied):
        weight = own.get_parameter(end)
        layout = store.stored_as(end)
        plain = torch.empty(layout.nbytes, dtype=torch.uint8)
        encode_fitted(weight.detach(), plain, layout, 0)
        assert torch.equal(store.weights([end])[end].buffer, plain), "to nearest, on fitted scales"
    store.read_into("model.embed_tokens.weight", made.model.embed_tokens.weight.data)
    for number in range(2):
        layer = f"model.layers.{number}."
        for names, stream in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), None),
            (("self_attn.o_proj",), "input_layernorm"),
            (("mlp.gate_proj", "mlp.up_proj"), None),
            (("mlp.down_proj",), "post_attention_layernorm"),
        ):
            watched = [layer + names[0], layer + (stream or names[0])]
            (own_TK, own_TD), (made_TK, made_TD) = (
                inputs_of(model, [model.get_submodule(name) for name in watched], sequences)
                for model in (own, made)
            )
            gram_KK = made_TK.t() @ made_TK
            damped_KK = gram_KK.double() + TOWARDS * gram_KK.diagonal().mean() * torch.eye(
                len(gram_KK)
            )
            for name in names:
                weight = own.get_submodule(layer + name).weight.detach()
                at = f"{layer}{name}.weight"
                lacking_TN = (own_TK - made_TK) @ weight.t() + (own_TD - made_TD if stream else 0)
                goal = weight.double() + (lacking_TN.t() @ made_TK).double() @ torch.linalg.inv(
                    damped_KK
                )
                layout = store.stored_as(at)
                buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
                encode_with_inputs(goal.float(), gram_KK, buffer, layout)
                expected = decode(buffer, layout.shape, Codec.INT4, torch.empty(weight.shape))
                found = made.get_submodule(layer + name).weight.data
                store.read_into(at, found)
                assert (found == expected).float().mean() > 0.97, at
    assert not list(tmp_path.glob("tmp*")), "the hidden states' file is gone"


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"num_key_value_heads": 4}, ["mlp.down_proj", "self_attn.o_proj"]),
        ("opt", {}, ["fc2", "self_attn.out_proj"]),
        ("gemma2", {}, []),  # a norm follows before anything is added
        (
            "gpt_neox",
            {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
            [],
        ),  # side by side
    ],
)
def test_layers_whose_outputs_are_added(
    tmp_path: Path, kind: str, changes: dict[str, int], expected: list[str]
) -> None:
    """Closed form: the architectures as published. Nothing is told but the model."""
    tiny_model(kind, **{"num_hidden_layers": 2, **changes}).save_pretrained(tmp_path / "model")
    found: list[set[str]] = []
    calls = Calibrated._calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Calibrated, "_calls", lambda *given: [found.append((c := calls(*given))[1]), c][1]
        )
        pack(tmp_path / "model", tmp_path / "store", Codec.INT4, sequences=[torch.arange(3, 40)])
    assert len(found) == 2
    for names in found:
        assert (
            sorted(
                ".".join(name.split(".")[-3:-1]).removeprefix("0.").removeprefix("1.")
                for name in names
            )
            == expected
        )


def test_the_command_draws_records_and_packs(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the records' own texts, tokenised; the store that the function writes."""
    data = tmp_path / "records.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i} and ", "completion": "one"}) + "\n" for i in range(12))
    )
    tokenizer = load_tokenizer(tiny_run.model)
    drawn = {
        tokenizer.decode(ids, skip_special_tokens=True)
        for ids in sample(str(data), tokenizer, 8, 32)
    }
    assert len(drawn) == 8, "each record once"
    assert drawn < {f"{i} and one" for i in range(12)}
    assert [len(ids) for ids in sample(str(data), tokenizer, 2, 6)] == [6, 6]
    assert main(
        ["pack", str(tiny_run.model), str(tmp_path / "new" / "store"), "--calibrate", str(data)]
    ) in (0, None)
    pack(
        tiny_run.model,
        tmp_path / "same",
        Codec.INT4A,
        sequences=sample(str(data), tokenizer, 128, 512),
    )
    files = [sorted((tmp_path / name).glob("unit-*.bin")) for name in ("new/store", "same")]
    assert len(files[0]) == 5
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_a_codec_without_groups_is_refused(tmp_path: Path) -> None:
    """Closed form: one line, nothing written."""
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    with refused(ValueError, "--calibrate int4 int4a int8"):
        pack(tmp_path / "model", tmp_path / "store", Codec.INT8, sequences=[torch.arange(8)])
    assert not (tmp_path / "store").exists()
