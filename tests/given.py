"""A decoder and its costs as plain values, for what needs no model: a gated block, and figures that
grow as real ones do. No torch; not a test: no oracle."""

from __future__ import annotations

from collections.abc import Callable

from blockwalk.plan.estimators import Estimator
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import DTYPE_BYTES
from blockwalk.plan.plan import Plan
from blockwalk.plan.work import Work
from blockwalk.program.costs import Costs, UnitCost
from blockwalk.program.program import Shape
from blockwalk.program.state_sizes import compute_dtype


def decoder(
    *,
    layers: int,
    hidden: int,
    wide: int,
    keys: int,
    vocab: int,
    tied: bool = True,
    lora_rank: int | None = None,
) -> ModelSpec:
    """A llama-like model in bfloat16; ``keys``: the width of its keys, ``wide``: of its
    feed-forward part. ``lora_rank`` adds adapters to every linear layer of a block and freezes the
    rest."""
    trained = lora_rank is None
    linears = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip

    def param(name: str, *shape: int) -> ParamSpec:
        return ParamSpec(f"model.{name}.weight", shape, "bfloat16", trained, len(shape) == 2)

    def block(i: int) -> UnitSpec:
        params = [param(f"layers.{i}.{name}", *shape) for name, shape in linears.items()]
        params += [
            param(f"layers.{i}.{name}_layernorm", hidden) for name in ("input", "post_attention")
        ]
        for name, (rows, columns) in linears.items() if lora_rank else ():
            for part, shape in (("A", (lora_rank, columns)), ("B", (rows, lora_rank))):
                params.append(
                    ParamSpec(f"model.layers.{i}.{name}.lora_{part}.weight", shape, "float32", True)
                )
        return UnitSpec(f"model.layers.{i}", "block", tuple(params))

    embedding = param("embed_tokens", vocab, hidden)
    head = (
        () if tied else (ParamSpec("lm_head.weight", (vocab, hidden), "bfloat16", trained, True),)
    )
    return ModelSpec(
        "given",
        UnitSpec("prologue", "prologue", (embedding,)),
        tuple(block(i) for i in range(layers)),
        UnitSpec("epilogue", "epilogue", (param("norm", hidden), *head)),
        hidden,
        vocab,
        "bfloat16",
        (("lm_head.weight", embedding.name),) if tied else (),
    )


def costs(model: ModelSpec) -> Callable[[Plan, Shape], Costs]:
    """Costs of its units: every product is counted, every byte is a multiple of the tokens' or of
    the trained parameters'."""

    def of(plan: Plan, shape: Shape) -> Costs:
        size = DTYPE_BYTES[compute_dtype(plan, model)]
        backprop = plan.estimator is Estimator.BACKPROP
        block = model.blocks[0]
        tokens = shape.tokens
        state = tokens * model.hidden_size * size
        wide = max(p.shape[0] for p in block.params) * tokens * size
        gradients = block.numel(trainable=True) * size
        products = 7 * sum({2 * tokens * p.numel for p in block.params if len(p.shape) == 2})
        attention = 4 * shape.batch * shape.sequence**2 * model.hidden_size
        once = Work(products, attention, 30 * 3 * state + 9 * 6 * state)
        twice = once * 2
        head = 2 * shape.batch * (shape.sequence - 1) * model.hidden_size * model.vocab_size
        at_loss = Work(head, touched=8 << 22)
        graph = 4 * wide + 9 * state
        units = {
            "prologue": UnitCost(state, gradients, state + 8 * tokens,
                                 forward=Work(touched=2 * state)),
            "block": UnitCost(3 * wide, graph + gradients, graph, once.flops, twice.flops, once,
                              twice, again=once),
            "epilogue": UnitCost(2 * state + (16 << 20), 3 * state + (48 << 20), 0, head, 2 * head,
                                 at_loss, Work()),
        }  # fmt: skip
        if not backprop:
            units = {
                kind: UnitCost(unit.forward_transient, 0, 0, unit.forward_flops, 0, unit.forward)
                for kind, unit in units.items()
            }
        return Costs(tuple(units.items()), 0 if backprop else 4 << 20)

    return of
