"""Oracle: descriptions written here, with one thing wrong or with round figures; psutil for the
memory of this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from blockwalk.plan.placement import Codec
from blockwalk.plan.words import duration
from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import Link
from blockwalk.system.card import Card, facts_of
from tests.support.messages import refused

pytestmark = pytest.mark.fast

WHOLE = "device_bytes: 8GB\nflops: {float32: 1e12}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE + "device: tpu", "device tpu cuda cpu"),
        (WHOLE + "device_bytes: 0", "device_bytes 0"),
        (WHOLE + "nodes: 0", "nodes 0"),
        ("device_bytes: 8GB", "flops {}"),
        ("device_bytes: 8GB\nflops: {float32: -1}", "flops float32 -1.0"),
        (WHOLE + "host_byte: 1GB", "host_byte host_bytes"),
        (WHOLE + "flops: 1e12", "flops mapping"),
        (WHOLE + "disk_bytes: plenty", "plenty"),
        ("- a\n- list", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_a_description_with_one_thing_wrong_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "machine.yaml").write_text(text)
    with refused(ValueError, message):
        hardware.load(tmp_path / "machine.yaml")


def test_a_description_is_read_with_its_units(tmp_path: Path) -> None:
    """Closed form: sizes with units, numbers that YAML 1.1 takes for text, a link without
    latency."""
    text = "op_seconds: 1e-3\nhost_bytes: 2GiB\ninter: {bandwidth: 1e9}\nnodes: 3\n"
    (tmp_path / "machine.yaml").write_text(
        WHOLE + text + "devices_per_node: 4\npeak_flops: {bfloat16: 3e12}"
    )
    found = hardware.load(tmp_path / "machine.yaml")
    assert (found.name, found.device_bytes, found.host_bytes) == ("machine", 8 * 10**9, 2**31)
    assert (found.op_seconds, found.inter, found.world) == (1e-3, Link(1e9), 12)
    assert (found.flops_of("float32"), found.flops_of("bfloat16")) == (1e12, 1e12), (
        "as fast as float32"
    )
    assert (found.peak_of("float32"), found.peak_of("bfloat16")) == (1e12, 3e12), (
        "reached, where nothing is promised"
    )
    assert dataclasses.replace(found, flops={"bfloat16": 5e11}).flops_of("float16") == 5e11


def test_a_link_takes_alpha_and_beta_and_nothing_takes_no_time() -> None:
    assert Link(100.0, 0.5).seconds(200) == 2.5
    assert Link(100.0, 0.5).seconds(0) == 0.0


def test_this_machine_is_what_doctor_wrote_for_its_device_else_the_memory_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(ValueError, "doctor"):
        hardware.load("here")
    host = psutil.virtual_memory().total
    rough = hardware.of_this_machine()
    assert (rough.name, rough.device, rough.host_bytes) == (hardware.UNMEASURED, "cpu", host)
    assert rough.device_bytes == host, "a processor's memory is the host's"
    measured = dataclasses.replace(
        hardware.load("laptop"), name="hardware", memory_bandwidth=12.5e9
    )
    hardware.save(measured, hardware.HERE)
    assert hardware.of_this_machine() == hardware.load("here") == measured
    other = hardware.of_this_machine("cuda")
    assert (other.name, other.device) == (hardware.UNMEASURED, "cuda"), (
        "doctor has described a processor alone"
    )
    assert other.device_bytes == hardware.load("rtx-4090").device_bytes


FACTS: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * 10**9, "capability": [9, 0],
    "copy_up": 5.5e10, "copy_down": 5.2e10, "copy_both": 9e10, "launch_us": 4.0, "operator_us": 6.0,
    "noise_per_s": 2.5e11, "norm_bytes_per_s": 2e12, "loss_s": 0.1,
    "decode_rate": {"int4a": 4e11, "nf4": 2e11}, "fused_crossing_rows": {"int4a": 96},
}  # fmt: skip


def test_a_card_is_described_by_its_own_name_and_its_memory_by_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the names that NVIDIA's and AMD's drivers give."""
    monkeypatch.chdir(tmp_path)
    for name, shipped in {
        "NVIDIA H100 80GB HBM3": "h100-80gb", "NVIDIA H200": "h200", "NVIDIA H20": "h20-96gb-x4",
        "NVIDIA L40S": "l40s", "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA GeForce RTX 3060": "rtx-3060", "AMD Instinct MI300X": "mi300x",
        "NVIDIA GeForce RTX 4090": "rtx-4090", "NVIDIA GeForce RTX 3060 Ti": "rtx-3060",
        "Tesla T4": "t4", "NVIDIA GeForce RTX 4060": "rtx-4060", "Quadro T1000": "rtx-4090",
    }.items():  # fmt: skip
        found = hardware.of_this_machine("cuda", Card(name, 33 * 10**9))
        assert (found.name, found.device_bytes, found.measured) == (
            hardware.UNMEASURED,
            33 * 10**9,
            False,
        ), name
        assert found.world == 1, name
        assert found.decode_rate == hardware.load(shipped).decode_rate, name
        assert found.peak_flops == hardware.load(shipped).peak_flops, name
    assert (
        hardware.of_this_machine("cpu", Card("NVIDIA H200", 1)).device_bytes
        == psutil.virtual_memory().total
    )


def test_measured_figures_of_a_card_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form: the figures of the file in the description's units, and everything else as it
    was."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "gpu-facts-h100.json"
    file.write_text(json.dumps(FACTS))
    rough = hardware.load("h100-80gb")
    found = hardware.load(file)
    assert found.measured
    assert not rough.measured
    assert (found.name, found.device_bytes, found.noise_rate) == (FACTS["name"], 85 * 10**9, 2.5e11)
    assert (found.host_to_device, found.device_to_host) == (Link(5.5e10, 2e-5), Link(5.2e10, 2e-5))
    assert found.op_seconds == pytest.approx(60 * 6e-6)
    rates = [found.decodes(codec) for codec in (Codec.INT4A, Codec.NF4, Codec.INT8)]
    assert rates == [4e11, 2e11, rough.decode_rate]
    assert (found.flops, found.memory_bandwidth, found.disk_read) == (
        rough.flops,
        rough.memory_bandwidth,
        rough.disk_read,
    )
    here = hardware.of_this_machine("cuda", Card(FACTS["name"], 80 * 10**9))
    assert (here.name, here.noise_rate, here.host_bytes) == (
        FACTS["name"],
        2.5e11,
        psutil.virtual_memory().total,
    )
    other = hardware.of_this_machine("cuda", Card("NVIDIA H200", 80 * 10**9))
    assert other.name == hardware.UNMEASURED, "the figures are another card's"
    source = "measured by blockwalk doctor"
    measured = dataclasses.replace(
        rough, name="hardware", card="", device_bytes=7 * 10**9, source=source
    )
    hardware.save(measured, hardware.HERE)
    assert hardware.load("here") == hardware.of_this_machine(
        "cuda", Card(FACTS["name"], 80 * 10**9)
    )
    assert hardware.load("here").noise_rate == 2.5e11
    assert hardware.load("here").device_bytes == 7 * 10**9, "doctor knows what others leave"
    again = tmp_path / "again.yaml"
    hardware.save(hardware.load("here"), again)
    assert dataclasses.replace(hardware.load(again), name=FACTS["name"]) == hardware.load("here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "card"),
        ({"name": None}, "card"),
        ({"copy_up": -1}, "copy_up -1"),
        ({"noise_per_s": float("nan")}, "noise_per_s nan"),
        ({"noise_per_s": True}, "noise_per_s True"),
        ({"memory_bytes": "80GB"}, "memory_bytes 80GB"),
        ({"decode_rate": 4e11}, "decode_rate mapping codec"),
        ({"decode_rate": {"int4a": "fast"}}, "decode_rate.int4a fast"),
    ],
)
def test_figures_that_are_none_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "gpu-facts-h100.json"
    file.write_text(json.dumps({**FACTS, **change}))
    with refused(ValueError, message):
        hardware.load(file)
    file.write_text("{")
    with refused(ValueError, "gpu-facts-h100.json damaged"):
        facts_of(FACTS["name"], tmp_path)


def test_figures_that_are_not_there_yet_leave_what_ships(tmp_path: Path) -> None:
    """A script that was killed, or whose memory ran out, leaves some of them."""
    file = tmp_path / "gpu-facts-h100.json"
    file.write_text(
        json.dumps({"name": FACTS["name"], "copy_up": None, "decode_rate": {"nf4": None}})
    )
    found = hardware.load(file)
    rough = hardware.load("h100-80gb")
    changed = {
        each.name
        for each in dataclasses.fields(found)
        if getattr(found, each.name) != getattr(rough, each.name)
    }
    assert changed == {"name", "source"}


def test_a_plan_counts_on_a_part_of_an_accelerator_and_on_all_of_a_processor() -> None:
    card = hardware.load("rtx-4090")
    laptop = hardware.load("laptop")
    assert (card.usable_bytes, card.host_room) == (
        int(0.92 * card.device_bytes),
        int(0.8 * card.host_bytes),
    )
    assert (laptop.usable_bytes, laptop.host_room) == (laptop.device_bytes, laptop.host_bytes)


@pytest.mark.parametrize(
    ("name", "near"),
    [("rtx-3050", "rtx-3060"), ("rtx-4070", "rtx-4060"), ("RTX4090", "rtx-4090"), ("7900xtx", "")],
)
def test_an_unknown_card_is_answered_with_the_nearest_and_its_memory_as_a_budget(
    name: str, near: str
) -> None:
    """Oracle: the error's own advice, which loads."""
    with refused(ValueError, name, "--budget", *([near] if near else ["NAME"])):
        hardware.load(name)
    if near:
        assert hardware.load(near).card


def test_cards_of_8_gb_hold_8_gb() -> None:
    """Oracle: what 8 GiB are, less what a driver keeps."""
    for name in ("rtx-4060", "rtx-3060-8gb"):
        assert 7e9 < hardware.load(name).device_bytes < 8 * 2**30


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0123, "0.0123 s"), (4.4, "4.4 s"), (1060, "18 minutes"), (20_000, "6 hours"),
     (400_000, "5 days")],
)  # fmt: skip
def test_a_time_is_said_in_words(seconds: float, words: str) -> None:
    """Closed form: the same time in the unit that it has two of."""
    assert duration(seconds) == words


@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512_bf16"])
def test_a_machine_that_was_not_measured_is_between_two(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the threads and the flags, by hand. Twice the threads compute twice as fast; units
    for pairs of bfloat16 numbers are faster, and leave less free heap."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "_processor_flags", lambda: frozenset(("", *flags.split())))
    machine = hardware.of_this_machine("cpu")
    rates = {}
    for threads in (2, 4):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        slowest, fastest = hardware.extremes(machine)
        rates[threads] = [m.flops_of("bfloat16") for m in (slowest, fastest)]
        assert slowest.flops_of("bfloat16") < fastest.flops_of("bfloat16")
        assert slowest.flops_of("float32") == slowest.flops_of("bfloat16")
    assert rates[4] == pytest.approx([2 * rate for rate in rates[2]])
    has_pairs = "avx512_bf16" in flags
    assert (rates[2][1] > 2 * 2e11) == has_pairs, "220 GFLOP/s a core were measured with them"
    assert (machine.slack["streamed, 16 bits"] < 1.5) == has_pairs
