"""Oracle: descriptions written here, with one thing wrong or with round figures; psutil for the memory of this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import pytest

from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import Curve, Link
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
def test_a_description_with_one_thing_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "machine.yaml").write_text(text)
    with refused(ValueError, message):
        hardware.load(tmp_path / "machine.yaml")


def test_a_description_is_read_with_its_units(tmp_path: Path) -> None:
    """Closed form: sizes with units, numbers that YAML 1.1 takes for text, a link without latency, a curve."""
    text = "op_seconds: 1e-3\nhost_bytes: 2GiB\ninter: {bandwidth: 1e9}\nproducts: {float32: [[1e6, 1e-3]]}\nnodes: 3\n"
    (tmp_path / "machine.yaml").write_text(WHOLE + text + "devices_per_node: 4\npeak_flops: {bfloat16: 3e12}")
    found = hardware.load(tmp_path / "machine.yaml")
    assert (found.name, found.device_bytes, found.host_bytes) == ("machine", 8 * 10**9, 2**31)
    assert (found.op_seconds, found.inter, found.world) == (1e-3, Link(1e9), 12)
    assert found.products == {"float32": Curve(((1e6, 1e-3),))}
    assert (found.flops_of("float32"), found.flops_of("bfloat16")) == (1e12, 1e12), "as fast as float32"
    assert (found.peak_of("float32"), found.peak_of("bfloat16")) == (1e12, 3e12), "reached, where nothing is promised"
    assert dataclasses.replace(found, flops={"bfloat16": 5e11}).flops_of("float16") == 5e11


def test_a_link_takes_alpha_and_beta_and_nothing_takes_no_time() -> None:
    assert Link(100.0, 0.5).seconds(200) == 2.5
    assert Link(100.0, 0.5).seconds(0) == 0.0


def test_a_curve_of_operations_goes_through_its_points() -> None:
    """A power law between them; beyond, the first's seconds and the last's rate."""
    curve = Curve(((10.0, 4.0), (1000.0, 8.0)))
    assert [curve.seconds(size) for size in (1, 10, 1000, 5000)] == [4.0, 4.0, 8.0, 40.0]
    assert curve.seconds(100) == pytest.approx(4.0 * 2**0.5)
    assert curve.total(((10, 3), (1000, 1))) == 3 * 4.0 + 8.0


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
    measured = dataclasses.replace(hardware.load("laptop"), name="hardware", memory_bandwidth=12.5e9)
    hardware.save(measured, hardware.HERE)
    assert hardware.of_this_machine() == hardware.load("here") == measured
    other = hardware.of_this_machine("cuda")
    assert (other.name, other.device) == (hardware.UNMEASURED, "cuda"), "doctor has described a processor alone"
    assert other.device_bytes == hardware.load("rtx-4090").device_bytes
