"""Oracles of calibrated packing: GPTQ's published step taken densely; the inputs of transformers' own layers."""

import json
from pathlib import Path

import pytest
import torch

from blockwalk.cli.main import main
from blockwalk.data.corpus import sample
from blockwalk.data.encode import load_tokenizer
from blockwalk.engine.pack import pack
from blockwalk.engine.second_order import DAMPING, encode_with_inputs, fitted
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.matrix_codec import matrix_codec
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store.store import BlockStore
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.codecs import decode, encode


def gptq(weight_ND: torch.Tensor, gram_DD: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The values of a rounded matrix, float64: equations 2 and 3 of the paper, an inverse for each column (Frantar et al.,
    2023), on the scales that a search finds."""
    grid = matrix_codec(layout.codec).grid
    assert grid is not None
    order = gram_DD.diagonal().argsort(descending=True)
    scales = fitted(grid, weight_ND, gram_DD.diagonal(), layout)
    weight_ND, hessian_DD = weight_ND.double(), gram_DD.double()
    hessian_DD += DAMPING * hessian_DD.diagonal().mean() * torch.eye(len(order), dtype=torch.float64)
    for i, column in enumerate(order.tolist()):
        later = order[i:]
        scale, values = scales[:, column // layout.group_size].unsqueeze(1), weight_ND[:, column].float().view(-1, 1, 1)
        value_N = grid.values(grid.nearest(values, scale), scale).double().flatten()
        inverse_KK = torch.linalg.inv(hessian_DD[later][:, later])
        error_N = (weight_ND[:, column] - value_N) / inverse_KK[0, 0]
        weight_ND[:, later] -= torch.outer(error_N, inverse_KK[0])
        weight_ND[:, column] = value_N
    return weight_ND.float()


@pytest.mark.parametrize(("codec", "size"), [(Codec.INT4, 32), (Codec.INT4, 64), (Codec.INT4A, 32)])
@pytest.mark.parametrize("columns", [176, 64, 24])
def test_the_published_step_and_the_error_of_the_outputs(codec: Codec, size: int, columns: int) -> None:
    """Oracle: the dense reference, in float64 (a code may differ where float32 stands at a border); and the squared error of
    X W^T is at most half that of rounding to nearest."""
    torch.manual_seed(columns)
    x_TD = torch.randn(300, columns) @ (torch.randn(columns, columns) / columns**0.5) + torch.randn(columns)
    weight_ND, gram_DD = torch.randn(48, columns), x_TD.t() @ x_TD
    layout = Layout((48, columns), codec, group_size=size)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    encode_with_inputs(weight_ND, gram_DD, buffer, layout)
    found, nearest = torch.empty(48, columns), torch.empty(48, columns)
    decode(buffer, layout.shape, codec, found, group_size=size)
    expected = gptq(weight_ND, gram_DD, layout)
    same_N = (found - expected).abs().amax(1) < 1e-3 * weight_ND.abs().amax()
    assert same_N.float().mean() >= 0.8, same_N  # a row is another from its first border case on

    encode(weight_ND, codec, buffer, group_size=size)
    decode(buffer, layout.shape, codec, nearest, group_size=size)
    errors = [((w_ND - weight_ND) @ x_TD.t()).square().sum().item() for w_ND in (found, nearest, expected)]
    assert errors[0] <= 0.5 * errors[1]
    assert errors[0] == pytest.approx(errors[2], rel=0.05)


def test_scales_have_no_more_error_than_the_whole_range() -> None:
    """Oracle: the codec's own encoding of groups with an outlier each, of which a narrower range is better."""
    x_RD = torch.cat(
        [torch.full((4, 31), 0.1) + torch.randn(4, 31) * 0.02, torch.tensor([[0.5], [0.9], [0.3], [0.15]])], 1
    )
    layout, grid = Layout((4, 32), Codec.INT4), matrix_codec(Codec.INT4).grid
    assert grid is not None

    def error(scales: torch.Tensor) -> torch.Tensor:
        groups = x_RD.unsqueeze(1)
        return (grid.values(grid.nearest(groups, scales), scales) - groups).square().sum(2)

    found = error(fitted(grid, x_RD, torch.ones(32), layout))
    whole = error(grid.fit(x_RD.unsqueeze(1)))
    assert (found <= whole).all()
    assert (found < 0.9 * whole).any()


def test_a_packed_model_is_rounded_block_by_block(tmp_path: Path) -> None:
    """Oracle: transformers' model with the blocks before it already rounded, whose layers' inputs are summed up by hooks."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", num_hidden_layers=2).eval()
    model.save_pretrained(tmp_path / "model")
    sequences = [torch.randint(3, model.config.vocab_size, (length,)) for length in (40, 24)]
    pack(tmp_path / "model", tmp_path / "store", Codec.INT4, sequences=sequences)
    store = BlockStore(tmp_path / "store")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    embedding = "model.embed_tokens.weight"
    with torch.no_grad():
        plain = torch.empty(store.stored_as(embedding).nbytes, dtype=torch.uint8)
        encode(model.get_parameter(embedding), Codec.INT4, plain)
        assert torch.equal(store.weights([embedding])[embedding].buffer, plain), "an embedding is rounded to nearest"
        for layer in model.model.layers:
            linears = {module: name for name, module in model.named_modules() if module in set(layer.modules())
                       and isinstance(module, torch.nn.Linear)}  # fmt: skip
            inputs = {module: [] for module in linears}
            hooks = [m.register_forward_pre_hook(lambda m, x, of=inputs: of[m].append(x[0][0])) for m in linears]
            for ids in sequences:
                model(ids.unsqueeze(0))
            for hook in hooks:
                hook.remove()
            assert len(linears) == 7
            for module, name in linears.items():
                x_TD = torch.cat(inputs[module])
                layout = store.stored_as(f"{name}.weight")
                buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
                encode_with_inputs(module.weight, x_TD.t() @ x_TD, buffer, layout)
                found = torch.empty(module.weight.shape)
                store.read_into(f"{name}.weight", found)
                expected = decode(buffer, layout.shape, Codec.INT4, torch.empty(module.weight.shape))
                assert (found == expected).float().mean() > 0.97, name
                module.weight.copy_(found)
    assert not list(tmp_path.glob("tmp*")), "the hidden states' file is gone"


def test_the_command_draws_records_and_packs(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the records' own texts, tokenised; the store that the function writes."""
    data = tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i} and ", "completion": "one"}) + "\n" for i in range(12)))
    tokenizer = load_tokenizer(tiny_run.model)
    drawn = {tokenizer.decode(ids, skip_special_tokens=True) for ids in sample(str(data), tokenizer, 8, 32)}
    assert len(drawn) == 8, "each record once"
    assert drawn < {f"{i} and one" for i in range(12)}
    assert [len(ids) for ids in sample(str(data), tokenizer, 2, 6)] == [6, 6]
    assert main(["pack", str(tiny_run.model), str(tmp_path / "new" / "store"), "--calibrate", str(data)]) in (0, None)
    pack(tiny_run.model, tmp_path / "same", Codec.INT4A, sequences=sample(str(data), tokenizer, 128, 512))
    files = [sorted((tmp_path / name).glob("unit-*.bin")) for name in ("new/store", "same")]
    assert len(files[0]) == 5
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_a_codec_without_groups_is_refused(tmp_path: Path) -> None:
    """Closed form: one line, nothing written."""
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="--calibrate rounds to int4 and int4a, not to int8"):
        pack(tmp_path / "model", tmp_path / "store", Codec.INT8, sequences=[torch.arange(8)])
    assert not (tmp_path / "store").exists()
