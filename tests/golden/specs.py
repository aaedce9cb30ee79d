"""Three models as the walk sees them, without torch: a Llama with adapters, a tied OPT, a mixture
of experts. Not a test: ``test_programs.py`` holds them against the cut of real ``transformers``
models of these shapes."""

from __future__ import annotations

from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec

HIDDEN = 64
VOCABULARY = 1000
BLOCKS = 2


def llama(layers: int = BLOCKS, rank: int = 4) -> ModelSpec:
    """An untied Llama in bfloat16 with a LoRA of ``rank`` on its query and value projections; rank
    0 trains everything."""
    linears = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (176, HIDDEN),
        "mlp.up_proj": (176, HIDDEN),
        "mlp.down_proj": (HIDDEN, 176),
    }

    def param(name: str, shape: tuple[int, ...]) -> ParamSpec:
        return ParamSpec(name, shape, "bfloat16", trainable=not rank, quantizable=len(shape) > 1)

    def block(i: int) -> UnitSpec:
        prefix = f"model.layers.{i}"
        params = []
        for name, (rows, columns) in linears.items():
            params.append(param(f"{prefix}.{name}.weight", (rows, columns)))
            if rank and name.endswith(("q_proj", "v_proj")):
                params.append(
                    ParamSpec(f"{prefix}.{name}.lora_A.weight", (rank, columns), "float32", True)
                )
                params.append(
                    ParamSpec(f"{prefix}.{name}.lora_B.weight", (rows, rank), "float32", True)
                )
        norms = [
            param(f"{prefix}.{name}_layernorm.weight", (HIDDEN,))
            for name in ("input", "post_attention")
        ]
        return UnitSpec(prefix, "LlamaDecoderLayer", (*params, *norms))

    return ModelSpec(
        "llama",
        UnitSpec(
            "prologue", "prologue", (param("model.embed_tokens.weight", (VOCABULARY, HIDDEN)),)
        ),
        tuple(map(block, range(layers))),
        UnitSpec(
            "epilogue",
            "epilogue",
            (param("model.norm.weight", (HIDDEN,)), param("lm_head.weight", (VOCABULARY, HIDDEN))),
        ),
        HIDDEN,
        VOCABULARY,
        dtype="bfloat16",
    )


def opt(layers: int = BLOCKS) -> ModelSpec:
    """A tied OPT in float16 whose every parameter is trained."""

    def param(name: str, shape: tuple[int, ...]) -> ParamSpec:
        return ParamSpec(name, shape, "float16", trainable=True, quantizable=len(shape) > 1)

    def linear(name: str, rows: int, columns: int) -> tuple[ParamSpec, ParamSpec]:
        return param(f"{name}.weight", (rows, columns)), param(f"{name}.bias", (rows,))

    def norm(name: str) -> tuple[ParamSpec, ParamSpec]:
        return param(f"{name}.weight", (HIDDEN,)), param(f"{name}.bias", (HIDDEN,))

    def block(i: int) -> UnitSpec:
        prefix = f"model.decoder.layers.{i}"
        attention = [
            linear(f"{prefix}.self_attn.{name}_proj", HIDDEN, HIDDEN)
            for name in ("k", "v", "q", "out")
        ]
        rest = (
            norm(f"{prefix}.self_attn_layer_norm"),
            linear(f"{prefix}.fc1", 4 * HIDDEN, HIDDEN),
            linear(f"{prefix}.fc2", HIDDEN, 4 * HIDDEN),
            norm(f"{prefix}.final_layer_norm"),
        )
        return UnitSpec(
            prefix, "OPTDecoderLayer", tuple(p for pair in (*attention, *rest) for p in pair)
        )

    return ModelSpec(
        "opt",
        UnitSpec(
            "prologue",
            "prologue",
            (
                param("model.decoder.embed_tokens.weight", (VOCABULARY, HIDDEN)),
                param("model.decoder.embed_positions.weight", (130, HIDDEN)),
            ),
        ),
        tuple(map(block, range(layers))),
        UnitSpec("epilogue", "epilogue", norm("model.decoder.final_layer_norm")),
        HIDDEN,
        VOCABULARY,
        dtype="float16",
        tied=(("lm_head.weight", "model.decoder.embed_tokens.weight"),),
    )


def mixtral(layers: int = BLOCKS, experts: int = 4) -> ModelSpec:
    """A mixture of experts in bfloat16, its experts stored one by one, of which the attention's
    norms are trained."""

    def param(name: str, shape: tuple[int, ...], *, assembled: bool = False) -> ParamSpec:
        trainable = name.endswith("layernorm.weight")
        matrix = len(shape) > 1 and not name.endswith("gate.weight")  # a router is no linear layer
        return ParamSpec(
            name, shape, "bfloat16", trainable, quantizable=matrix, assembled=assembled
        )

    def block(i: int) -> UnitSpec:
        prefix = f"model.layers.{i}"
        sides = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2, "o": HIDDEN}
        return UnitSpec(
            prefix,
            "MixtralDecoderLayer",
            (
                *(
                    param(f"{prefix}.self_attn.{name}_proj.weight", (rows, HIDDEN))
                    for name, rows in sides.items()
                ),
                param(f"{prefix}.mlp.gate.weight", (experts, HIDDEN)),
                param(
                    f"{prefix}.mlp.experts.gate_up_proj", (experts, 2 * 48, HIDDEN), assembled=True
                ),
                param(f"{prefix}.mlp.experts.down_proj", (experts, HIDDEN, 48), assembled=True),
                param(f"{prefix}.input_layernorm.weight", (HIDDEN,)),
                param(f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)),
            ),
        )

    return ModelSpec(
        "mixtral",
        UnitSpec(
            "prologue", "prologue", (param("model.embed_tokens.weight", (VOCABULARY, HIDDEN)),)
        ),
        tuple(map(block, range(layers))),
        UnitSpec(
            "epilogue",
            "epilogue",
            (param("model.norm.weight", (HIDDEN,)), param("lm_head.weight", (VOCABULARY, HIDDEN))),
        ),
        HIDDEN,
        VOCABULARY,
        dtype="bfloat16",
    )


MODELS = {"llama": llama(), "opt": opt(), "mixtral": mixtral()}
