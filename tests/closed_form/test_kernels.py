"""Oracle: the CPU's operators, bit for bit, in Triton's interpreter; float64 for products; and, for
every kernel in every pair of its constants' values, the PTX of three GPUs: no fused multiply-add
where bits count, and every product, sum and division to nearest even.

Triton's interpreter must be chosen before triton is imported: these checks run in a process of
their own, one for all of them."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from itertools import combinations, product
from types import ModuleType
from typing import Any

import pytest
import torch

from blockwalk.numerics import advance
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.noise.key import NoiseKey, NoiseKind
from blockwalk.numerics.noise.noise import perturbed
from blockwalk.numerics.operators import sent
from blockwalk.numerics.updates import Rule
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.placement import Codec
from blockwalk.system.versions import is_older

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton (286 MB) is not installed: pip install triton"
)

KEY = NoiseKey(1, 2, 0, "w")
FORMATS = [
    ("fp8", 32),
    ("int8", 32),
    ("int4", 32),
    ("int4", 64),
    ("nf4", 64),
    ("int4a", 32),
    ("q4_0", 32),
]
KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")
Run = Callable[..., None]


def kernels() -> ModuleType:
    from blockwalk.numerics import kernels

    return kernels.loaded()


def process(interpret: str) -> Iterator[Run]:
    """A function that runs another in a process of its own, which chooses once between interpreter
    and compiler."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", interpret)
            pool.submit(int).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=300)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    yield from process("1")


@pytest.fixture(scope="module")
def compiled() -> Iterator[Run]:
    yield from process("0")


def encoded(
    codec: str, group: int, rows: int = 9, columns: int = 100
) -> tuple[Layout, torch.Tensor]:
    """A matrix with a row of zeros, a tiny one and a wide one; q4_0's blocks, which nobody writes,
    are any bytes."""
    columns = columns if codec != "q4_0" else 96
    layout = Layout((rows, columns), Codec(codec), group_size=group)
    generator = torch.Generator().manual_seed(3)
    if codec == "q4_0":
        blocks = torch.randint(0, 256, (rows, layout.groups, 18), generator=generator).to(
            torch.uint8
        )
        blocks[..., :2] = (
            torch.randn(rows, layout.groups, 1, generator=generator).half().view(torch.uint8)
        )
        return layout, blocks.reshape(-1)
    values = torch.randn(rows, columns, generator=generator)
    values[3], values[4], values[2, ::2] = 0, values[4] * 1e-6, values[2, ::2] * 1e-4
    return layout, codecs.encode_rows(
        values, torch.empty(layout.nbytes, dtype=torch.uint8), layout, 0
    )


def decodes(codec: str, group: int) -> None:
    layout, bytes_P = encoded(codec, group)
    decode = kernels().codecs.decode
    wide = layout.columns
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        want = codecs.decode_rows(
            bytes_P, layout, 2, 9, torch.empty(7, 60, dtype=dtype), columns=(17, 77)
        )
        got = torch.empty_like(want)
        decode(got, bytes_P, layout, None, 2, 17, None, 0, 0.0, None)
        assert torch.equal(got, want), dtype
    rows = torch.tensor([5, 0, 8])
    want = codecs.gather_rows(bytes_P, layout, rows, torch.empty(3, wide))
    decode(got := torch.empty_like(want), bytes_P, layout, rows, 0, 0, None, 0, 0.0, None)
    assert torch.equal(got, want)
    turned = Layout(layout.shape, layout.codec, group_size=group, order=torch.arange(8, -1, -1))
    decode(got := torch.empty(9, wide), bytes_P, turned, None, 0, 0, None, 0, 0.0, None)
    assert torch.equal(got, codecs.decode_rows(bytes_P, layout, 0, 9, torch.empty(9, wide)).flip(0))
    for kind in KINDS:
        values = codecs.decode_rows(bytes_P, layout, 2, 9, torch.empty(7, wide))
        want = perturbed(
            values,
            torch.empty(7, wide, dtype=torch.bfloat16),
            KEY,
            5 + 2 * wide,
            1e-2,
            kind,
            pitch=wide,
        )
        decode(got := torch.empty_like(want), bytes_P, layout, None, 2, 0, KEY, 5, 1e-2, kind)
        assert torch.equal(got, want), kind


@pytest.mark.parametrize(("codec", "group"), FORMATS)
def test_rows_are_decoded_and_perturbed_as_on_a_cpu(
    codec: str, group: int, interpreted: Run
) -> None:
    interpreted(decodes, codec, group)


def numbers(
    tensors: int, entries: int, queries: int, *, perturbs: bool
) -> tuple[list[int], list[float]]:
    words: list[int] = []
    factors: list[float] = []
    for n in range(tensors):
        for entry in range(entries):
            for query in range(queries + 1):
                words += sent(NoiseKey(1, entry, query, str(n)))
                factors.append(1e-2 * (query + entry) if query else 0.99)
        if perturbs:
            words += sent(NoiseKey(1, 9, 9, str(n)))
            factors.append(1e-3)
    return words, factors


def advances(name: str, rounding: bool, kind: NoiseKind) -> None:
    """Three tensors in a launch, three entries of two queries; then a perturbation of them: a
    tensor begins anywhere."""
    dtype = getattr(torch, name)
    starts = [0, 77, 512]
    own = [torch.randn(shape).to(dtype) for shape in ((7,), (33, 100), (2100,))]
    outs = [torch.empty_like(each, dtype=torch.float16) for each in own]
    words, factors = numbers(3, 3, 2, perturbs=False)
    expected = [each.clone() for each in own], [each.clone() for each in outs]
    advance._advance(None, expected[0], [], starts, words, factors, 3, 2, rounding, kind)
    kernels().updates.advance(own, [], starts, words, factors, 3, 2, rounding, kind)
    assert all(torch.equal(a, b) for a, b in zip(own, expected[0], strict=True))
    words, factors = numbers(3, 0, 0, perturbs=True)
    advance._advance(None, *expected, starts, words, factors, 0, 0, False, kind)
    kernels().updates.advance(own, outs, starts, words, factors, 0, 0, False, kind)
    assert all(
        torch.equal(a, b) for a, b in zip([*own, *outs], [*expected[0], *expected[1]], strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "rounding", "kind"),
    [("float32", False, "rademacher"), ("bfloat16", True, "gaussian"),
     ("float16", True, "rademacher"),
     ("float16", False, "gaussian")],
)  # fmt: skip
def test_pending_updates_of_a_block_and_a_perturbation_in_a_launch_each(
    dtype: str, rounding: bool, kind: NoiseKind, interpreted: Run
) -> None:
    interpreted(advances, dtype, rounding, kind)


def advances_rows(codec: str, rounding: bool, kind: NoiseKind) -> None:
    layout, bytes_P = encoded(codec, 32)
    expected_P, (words, factors) = bytes_P.clone(), numbers(1, 2, 2, perturbs=False)
    places = [(layout.scales(each), layout.codes(each)) for each in (bytes_P, expected_P)]
    advance._advance_rows(None, *places[1], codec, 40, words, factors, 2, 2, rounding, kind)
    kernels().updates.advance_rows(*places[0], 40, words, factors, 2, 2, rounding, kind)
    assert torch.equal(bytes_P, expected_P)


@pytest.mark.parametrize(
    ("codec", "rounding", "kind"),
    [
        ("fp8", True, "gaussian"),
        ("fp8", False, "rademacher"),
        ("int8", True, "rademacher"),
        ("int8", False, "gaussian"),
    ],
)
def test_rows_of_eight_bit_codes_are_updated_in_one_pass(
    codec: str, rounding: bool, kind: NoiseKind, interpreted: Run
) -> None:
    interpreted(advances_rows, codec, rounding, kind)


def e4m3() -> None:
    """All 256 codes, and the codes of all numbers between them and on their middles."""
    import triton
    import triton.language as tl

    @triton.jit
    def both(codes, values, x, found, COUNT: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
        every = tl.arange(0, COUNT)
        numbers = tl.arange(0, NUMBERS)
        tl.store(values + every, _e4m3(tl.load(codes + every).to(tl.uint32)))
        tl.store(found + numbers, _to_e4m3(tl.load(x + numbers)).to(tl.uint8))

    global _e4m3, _to_e4m3
    _e4m3 = kernels().codecs._e4m3
    _to_e4m3 = kernels().updates._to_e4m3
    codes = torch.arange(256).to(torch.uint8)
    exact = codes.view(torch.float8_e4m3fn).float()
    ascending = exact[:127]
    middles = (ascending[1:] + ascending[:-1]) / 2
    x = torch.cat([ascending, middles, middles * 1.0001, middles * 0.9999])
    x = torch.cat([x, -x, torch.zeros(1024 - 2 * len(x))])
    values = torch.empty(256)
    found = torch.empty(1024, dtype=torch.uint8)
    both[(1,)](codes, values, x, found, COUNT=256, NUMBERS=1024)
    assert torch.equal(values.nan_to_num(-1), exact.nan_to_num(-1))
    assert torch.equal(found, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_e4m3_by_integers_is_torch_s(interpreted: Run) -> None:
    interpreted(e4m3)


def adamw(name: str) -> None:
    """Each operation rounded by itself, as numpy does it; and torch's, which fuses some, to a few
    units in the last place."""
    rule = Rule(OptimizerSettings(name="adamw", weight_decay=0.1))
    lr = 1e-2
    step = 3
    (beta1, beta2), eps = rule.settings.betas, rule.settings.eps
    p = torch.randn(3001).to(getattr(torch, name))
    g = torch.randn(3001)
    m = torch.randn(3001)
    v = torch.rand(3001)
    theirs = [each.clone() for each in (p, m, v)]
    rule.apply_(theirs[0], g, {"exp_avg": theirs[1], "exp_avg_sq": theirs[2]}, step=step, lr=lr)
    root = (1 - beta2**step) ** 0.5
    rate = -(lr / (1 - beta1**step))
    given = torch.tensor([1 - lr * 0.1, 1 - beta1, beta2, 1 - beta2, root, eps, rate])
    decay, weight, kept, rest, root_, eps_, rate_ = given.numpy()
    own_m = m.numpy() + (g.numpy() - m.numpy()) * weight
    own_v = v.numpy() * kept + rest * g.numpy() * g.numpy()
    own_p = p.float().numpy() * decay + own_m * rate_ / ((own_v**0.5) / root_ + eps_)
    kernels().updates.adamw(p, g, m, v, given.tolist(), [])
    assert torch.equal(m, torch.from_numpy(own_m))
    assert torch.equal(v, torch.from_numpy(own_v))
    assert torch.equal(p, torch.from_numpy(own_p).to(p.dtype))
    for ours, its in zip((p, m, v), theirs, strict=True):
        torch.testing.assert_close(
            ours.float(), its.float(), rtol=1e-2 if ours.itemsize < 4 else 1e-6, atol=1e-6
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adamw_in_one_launch(dtype: str, interpreted: Run) -> None:
    interpreted(adamw, dtype)


def multiplies(codec: str, group: int) -> None:
    layout, bytes_P = encoded(codec, group, rows=40)
    whole = codecs.decode_rows(bytes_P, layout, 0, 40, torch.empty(layout.shape))
    for by_rows, n in ((True, 40), (False, layout.columns)):
        x = torch.randn(70, layout.columns if by_rows else 40)
        bias = torch.randn(n)
        kernels().products.product(
            x, bytes_P, layout, bias, out := torch.empty(70, n + 3)[:, :n], by_rows
        )
        exact = x.double() @ (whole.t() if by_rows else whole).double() + bias
        bound = (
            (x.abs().double() @ (whole.t() if by_rows else whole).abs().double() + bias.abs())
            * x.shape[1]
            * 2**-24
        )
        assert bool(((out - exact).abs() <= bound).all())


@pytest.mark.parametrize(("codec", "group"), FORMATS)
def test_a_matrix_decoded_inside_its_product(codec: str, group: int, interpreted: Run) -> None:
    """To the bound of a sum of so many terms in float32, forward and transposed."""
    interpreted(multiplies, codec, group)


# ---- the compiler's instructions -----------------------------------------------------------------

FLOAT32 = ("scale", "largest", "decay", "weight", "beta2", "rest2", "root", "eps", "rate")
POINTERS = {
    "cubics": "*fp32", "levels": "*fp32", "row_index": "*i64", "order": "*i64", "table": "*i64",
    "buffer": "*u8", "codes": "*u8", "scales": "*fp32", "grad": "*fp32", "first": "*fp32",
    "second": "*fp32",
}  # fmt: skip
GAUSS = {"COUNTERS": 128, "DRAWS": 16, "KIND": 1}
SIGNS = {"COUNTERS": 16, "DRAWS": 256, "KIND": 2}
PLAIN = {"COUNTERS": 128, "DRAWS": 16, "KIND": 0}
KERNELS = ("_write_kernel", "_draws_kernel", "_advance_kernel", "_advance_rows_kernel",
           "_adamw_kernel", "_decode_kernel", "_product_kernel")  # fmt: skip
PRODUCT = {"M": 64, "N": 128, "K": 64}


Variant = tuple[str, str, dict[str, Any], dict[str, str]]


def every_pair(choices: Iterable[Variant]) -> list[Variant]:
    """As few of the variants as come to have every pair of values, of two constants or types, that
    any of them has."""

    def pairs(variant: Variant) -> set[tuple[Any, ...]]:
        return set(combinations(sorted((variant[2] | variant[3]).items()), 2))

    left = list(choices)
    chosen = list[Variant]()
    missing = set().union(*map(pairs, left))
    while missing:
        chosen.append(max(left, key=lambda variant: len(pairs(variant) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def variants(of: str) -> list[Variant]:
    """Module, kernel, constants and the types of its pointers: what callers can ask of a kernel,
    each value beside each other's."""
    flags = (False, True)
    floats = ("fp32", "bf16", "fp16")
    noises = (GAUSS, SIGNS)
    launches = dict[str, list[Variant]]()

    def add(module: str, kernel: str, constants: dict[str, Any], types: dict[str, str]) -> None:
        launches.setdefault(kernel, []).append((module, kernel, constants, types))

    for noise, source, out, rows, rounds, aligned in product(
        noises, (None, *floats), floats, flags, flags, flags
    ):
        if not (rounds and (rows or out == "fp32" or source is None)):
            constants = {
                "HAS_SOURCE": source is not None,
                "HAS_ROWS": rows,
                "ROUNDING": rounds,
                "ALIGNED": aligned,
            }
            add(
                "noise",
                "_write_kernel",
                constants | noise,
                {"source": f"*{source or out}", "out": f"*{out}"},
            )
    for out, aligned in product(("bf16", "fp16"), flags):
        constants = {
            "HAS_SOURCE": True,
            "HAS_ROWS": False,
            "ROUNDING": True,
            "ALIGNED": aligned,
            **PLAIN,
        }
        add("noise", "_write_kernel", constants, {"source": "*fp32", "out": f"*{out}"})
    for out in ("*i32", "*u16"):
        add("noise", "_draws_kernel", {"COUNTERS": 128}, {"out": out})
    for noise, master, rounds, queries, many in product(noises, floats, flags, (1, 2), (1, 16)):
        if not (rounds and master == "fp32"):
            constants = {
                "MASTER": master,
                "OUT": master,
                "QUERIES": queries,
                "ROUNDING": rounds,
                "SEGMENTS": many,
            }
            add("updates", "_advance_kernel", {**constants, "PERTURBS": False, **noise}, {})
    for noise, master, out in product(noises, floats, floats):
        constants = {
            "MASTER": master,
            "OUT": out,
            "QUERIES": 0,
            "ROUNDING": False,
            "SEGMENTS": 16,
            "PERTURBS": True,
        }
        add("updates", "_advance_kernel", {**constants, **noise}, {})
    for noise, fp8, rounds, queries in product(noises, flags, flags, (1, 2)):
        constants = {"QUERIES": queries, "FP8": fp8, "ROUNDING": rounds}
        add("updates", "_advance_rows_kernel", constants | noise, {})
    for rounds, param in product(flags, floats):
        if not (rounds and param == "fp32"):
            add(
                "updates",
                "_adamw_kernel",
                {"ROUNDING": rounds, "SIZE": 1024},
                {"param": f"*{param}"},
            )
    for code, group, rows, order, noise, out in product(
        range(6), (32, 64), flags, flags, (*noises, PLAIN), floats
    ):
        constants = {
            "FORMAT": code,
            "GROUP": group,
            "HAS_ROWS": rows,
            "HAS_ORDER": order,
            "IN_PAIRS": False,
        }
        add("codecs", "_decode_kernel", constants | noise, {"out": f"*{out}"})
        if code in (2, 3, 4, 5) and noise is PLAIN:
            add(
                "codecs",
                "_decode_kernel",
                constants | noise | {"IN_PAIRS": True},
                {"out": f"*{out}"},
            )
    for code, group, by_rows, bias, x in product(range(6), (32, 64), flags, flags, floats):
        constants = {
            **PRODUCT,
            "FORMAT": code,
            "GROUP": group,
            "BY_ROWS": by_rows,
            "HAS_BIAS": bias,
        }
        add("products", "_product_kernel", constants, dict.fromkeys(("x", "out", "bias"), f"*{x}"))
    assert set(launches) == set(KERNELS)
    return every_pair(launches[of])


def options_of(module: str) -> dict[str, Any]:
    """Triton's options of the launches of a module's kernels."""
    rooms = kernels()
    return dict(
        rooms.products.PRODUCT_OPTIONS if module == "products" else rooms.noise.COMPILE_OPTIONS
    )


def compiled_for(
    variant: Variant, capability: int, *, integers: str = "i64", ones: Sequence[str] = ()
) -> Any:
    """A variant as Triton compiles it for a card.

    Args:
        capability: major and minor number, such as 89.
        integers: the type of whole numbers; those of type i32 are multiples of 16, as the sizes of
            real models are.
        ones: arguments whose value is 1, as Triton's launcher gives them: constants of the code.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, kernel, constants, types = variant
    function = getattr(getattr(kernels(), module), kernel)
    named = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
    values = {
        name: named.get(value, value) if isinstance(value, str) else value
        for name, value in constants.items()
    }
    values |= dict.fromkeys(ones, 1)
    pointers = {**POINTERS, **types}
    signature: dict[str, str] = {}
    for parameter in function.params:
        whole = "i64" if parameter.do_not_specialize else integers
        default = "fp32" if parameter.name in FLOAT32 else whole
        signature[parameter.name] = (
            "constexpr" if parameter.name in values else pointers.get(parameter.name, default)
        )
    constexprs = {(function.arg_names.index(name),): value for name, value in values.items()}
    multiples = [
        name
        for name, kind in signature.items()
        if integers == "i32" and (kind == "i32" or kind[0] == "*")
    ]
    attrs = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options_of(module)
    )


def ptx_of(
    module: str, kernel: str, constants: dict[str, Any], types: dict[str, str], capability: int
) -> str:
    return str(compiled_for((module, kernel, constants, types), capability).asm["ptx"])


def a_thread_a_counter() -> None:
    """Count threads on warps of 32 and on wavefronts of 64, for which the kernel is compiled with
    the launch's options."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    noise = kernels().noise
    default = (
        triton.compiler.compiler.make_backend(GPUTarget("cuda", 90, 32)).parse_options({}).num_warps
    )
    for width in (32, 64):
        noise._threads_together = lambda _, width=width: width
        options = noise.options(torch.device("cuda", 0))
        assert options.get("num_warps", default) * width == noise._COUNTERS[1]
    function = noise._draws_kernel
    signature = {
        "out": "*i32",
        "start": "i64",
        "count": "i32",
        "k0": "i64",
        "k1": "i64",
        "COUNTERS": "constexpr",
    }
    source = ASTSource(fn=function, signature=signature, constexprs={(5,): noise._COUNTERS[0]})
    done = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    assert (done.metadata.num_warps, done.metadata.warp_size) == (2, 64)


def test_noise_is_drawn_once_on_wide_wavefronts(compiled: Run) -> None:
    compiled(a_thread_a_counter)


SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes of shared memory that one program may have, by capability (CUDA C++ Programming Guide,
table of capabilities)."""


def fits_in_shared_memory(kernel: str, capability: int) -> None:
    for variant in variants(kernel):
        shared = compiled_for(variant, capability, integers="i32").metadata.shared
        assert shared <= SHARED_MEMORY[capability], (variant, shared)


def takes_a_one(kernel: str) -> None:
    variant = variants(kernel)[0]
    function = getattr(getattr(kernels(), variant[0]), kernel)
    pointers = {**POINTERS, **variant[3]}
    for parameter in function.params:
        whole = parameter.name not in {**variant[2], **pointers} and parameter.name not in FLOAT32
        if whole and not parameter.do_not_specialize:
            compiled_for(variant, 90, integers="i32", ones=[parameter.name])


def compiles(kernel: str, capability: int) -> None:
    for variant in variants(kernel):
        ptx = ptx_of(*variant, capability)
        found = re.findall(r"^\s+(?:@\S+\s+)?([a-z0-9_.:]+)\s", ptx, re.MULTILINE)
        if variant[0] == "products":
            assert any("mma" in name for name in found) or variant[3]["x"] == "*fp32", variant
            continue
        floating = [
            name for name in found if re.match(r"(mul|add|sub|div|sqrt|fma|mad)\..*f(32|16)", name)
        ]
        assert all(".rn" in name and not name.startswith("fma") for name in floating), (
            variant,
            set(floating),
        )
        computes = variant[1] != "_draws_kernel" and variant[2].get("KIND") != 0
        assert floating or not computes, variant


def loads_of_a_product(capability: int) -> None:
    """Count them. Eight warps share 64 · 128 elements in 4,096 bytes of codes, 16 a thread, which
    come in fours at least, 512 bytes of scales and 64 · 64 numbers of the input, 32 bytes a thread,
    which come in sixteens; nf4's levels are looked up."""
    for code, by_rows in product((2, 3, 4, 5), (False, True)):
        constants = {**PRODUCT, "FORMAT": code, "GROUP": 32, "BY_ROWS": by_rows, "HAS_BIAS": False}
        types = dict.fromkeys(("x", "out", "bias"), "*bf16")
        done = compiled_for(
            ("products", "_product_kernel", constants, types), capability, integers="i32"
        )
        loads = len(re.findall(r"\sld\.global", str(done.asm["ptx"])))
        levels = 32 if code == 3 else 0
        halves = (
            4 if code == 5 else 0
        )  # blocks of 18 bytes begin at even places: codes come in twos
        assert loads - levels <= 4 + halves + 2 * 2 + 2, (code, by_rows, loads)


@pytest.mark.parametrize("capability", [80, 90])
def test_a_product_loads_a_byte_once_and_a_scale_once_a_group(
    capability: int, compiled: Run
) -> None:
    compiled(loads_of_a_product, capability)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_variant_compiles_and_rounds_each_operation(
    kernel: str, capability: int, compiled: Run
) -> None:
    if (kernel, capability) == ("_product_kernel", 100) and is_older("triton", "3.7"):
        pytest.skip("Triton 3.6 does not compile this kernel for sm_100: its passes fail")
    compiled(compiles, kernel, capability)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_variant_fits_in_a_cards_shared_memory(
    kernel: str, capability: int, compiled: Run
) -> None:
    compiled(fits_in_shared_memory, kernel, capability)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_whole_number_may_be_one(kernel: str, compiled: Run) -> None:
    """Triton's launcher makes a constant of an argument whose value is 1: a matrix of one row, a
    batch of one token."""
    compiled(takes_a_one, kernel)
