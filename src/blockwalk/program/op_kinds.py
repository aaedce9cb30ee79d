"""The table of kinds of op: each an action on one unit. A program is a list of such ops; the
estimator or the home of a plan answers them."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.table import RowName, Table


@dataclass(frozen=True, slots=True)
class OpFacts:
    """One kind of op, as programs and the simulator know it."""

    help: str = ""
    doing: str = "computing the rest"
    """The words for the time in which a processor is busy with it."""
    noun: str = ""
    """The word for its bytes on a link; empty: its name."""
    draws: bool = False
    """True where it goes through the trainables of all units with one draw of noise for each
    element, which takes its time."""


OP_KINDS: Table[OpFacts] = Table(
    "op",
    {
        "FETCH": OpFacts(
            help=(
                "A unit's state is brought from its tier into a slot (on a CPU with mapped "
                "files: its pages are made resident)."
            )
        ),
        "GATHER": OpFacts(
            help=(
                "A slice is completed over a group of ranks: in a slot, or where it lies "
                "(*refreshed*)."
            )
        ),
        "CACHE": OpFacts(help="A gathered slice is kept for the backward walk."),
        "PROLOGUE": OpFacts(),
        "ARGUMENTS": OpFacts(
            help=(
                "The arguments of a stage's blocks are made from a batch alone, by a prologue "
                "on zeros."
            )
        ),
        "SEND": OpFacts(
            help=(
                "A value that a stage has made for its neighbour leaves: the hidden state after "
                "a unit (part activation), or the gradient of it (part gradient)."
            )
        ),
        "RECV": OpFacts(help="A value that a neighbour's SEND has sent arrives; the two meet."),
        "FORWARD": OpFacts(doing="computing forwards"),
        "SAVE": OpFacts(
            help=(
                "A block's input, the activation checkpoint, is written to its tier; or, on a "
                "CPU, what a block's graph holds in file maps goes to the disk as far as memory "
                "is short."
            )
        ),
        "LOAD": OpFacts(
            help=(
                "An activation checkpoint, or what a kept graph holds in file maps, is brought "
                "back."
            )
        ),
        "LOSS": OpFacts(
            doing="computing the loss",
            help=(
                "The epilogue: final norm, head and loss, with the gradient of its input where "
                "the estimator needs one."
            ),
        ),
        "BACKWARD": OpFacts(
            doing="computing backwards",
            help=(
                "A block is recomputed with its graph, unless the graph was kept, and "
                "differentiated."
            ),
        ),
        "PROLOGUE_BACKWARD": OpFacts(),
        "REDUCE": OpFacts(noun="reduction", help="Gradients are summed over a group of ranks."),
        "NORM": OpFacts(
            help=(
                "The norm of all gradients is taken, which a clipped step's updates are scaled by."
            )
        ),
        "TOTAL": OpFacts(help="First order: the losses of all ranks are added up."),
        "CHECK": OpFacts(
            help=(
                "First order: the losses of all ranks are added up, and the step is refused "
                "where it or a gradient is not finite."
            )
        ),
        "EXCHANGE": OpFacts(
            help=(
                "Zeroth order: the losses of all ranks' forwards become the step's entry of the "
                "ledger."
            )
        ),
        "UPDATE": OpFacts(doing="updating"),
        "STORE": OpFacts(noun="write-back", help="A unit's state is written back to its tier."),
        "EVICT": OpFacts(help="A slot or a unit's pages are given back."),
    },
)
"""Kinds of op by name."""


class OpKind(RowName):
    """The kind of an op."""

    table = OP_KINDS
    facts: OpFacts
