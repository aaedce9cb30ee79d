"""Oracle: a CPU, which runs the same operators at once and in order; and the rules of streams,
events and memory, each of them broken once: the device must show it."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading

import pytest
import torch

from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.simulated_device import Simulated

ORDERS = range(24)


def elsewhere(*, waits: bool) -> torch.Tensor:
    """(x + 1)·2 where the product is on another stream than the sum, which it waits for or not."""
    mine = torch.accelerator.current_stream()
    other = torch.Stream(device="sim:0")
    x = torch.arange(6.0).to("sim:0") + 1
    summed = mine.record_event()
    with other:
        if waits:
            other.wait_event(summed)
        doubled = x * 2
    mine.wait_event(other.record_event())
    return (doubled + 0).cpu()


def handed_on(*, recorded: bool) -> torch.Tensor:
    """A tensor of one stream that another reads, and that is freed on the host before it has."""
    mine = torch.accelerator.current_stream()
    other = torch.Stream(device="sim:0")
    x = torch.arange(6.0).to("sim:0") + 1
    other.wait_event(mine.record_event())
    with other:
        doubled = x * 2
    if recorded:
        x.record_stream(other)
    del x
    again = torch.full((6,), 5.0, device="sim:0")
    mine.wait_event(other.record_event())
    assert again.cpu().tolist() == [5.0] * 6
    return doubled.cpu()


EXPECTED = (torch.arange(6.0) + 1) * 2


def right(sim: Simulated, function: object, **settings: bool) -> list[bool]:
    """Whether the function's answer is the CPU's, order by order."""
    found = []
    for seed in ORDERS:
        sim.order(seed)
        found.append(torch.equal(function(**settings), EXPECTED))  # type: ignore[operator]
    return found


def test_a_wait_between_streams_that_is_left_out_shows(sim: Simulated) -> None:
    assert all(right(sim, elsewhere, waits=True))
    assert not all(right(sim, elsewhere, waits=False))


def test_a_tensor_freed_while_another_stream_reads_it_shows(sim: Simulated) -> None:
    assert all(right(sim, handed_on, recorded=True))
    assert not all(right(sim, handed_on, recorded=False))


def test_the_process_of_other_tests_has_no_accelerator() -> None:
    """A backward there would take it into its threads, and no fork of that process could run
    another."""
    assert not torch.accelerator.is_available()
    assert "torch.sim" not in sys.modules


def test_a_stream_gets_its_own_freed_block_at_once_and_others_do_not(sim: Simulated) -> None:
    x = torch.empty(100, device="sim:0")
    address = x.data_ptr()
    del x
    with torch.Stream(device="sim:0"):
        assert torch.empty(100, device="sim:0").data_ptr() != address
    assert torch.empty(100, device="sim:0").data_ptr() == address


def test_a_host_that_touches_device_memory_dies(sim: Simulated) -> None:
    import ctypes
    import faulthandler

    address = torch.zeros(4, device="sim:0").data_ptr()
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(address, 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_tensors_of_the_host_and_of_another_device_are_refused(sim: Simulated) -> None:
    x = torch.ones(3, device="sim:0")
    with refused(RuntimeError, "host tensor"):
        x + torch.ones(3)
    with refused(RuntimeError, "devices 0 1"):
        x + torch.ones(3, device="sim:1")
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3  # a scalar may come along


def test_a_thread_begins_on_device_0(sim: Simulated) -> None:
    torch.accelerator.set_device_index(2)
    found: list[torch.device] = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1, device="sim").device))
    thread.start()
    thread.join()
    assert found == [torch.device("sim", 0)]
    assert torch.ones(1, device="sim").device == torch.device("sim", 2)


def test_pinned_copies_are_queued_and_pageable_ones_wait(sim: Simulated) -> None:
    pinned = torch.ones(8, pin_memory=True)
    pageable = torch.ones(8)
    x = torch.zeros(8, device="sim:0")
    sim.start_counting()
    x.copy_(pinned, non_blocking=True)
    pinned_back = torch.zeros(8, pin_memory=True)
    pinned_back.copy_(x, non_blocking=True)
    assert pinned_back.sum() == 0, "read before the copy has run"
    assert sim.counts().waits == {}
    torch.accelerator.current_stream().synchronize()
    assert pinned_back.sum() == 8
    x.copy_(pageable, non_blocking=True)
    x.double().copy_(pinned, non_blocking=True)  # of another dtype: converted in pageable memory
    assert sim.counts().pageable == 2
    assert sim.counts().waits == {"stream": 1, "copy from pageable memory": 2}


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_lora_model_differentiates_as_on_a_cpu(kind: str, sim: Simulated) -> None:
    """Autograd works in a thread of its own for each device, on the streams of the forward."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(kind, dropout=0.0), lora)
    batch = random_batch()

    def gradients(device: str) -> list[torch.Tensor]:
        its = copy.deepcopy(model).to(device)
        its(
            **{key: value.to(device) for key, value in batch.items()}, use_cache=False
        ).loss.backward()
        return [p.grad.cpu() for p in its.parameters() if p.grad is not None]

    expected = gradients("cpu")
    for seed in range(3):
        sim.order(seed)
        found = gradients(f"sim:{seed}")
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), seed
