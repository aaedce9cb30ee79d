"""GGUF files with every metadata key that changes a model's numbers: what llama.cpp computes, and
what Blockwalk does.

    python benchmarks/gguf_metadata.py [PART OF A NAME ...]

A row is a random model of an architecture, written with some keys or tensors more. Where Blockwalk
reads the file, the distribution of the next token after 20 and 40 tokens is compared with
llama.cpp's (package xllamacpp): the largest difference of a log-probability. Where it refuses the
file, the row says with which words; llama.cpp is not asked then. The exit code is 1 where a
difference is above 0.01, or a row is read that should be refused, or the other way round."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.support import gguf_files, llama_cpp

LIMIT = 0.01
RANDOM = torch.Generator().manual_seed(3)
IDS = torch.randint(2, 100, (40,), generator=RANDOM).tolist()
LENGTHS = (20, 40)


@dataclass(frozen=True)
class Case:
    """A file: its architecture, further metadata and tensors, and the words of its refusal, or ""
    where it is read."""

    name: str
    family: str
    keys: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    vectors: dict[str, Any] = field(default_factory=dict)


def scaling(kind: str, **values: Any) -> dict[str, Any]:
    return {
        "rope.scaling.type": kind,
        **{f"rope.scaling.{key}": value for key, value in values.items()},
    }


def ramp(last: float, count: int) -> list[float]:
    return torch.linspace(1.0, last, count).tolist()


_FAMILIES = (
    "llama",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "starcoder2",
    "gemma2",
    "gemma3_text",
)
_WINDOW = {"attention.sliding_window": 16}
_YARN = scaling("yarn", factor=4.0, original_context_length=16)
_LONG = {"rope_factors_short.weight": ramp(2.0, 8), "rope_factors_long.weight": ramp(9.0, 8)}
_LLAMA3 = [1.0, 1.0, 1.2, 2.0, 4.0, 8.0, 8.0, 8.0]
_GEMMA = {"gemma2": _WINDOW, "gemma3_text": _WINDOW}


def cases() -> list[Case]:
    """Every row of the table."""
    rows = []
    for family in _FAMILIES:
        window = _GEMMA.get(family, {})
        gemma = {"tied": True, "spread": 0.2} if window else {}
        rows += [
            Case(f"{family}", family, window, changes=gemma),
            Case(
                f"{family}, linear × 4",
                family,
                window | scaling("linear", factor=4.0),
                changes=gemma,
            ),
            Case(
                f"{family}, factor alone",
                family,
                window | {"rope.scaling.factor": 4.0},
                changes=gemma,
            ),
            Case(
                f"{family}, the older name",
                family,
                window | {"rope.scale_linear": 4.0},
                changes=gemma,
            ),
            Case(
                f"{family}, type none",
                family,
                window | scaling("none", factor=4.0),
                "rope.scaling.type" if family == "gemma2" else "",
                changes=gemma,
            ),
            Case(
                f"{family}, attn_factor",
                family,
                window | {"rope.scaling.attn_factor": 1.3},
                changes=gemma,
            ),
            Case(
                f"{family}, linear and attn_factor",
                family,
                window | scaling("linear", factor=4.0, attn_factor=1.3),
                changes=gemma,
            ),
            Case(
                f"{family}, yarn × 4",
                family,
                window | _YARN,
                "read neither in phi3" if family == "phi3" else "",
                changes=gemma,
            ),
            Case(
                f"{family}, yarn and attn_factor",
                family,
                window | _YARN | {"rope.scaling.attn_factor": 1.3},
                "read neither in phi3" if family == "phi3" else "",
                changes=gemma,
            ),
            Case(
                f"{family}, yarn, length of the context",
                family,
                window | scaling("yarn", factor=4.0),
                "read neither in phi3" if family == "phi3" else "",
                changes=gemma,
            ),
            Case(
                f"{family}, yarn_beta_fast",
                family,
                window | _YARN | {"rope.scaling.yarn_beta_fast": 2.0},
                "rope.scaling",
                changes=gemma,
            ),
            Case(
                f"{family}, yarn_log_multiplier",
                family,
                window | _YARN | {"rope.scaling.yarn_log_multiplier": 0.5},
                "rope.scaling",
                changes=gemma,
            ),
            Case(f"{family}, base", family, window | {"rope.freq_base": 500.0}, changes=gemma),
            Case(f"{family}, no base", family, window | {"rope.freq_base": None}, changes=gemma),
            Case(
                f"{family}, logit_scale",
                family,
                window | {"logit_scale": 0.5},
                "logit_scale",
                changes=gemma,
            ),
            Case(
                f"{family}, residual_scale",
                family,
                window | {"residual_scale": 0.5},
                "residual_scale",
                changes=gemma,
            ),
            Case(
                f"{family}, embedding_scale",
                family,
                window | {"embedding_scale": 2.0},
                "embedding_scale",
                changes=gemma,
            ),
            Case(
                f"{family}, attention.scale",
                family,
                window | {"attention.scale": 0.5},
                "attention.scale",
                changes=gemma,
            ),
            Case(
                f"{family}, clamp_kqv",
                family,
                window | {"attention.clamp_kqv": 0.5},
                "attention.clamp_kqv",
                changes=gemma,
            ),
            Case(
                f"{family}, alibi",
                family,
                window | {"attention.max_alibi_bias": 8.0},
                "max_alibi_bias",
                changes=gemma,
            ),
            Case(
                f"{family}, sees later tokens",
                family,
                window | {"attention.causal": False},
                "attention.causal",
                changes=gemma,
            ),
            Case(
                f"{family}, an unknown key",
                family,
                window | {"attention.of_tomorrow": 3},
                "attention.of_tomorrow",
                changes=gemma,
            ),
            Case(
                f"{family}, width of values",
                family,
                window | {"attention.value_length": 8},
                "attention.value_length",
                changes=gemma,
            ),
            Case(
                f"{family}, heads by block",
                family,
                window | {"attention.head_count": [4, 2]},
                "every block",
                changes=gemma,
            ),
            Case(
                f"{family}, head output bias",
                family,
                window,
                "output.bias",
                changes=gemma,
                vectors={"output.bias": ramp(1, 128)},
            ),
            Case(
                f"{family}, no context length",
                family,
                window | {"context_length": None},
                "context_length",
                changes=gemma,
            ),
        ]
        if family not in ("llama", "mixtral"):
            vectors = {"rope_freqs.weight": ramp(4.0, 8)}
            rows.append(
                Case(f"{family}, rope_freqs", family, window, "rope_freqs.weight", gemma, vectors)
            )
        if family not in ("phi3",):
            rows.append(
                Case(
                    f"{family}, half a head turned",
                    family,
                    window | {"rope.dimension_count": 8},
                    "dimension_count",
                    gemma,
                )
            )
        if not window and family != "phi3":
            rows += [
                Case(f"{family}, window", family, _WINDOW, "attention.sliding_window"),
                Case(f"{family}, window of the context", family, {"attention.sliding_window": 64}),
            ]
    for family in ("llama", "mixtral"):
        wide = {"head_dim": 32}
        rows += [
            Case(
                f"{family}, rope_freqs of one's own",
                family,
                vectors={"rope_freqs.weight": ramp(4.0, 8)},
            ),
            Case(
                f"{family}, rope_freqs as Llama 3", family, vectors={"rope_freqs.weight": _LLAMA3}
            ),
            Case(
                f"{family}, rope_freqs and linear",
                family,
                scaling("linear", factor=2.0),
                vectors={"rope_freqs.weight": _LLAMA3},
            ),
            Case(
                f"{family}, rope_freqs and yarn",
                family,
                _YARN,
                "frequency factors",
                vectors={"rope_freqs.weight": _LLAMA3},
            ),
            Case(
                f"{family}, longrope, short",
                family,
                scaling("longrope", original_context_length=256, attn_factor=1.2),
                vectors=_LONG,
            ),
            Case(
                f"{family}, longrope and a factor",
                family,
                scaling("longrope", original_context_length=256, factor=2.0),
                vectors=_LONG,
            ),
            Case(
                f"{family}, long factors without longrope",
                family,
                {},
                "rope_factors",
                vectors=_LONG,
            ),
            Case(f"{family}, heads wider than even", family, changes=wide),
            Case(
                f"{family}, factors of another width",
                family,
                {},
                "positive numbers",
                vectors={"rope_freqs.weight": ramp(4.0, 7)},
            ),
        ]
    rows += [
        Case("llama, biases of attention", "llama", changes={"attention_bias": True}),
        Case("llama, biases of the MLP", "llama", changes={"mlp_bias": True}),
        Case("llama, both biases", "llama", changes={"attention_bias": True, "mlp_bias": True}),
        Case("llama, tied", "llama", changes={"tied": True}),
        Case(
            "llama, as many keys as heads",
            "llama",
            {"attention.head_count_kv": None},
            changes={"num_key_value_heads": 4},
        ),
        Case("llama, epsilon", "llama", {"attention.layer_norm_rms_epsilon": 0.3}),
        Case("starcoder2, epsilon", "starcoder2", {"attention.layer_norm_epsilon": 0.3}),
        Case("starcoder2, untied", "starcoder2", changes={"tied": False}),
        Case("phi3, half a head turned", "phi3", {"rope.dimension_count": 8}, changes={}),
        Case(
            "phi3, short factors",
            "phi3",
            {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.2},
            vectors=_LONG,
        ),
        Case(
            "phi3, long factors",
            "phi3",
            {"rope.scaling.original_context_length": 16},
            vectors=_LONG,
        ),
        Case(
            "phi3, factors of half a head",
            "phi3",
            {"rope.dimension_count": 8, "rope.scaling.original_context_length": 256},
            vectors={name: values[:4] for name, values in _LONG.items()},
        ),
        Case(
            "phi3, short factors alone",
            "phi3",
            {},
            "rope_factors_short",
            vectors={"rope_factors_short.weight": ramp(2.0, 8)},
        ),
        Case("phi3, window (llama.cpp leaves it out)", "phi3", _WINDOW),
        Case(
            "gemma2, softcaps",
            "gemma2",
            _WINDOW | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3},
            changes={"tied": True},
        ),
        Case("gemma2, the window of default", "gemma2", changes={"tied": True}),
        Case(
            "gemma2, blocks as 27B",
            "gemma2",
            _WINDOW,
            changes={"tied": True, "num_hidden_layers": 46, "head_dim": 32, "spread": 0.06},
        ),
        Case(
            "gemma2, 42 blocks",
            "gemma2",
            _WINDOW,
            changes={"tied": True, "num_hidden_layers": 42, "head_dim": 32, "spread": 0.06},
        ),
        Case(
            "gemma2, pattern of 3",
            "gemma2",
            _WINDOW | {"attention.sliding_window_pattern": 3},
            "sliding_window_pattern",
            {"tied": True},
        ),
        Case(
            "gemma3, blocks as 27B",
            "gemma3_text",
            _WINDOW,
            changes={"tied": True, "num_hidden_layers": 62, "head_dim": 32, "spread": 0.06},
        ),
        Case(
            "gemma3, linear × 8, six blocks",
            "gemma3_text",
            _WINDOW | scaling("linear", factor=8.0),
            changes={"tied": True, "num_hidden_layers": 6},
        ),
        Case(
            "gemma3, yarn, six blocks",
            "gemma3_text",
            _WINDOW | _YARN | {"rope.scaling.attn_factor": 1.3},
            changes={"tied": True, "num_hidden_layers": 6},
        ),
        Case(
            "gemma3, no window, six blocks",
            "gemma3_text",
            scaling("linear", factor=8.0),
            changes={"tied": True, "num_hidden_layers": 6},
        ),
        Case(
            "gemma3, softcap",
            "gemma3_text",
            _WINDOW | {"final_logit_softcapping": 0.3},
            changes={"tied": True},
        ),
        Case(
            "gemma3, softcap without window",
            "gemma3_text",
            {"final_logit_softcapping": 0.3},
            changes={"tied": True},
        ),
        Case(
            "gemma3, softcap of attention",
            "gemma3_text",
            _WINDOW | {"attn_logit_softcapping": 0.3},
            "attn_logit",
            {"tied": True},
        ),
        Case(
            "gemma3, base of windows",
            "gemma3_text",
            _WINDOW | {"rope.freq_base_swa": 300.0},
            changes={"tied": True, "num_hidden_layers": 6},
        ),
        Case(
            "gemma2, base of windows",
            "gemma2",
            _WINDOW | {"rope.freq_base_swa": 300.0},
            "freq_base_swa",
            changes={"tied": True},
        ),
        Case(
            "gemma3, pattern of 2",
            "gemma3_text",
            _WINDOW | {"attention.sliding_window_pattern": 2},
            changes={"tied": True, "num_hidden_layers": 4},
        ),
        Case(
            "gemma3, pattern by block",
            "gemma3_text",
            _WINDOW | {"attention.sliding_window_pattern": [True, False, False, True]},
            changes={"tied": True, "num_hidden_layers": 4},
        ),
        Case(
            "qwen3_moe, weights not normed",
            "qwen3_moe",
            {"expert_weights_norm": False},
            "expert_weights_norm",
        ),
        Case(
            "qwen3_moe, scale of weights",
            "qwen3_moe",
            {"expert_weights_scale": 2.0},
            "expert_weights_scale",
        ),
        Case(
            "qwen3_moe, sigmoid gates", "qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func"
        ),
        Case("qwen2_moe, one expert used", "qwen2_moe", {"expert_used_count": 1}),
        Case(
            "qwen2_moe, weights normed",
            "qwen2_moe",
            {"expert_weights_norm": True},
            "expert_weights_norm",
        ),
        Case("mixtral, one expert used", "mixtral", {"expert_used_count": 1}),
        Case(
            "qwen3_moe, dense first block",
            "qwen3_moe",
            {"leading_dense_block_count": 1},
            "leading_dense_block_count",
        ),
    ]
    return rows


def difference(path: Path) -> float:
    """The largest difference of a log-probability between llama.cpp and Blockwalk on a file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.models.model_source import model_source
    from blockwalk.tiers.model_folder.folder import CheckpointFolder

    os.environ["BLOCKWALK_CACHE"] = str(path.parent / "cache")
    source = CheckpointFolder(path, build_skeleton(path))
    config = AutoConfig.from_pretrained(model_source(path).weights_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        state = model.state_dict(keep_vars=True)
        for name in source.names():
            source.read_into(name, state[name].data)
        source.close()
        ask = llama_cpp.serve(path)
        worst = 0.0
        for length in LENGTHS:
            log_probabilities = model(torch.tensor([IDS[:length]])).logits[0, -1].log_softmax(-1)
            of_llama_cpp = llama_cpp.log_probabilities(ask, IDS[:length], len(log_probabilities))
            worst = max(
                worst, float((log_probabilities - of_llama_cpp).abs().nan_to_num(torch.inf).max())
            )
    return worst


def run(case: Case, folder: Path) -> tuple[bool, str]:
    """Whether a row is as it should be, and what it says."""
    model = gguf_files.tiny(case.family, **{"spread": 0.3, **case.changes})
    path = gguf_files.write(folder / "tiny.gguf", model, "F32", vectors=case.vectors, **case.keys)
    try:
        worst = difference(path)
    except ValueError as error:
        text = str(error).replace(str(path), "FILE")
        return bool(case.refusal) and case.refusal in text, f"refused: {text}"
    except RuntimeError as error:
        return False, f"llama.cpp: {error}"
    return not case.refusal and worst < LIMIT, f"{worst:.5f}"


def main(words: list[str]) -> int:
    failed = 0
    for case in cases():
        if words and not any(word in case.name for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            passed, text = run(case, Path(folder))
        failed += not passed
        print(f"{'ok' if passed else 'FAILS':6}{case.name:46} {text}", flush=True)
    print(f"{failed} rows fail")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
