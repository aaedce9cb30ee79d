"""Oracles: autograd through torch's own linear layer and attention, in float64 and unpadded; the
kernel's counters for memory; what torch dispatches.

Module: numerics/row_tiles.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from blockwalk.numerics import native_products, row_tiles
from blockwalk.numerics.row_tiles import NarrowProducts
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.walk.attention_flops import attention_flops
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model

ROWS = (1, 8, 9, 31, 63, 64, 65, 100, 511, 513, 700)


@pytest.fixture(params=["as this processor has it", "in 16 bits", "in float32"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose products are a kernel's of our own or as it is here, one with instructions
    for 16-bit products in a library, and one without."""
    if request.param == "in 16 bits":
        monkeypatch.setattr(native_products, "is_there", lambda: False)
    kinds: dict[str, Callable[[torch.dtype], torch.dtype]] = {
        "in 16 bits": lambda dtype: dtype,
        "in float32": lambda dtype: torch.promote_types(dtype, torch.float32),
    }
    if kind := kinds.get(request.param):
        monkeypatch.setattr(row_tiles, "multiplied_in", kind)


def _close(found: torch.Tensor, wanted: torch.Tensor, rounding: float = 2**-8) -> None:
    """Each element within a few roundings of the largest one."""
    error = (found.double() - wanted.double()).abs().max()
    assert error <= 2 * rounding * wanted.double().abs().max(), (float(error), tuple(wanted.shape))


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("columns", [8, 320])
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_those_of_the_whole_matrix(rows: int, columns: int) -> None:
    torch.manual_seed(rows)
    a_PI = torch.randn(rows, 384).bfloat16()
    b_IO = torch.randn(384, columns).bfloat16()
    exact_PO = a_PI.double() @ b_IO.double()
    _close(row_tiles.product(a_PI, b_IO), exact_PO)
    onto_PO = torch.randn(rows, columns).bfloat16()
    wanted_PO = onto_PO.double() + 0.5 * exact_PO
    row_tiles.add_product(onto_PO, a_PI, b_IO, 0.5)
    _close(onto_PO, wanted_PO)
    biased_PO = torch.empty_like(onto_PO)
    bias_O = torch.randn(columns).bfloat16()
    row_tiles.mm(a_PI, b_IO, biased_PO, bias_O)
    _close(biased_PO, exact_PO + bias_O.double())
    other_PO = torch.randn(rows, columns).bfloat16()
    _close(row_tiles.sum_of_outer(a_PI, other_PO), a_PI.double().t() @ other_PO.double())


def _laid(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers row by row, column by column, or as a part of a wider matrix."""
    if layout == "columns":
        return matrix.t().contiguous().t()
    wider = torch.full((matrix.shape[0] + 1, matrix.shape[1] + 3), float("nan"), dtype=matrix.dtype)
    part = wider[1:, 1:-2] if layout == "part" else wider[1:, :-3].clone()
    return part.copy_(matrix)


@pytest.mark.skipif(not native_products.is_there(), reason="no pairs of bfloat16 are added up here")
@pytest.mark.parametrize("of_b", ["rows", "columns", "part"])
@pytest.mark.parametrize("of_a", ["rows", "columns", "part"])
@pytest.mark.parametrize("sides", [(9, 1, 1), (13, 2, 33), (64, 35, 16), (300, 577, 70)])
def test_the_kernels_product(sides: tuple[int, int, int], of_a: str, of_b: str) -> None:
    """Oracle: float64; around each matrix there is nothing that may be read into a sum."""
    rows, inner, columns = sides
    torch.manual_seed(rows)
    a_PI = torch.randn(rows, inner).bfloat16()
    b_IO = torch.randn(inner, columns).bfloat16()
    bias_O = torch.randn(columns).bfloat16()
    out_PO = _laid(torch.zeros(rows, columns).bfloat16(), "part")
    laid = (_laid(a_PI, of_a), _laid(b_IO, of_b), out_PO)
    assert native_products.fits(*laid)
    exact_PO = a_PI.double() @ b_IO.double()
    native_products.product(*laid, bias_O)
    _close(out_PO, exact_PO + bias_O.double())
    native_products.product(*laid, alpha=0.5, adds=True)
    _close(out_PO, 1.5 * exact_PO + bias_O.double(), rounding=2**-7)
    thin = (torch.randn(rows, 5).bfloat16(), _laid(torch.randn(5, columns).bfloat16(), of_b))
    native_products.product(*laid, bias_O, thin=thin)
    _close(out_PO, exact_PO + thin[0].double() @ thin[1].double() + bias_O.double())
    assert out_PO._base is not None
    assert int(out_PO._base.isnan().sum()) == out_PO._base.numel() - out_PO.numel()


@pytest.mark.skipif(not native_products.is_there(), reason="no pairs of bfloat16 are added up here")
def test_a_row_has_its_bits_whatever_lies_beside_it() -> None:
    """Oracle: the same rows and columns alone, by one thread."""
    torch.manual_seed(0)
    a_PI = torch.randn(600, 200).bfloat16()
    b_IO = torch.randn(200, 130).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole_PO = row_tiles.product(a_PI, b_IO)
        torch.set_num_threads(1)
        for top, bottom, left, right in ((0, 9, 0, 130), (37, 411, 5, 50), (590, 600, 129, 130)):
            part_PO = row_tiles.product(a_PI[top:bottom], b_IO[:, left:right])
            assert torch.equal(part_PO, whole_PO[top:bottom, left:right])
    finally:
        torch.set_num_threads(threads)


def test_what_the_kernel_does_not_make_is_left_to_torch() -> None:
    """Oracle: the cases, by their definition."""
    a_PI = torch.randn(32, 16).bfloat16()
    b_IO = torch.randn(16, 24).bfloat16()
    out_PO = torch.empty(32, 24).bfloat16()
    assert not native_products.fits(a_PI.half(), b_IO.half(), out_PO.half())
    assert not native_products.fits(a_PI[:8], b_IO, out_PO[:8])
    assert not native_products.fits(a_PI, b_IO, out_PO.t().contiguous().t())
    assert not native_products.fits(a_PI.to("meta"), b_IO.to("meta"), out_PO.to("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_numbers_keep_their_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a_PI, b_IO, c_PO = (torch.randn(shape, dtype=dtype) for shape in ((77, 40), (40, 24), (77, 24)))
    assert torch.equal(row_tiles.product(a_PI, b_IO), a_PI @ b_IO)
    assert torch.equal(row_tiles.sum_of_outer(a_PI, c_PO), a_PI.t() @ c_PO)
    with NarrowProducts():
        assert torch.equal(
            F.linear(a_PI, c_PO.t().contiguous()[:, :40]),
            F.linear(a_PI, c_PO.t().contiguous()[:, :40]),
        )


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("rows", [5, 66, 600])
def test_a_linear_layer_has_the_gradients_of_float64(rows: int) -> None:
    torch.manual_seed(rows)
    shapes = ((2, rows, 300), (288, 300), (288,))
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    grad = torch.randn(2, rows, 288).bfloat16()
    narrow = [each.clone().requires_grad_() for each in given]
    wide = [each.double().requires_grad_() for each in given]
    with NarrowProducts():
        F.linear(*narrow).backward(grad)
    F.linear(*wide).backward(grad.double())
    for found, wanted in zip(narrow, wide, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        _close(found.grad, wanted.grad)


def _padded(length: int) -> torch.Tensor:
    """A causal mask [2, 1, S, S] whose second row ends in padding."""
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, length, length).clone()
    mask[1, :, :, length - 3 :] = False
    return mask


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("length", [9, 64, 70, 600])
@pytest.mark.parametrize("mask", ["causal", "boolean", "additive", "one row"])
def test_attention_of_a_filled_up_sequence_is_that_of_the_sequence(length: int, mask: str) -> None:
    torch.manual_seed(length)
    masks: dict[str, Callable[[], torch.Tensor]] = {
        "boolean": lambda: _padded(length),
        "additive": lambda: (
            torch.zeros(2, 1, length, length)
            .masked_fill_(~_padded(length), float("-inf"))
            .bfloat16()
        ),
        "one row": lambda: torch.arange(length).lt(length - 3).expand(2, 1, 1, length),
    }
    settings = {"is_causal": True} if mask == "causal" else {"attn_mask": masks[mask]()}
    given = [torch.randn(2, heads, length, 16).bfloat16() for heads in (4, 2, 2)]
    grad = torch.randn(2, 4, length, 16).bfloat16()
    ours, theirs = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    with NarrowProducts():
        found = F.scaled_dot_product_attention(*ours, **settings, enable_gqa=True)
    wanted = F.scaled_dot_product_attention(*theirs, **settings, enable_gqa=True)
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    _close(found, wanted)
    found.backward(grad)
    wanted.backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        _close(mine.grad, other.grad, 2**-7)


GROWTH = """
import ctypes, gc, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import blockwalk
torch.set_num_threads(1)
config = LlamaConfig(hidden_size=128, intermediate_size=320, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, vocab_size=512)
method, lora = sys.argv[1], blockwalk.LoraSettings(rank=8) if sys.argv[1] != "mezo" else None
walker = blockwalk.Walker(LlamaForCausalLM(config).bfloat16(), blockwalk.method(method), lora=lora)
def private():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
def steps(lengths):
    for length in lengths:
        ids = torch.arange(2 * length).view(2, length) % 512
        walker.step({"input_ids": ids, "labels": ids.where(ids % 5 > 0, -100)})
steps([*range(64, 520, 64), 40, 37, 33, 21])
before = private()
steps(range(15, 509, 19))
print(private() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_new_lengths_of_a_16_bit_model_take_no_memory(method: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, method], capture_output=True, text=True, check=True
    )
    # In MB, over 26 lengths: 180 (mebp), 190 (plain) and 60 (mezo) of untiled products.
    grown = float(done.stdout.split()[-1])
    assert grown < 12, f"{grown} MB"


SHAPES = """
import ctypes
import torch
import blockwalk.numerics.row_tiles
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
libc = ctypes.CDLL(None)
fields = [(name, ctypes.c_size_t) for name in names]
libc.mallinfo2.restype = type("Info", (ctypes.Structure,), {"_fields_": fields})
a, b, out = (torch.ones(shape).bfloat16() for shape in ((700, 320), (320, 192), (700, 192)))
torch.mm(a[:32], b, out=out[:32])
before = libc.mallinfo2().uordblks
for rows in range(60, 700, 20):
    torch.mm(a[:rows], b, out=out[:rows])
print((libc.mallinfo2().uordblks - before) / 32e6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc's allocator")
def test_a_shape_is_kept_once() -> None:
    """Oracle: the C allocator's own count. With a second copy in torch's cache a shape takes 0.6
    MB."""
    done = subprocess.run(
        [sys.executable, "-c", SHAPES], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.45, f"{done.stdout.strip()} MB for each shape"


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("trains", ["input", "weight"])
def test_a_linear_layer_keeps_what_its_gradients_read(trains: str) -> None:
    """Closed form: dL/dx reads the weight alone, dL/dW the input alone."""
    x_PI = torch.randn(40, 96).bfloat16()
    weight_OI = torch.randn(64, 96).bfloat16()
    (x_PI if trains == "input" else weight_OI).requires_grad_()
    kept: list[torch.Size] = []
    with (
        NarrowProducts(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.shape), lambda _: None
        ),
    ):
        F.linear(x_PI, weight_OI)
    assert kept == [weight_OI.shape if trains == "input" else x_PI.shape]


class Products(TorchDispatchMode):
    """The dtypes of whatever is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        multiplies = packet in flop_registry or packet is torch.ops.aten.addmm_
        if multiplies or attention_flops(func, args, kwargs or {}) is not None:
            self.dtypes |= {each.dtype for each in args if isinstance(each, torch.Tensor)} - {
                torch.bool
            }
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        ("plain", torch.bfloat16),
        ("mebp", torch.bfloat16),
        ("mezo", torch.bfloat16),
        ("mezo", torch.float16),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "gpt2"])
def test_nothing_is_multiplied_in_numbers_that_the_processor_does_not_multiply(
    kind: str, row: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused and plain attention, experts, layers that keep their weight as [in, out], adapters and
    losses."""
    monkeypatch.setattr(
        row_tiles, "multiplied_in", lambda of: torch.promote_types(of, torch.float32)
    )
    lora = None if row == "mezo" else LoraSettings(rank=4)
    walker = Walker(tiny_model(kind).to(dtype), method(row), lora=lora)
    with Products() as products:
        walker.step(random_batch())
    assert products.dtypes == {torch.float32}
