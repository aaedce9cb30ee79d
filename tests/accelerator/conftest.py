"""The simulated accelerator as a fixture, and a fresh process for every test that takes it.

Autograd makes its threads in a process's first backward, for the accelerators that are there: a
process with one can never be forked and run another backward, one without can never take one in. So
these tests run in forks of a server that has imported much and run nothing. Without a C++ compiler
they skip, and say so."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.support import simulated_device as device
from tests.support.simulated_device import Simulated

IMPORTED = [
    "torch._meta_registrations",
    "peft",
    "transformers.models.llama.modeling_llama",
    "blockwalk.walk.walker",
]


@pytest.fixture(scope="session")
def library() -> None:
    """Build what the tests' processes load."""
    if device.compiler() is None:
        pytest.skip(
            "no C++ compiler (c++, g++, clang++ or $CXX): the simulated accelerator cannot be built"
        )
    device.build()


@pytest.fixture
def sim(library: None) -> Simulated:
    """The devices, in the test's own process; the order is the laziest at first."""
    return Simulated()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that takes ``sim`` in a process of its own, and fail with its words."""
    if "sim" not in pyfuncitem.fixturenames:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    patched = given.pop("monkeypatch", None) is not None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_test, args=(pyfuncitem.obj, given, patched, sending))
    process.start()
    sending.close()
    try:
        words = receiving.recv()
    except EOFError:
        words = "the test's process died: did the host touch device memory?"
    process.join()
    if words:
        pytest.fail(words, pytrace=False)
    return True


def _test(
    function: Callable[..., None], given: dict[str, Any], patched: bool, sending: Connection
) -> None:
    words = ""
    try:
        device.load()
        with pytest.MonkeyPatch.context() as patch:
            function(**given, **({"monkeypatch": patch} if patched else {}))
    except BaseException:
        words = traceback.format_exc()
    sending.send(words)
    sending.close()
    os._exit(0)
