"""Oracle: bytes and seconds of a step that is written down here, and the shape of an SVG."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from blockwalk.program.program import Lane

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="benchmarks are not installed")


def step(*spans: tuple[Lane, int, float, float]) -> Any:
    """Return a step of ops that send so many bytes from one second to another."""
    return SimpleNamespace(
        spans=[
            SimpleNamespace(
                op=SimpleNamespace(lane=lane, nbytes=nbytes),
                began=began,
                ended=ended,
                seconds=ended - began,
            )
            for lane, nbytes, began, ended in spans
        ]
    )


def test_the_load_of_a_link_is_what_is_sent_in_each_part_of_the_time() -> None:
    from benchmarks.paper_pictures import load

    simulation = step(
        (Lane.INTER, 30, 0.0, 3.0),
        (Lane.INTRA, 99, 0.0, 4.0),
        (Lane.INTER_SUMS, 8, 3.5, 4.0),
        (Lane.INTER, 0, 1.0, 1.0),
    )
    assert load(simulation, 4.0, bins=2) == pytest.approx([10.0, 9.0])
    assert sum(load(simulation, 6.0, bins=7)) * 6 / 7 == pytest.approx(38)


@pytest.mark.parametrize(("name", "curves"), [("fcdp_figure10.svg", 2), ("zo2_figure3.svg", 4)])
def test_a_kept_picture_has_a_curve_for_each_name(name: str, curves: int) -> None:
    root = ElementTree.parse(RESULTS / name).getroot()
    tags = [element.tag.rpartition("}")[2] for element in root]
    assert tags.count("polyline") == curves
    lines = [element for element in root if element.tag.endswith("polyline")]
    names = [element for element in root if element.get("fill", "none") != "none"]
    colours = {element.get("fill") for element in names}
    assert {element.get("stroke") for element in lines} <= colours


def test_memory_of_the_figure_falls_from_method_to_method() -> None:
    """The figure's ends, OPT-175B: AdamW holds 16-bit weights, 4 bytes of gradients and 8 of
    moments a parameter; ZO2 two blocks of 12 D² at the least, and less than the published 18 GB."""
    root = ElementTree.parse(RESULTS / "zo2_figure3.svg").getroot()
    ends = [
        float(element.get("points", "").split()[-1].partition(",")[2])
        for element in root
        if element.tag.endswith("polyline")
    ]
    assert ends == sorted(ends)  # an SVG's y grows downwards
    marks = {
        (element.text or "").replace(",", ""): float(element.get("y", "0")) - 4
        for element in root
        if element.get("text-anchor") == "end"
    }
    decade = marks["1"] - marks["10"]
    adamw, *_, zo2 = (10 ** ((marks["1"] - end) / decade) for end in ends)
    assert adamw == pytest.approx(175 * 14, rel=0.05)
    assert 2 * 12 * 12288**2 * 2 / 1e9 < zo2 < 18
