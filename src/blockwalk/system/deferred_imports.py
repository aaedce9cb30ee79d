"""Packages that a library imports for what no step does: they are imported when they are first
used.

``transformers`` and ``peft`` import torch's compiler, its symbolic shapes with ``sympy``, ``scipy``
and ``bitsandbytes``, where they are installed: a third of a small model's process, in which none of
them does anything. Autograd and fake tensors import symbolic shapes to ask whether a plain number
is one. Within :func:`deferred_imports` an import of :data:`DEFERRED` gets a stand-in,
and its names are proxies. A proxy answers by itself whether something is its instance; whatever
else it is asked imports the package. Once a package is imported, by whoever wants it, names that
held its proxies hold the real objects."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DEFERRED = (
    "bitsandbytes",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils._sympy",
)
"""Modules whose import is deferred, each with all that lies below it."""

ALONE = frozenset({"torch._dynamo.config"})
"""Modules below those of :data:`DEFERRED` that are imported all the same, without the package that
they lie in: they hold settings, which fake tensors read, and need nothing of it."""

DECORATORS = frozenset(
    {
        "torch._dynamo.allow_in_graph",
        "torch._dynamo.assume_constant_result",
        "torch._dynamo.disable",
    }
)
"""Decorators that tell a compiler about a function: they wait until the compiler is imported."""

_OF_IMPORT = frozenset({"__cached__", "__file__", "__path__"})
"""Attributes by which an import asks whether a module is a package and where it lies."""


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Defer imports of :data:`DEFERRED` that are begun within, if nobody has imported them yet.

    When it ends, ``sys.modules`` holds none of the stand-ins: an import afterwards is an ordinary
    one.
    """
    _FINDER.enter()
    try:
        yield
    finally:
        _FINDER.leave()


class _Proxy:
    """A name of a module that is not imported yet."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def _real(self) -> Any:
        return getattr(_FINDER.import_now(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = NotImplemented if kwargs else _plain_answer(f"{self._module}.{self._name}", args)
        return self._real()(*args, **kwargs) if answer is NotImplemented else answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __instancecheck__(self, instance: object) -> bool:
        """Nothing is an instance of a class that nobody has imported."""
        return _is_imported(self._module) and isinstance(instance, self._real())

    def __bool__(self) -> bool:
        return bool(self._real())

    def __hash__(self) -> int:
        return hash(self._real())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real())

    def __len__(self) -> int:
        return len(self._real())


def _is_truth(value: Any) -> bool:
    return type(value) is bool


def _is_size(value: Any) -> bool:
    return type(value) is int


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_size, value))


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of known sizes."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return _is_shape((*value.shape, *value.stride(), value.storage_offset()))


def _is_text(value: Any) -> bool:
    return type(value) is str


def _itself(value: Any) -> Any:
    return value


def _all(*truths: bool) -> bool:
    return all(truths)


def _any(*truths: bool) -> bool:
    return any(truths)


_SHAPES = "torch.fx.experimental.symbolic_shapes"

PLAIN_ANSWERS: dict[str, tuple[Callable[[Any], bool], Callable[..., Any]]] = {
    f"{_SHAPES}.expect_true": (_is_truth, _itself),
    f"{_SHAPES}.guard_or_false": (_is_truth, _itself),
    f"{_SHAPES}.guard_or_true": (_is_truth, _itself),
    f"{_SHAPES}.guard_size_oblivious": (_is_truth, _itself),
    f"{_SHAPES}.statically_known_true": (_is_truth, _itself),
    f"{_SHAPES}.sym_and": (_is_truth, _all),
    f"{_SHAPES}.sym_or": (_is_truth, _any),
    f"{_SHAPES}.sym_eq": (_is_shape, lambda shape, other: tuple(shape) == tuple(other)),
    f"{_SHAPES}.guard_int": (_is_size, _itself),
    f"{_SHAPES}.has_guarding_hint": (_is_size, lambda _: True),
    f"{_SHAPES}.is_nested_int": (_is_size, lambda _: False),
    f"{_SHAPES}.free_unbacked_symbols": (_is_tensor, lambda _: ()),
    f"{_SHAPES}.has_free_unbacked_symbols": (_is_tensor, lambda _: False),
    f"{_SHAPES}._iterate_exprs": (_is_tensor, lambda _: ()),
    # where a tensor comes from: guards of symbols alone would look it up
    "torch._dynamo.source.ConstantSource": (_is_text, _itself),
}
"""Functions that autograd and fake tensors call for what may be symbolic: whether an argument is
not, and the answer where none is."""


def _plain_answer(name: str, args: tuple[Any, ...]) -> Any:
    """Return the answer of a function of symbolic values to plain ones; ``NotImplemented`` where it
    is not known without the function."""
    is_plain, answer = PLAIN_ANSWERS.get(name, (_is_truth, None))
    if answer is None or not args or not all(map(is_plain, args)):
        return NotImplemented
    try:
        return answer(*args)
    except TypeError:  # as many arguments as it does not take: torch's function says so
        return NotImplemented


_BINARY = (
    "add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub",
    "truediv", "xor",
)  # fmt: skip
"""Operators that have a reflected form."""


def _forward_operators() -> None:
    """Let a proxy's operators be those of the real object."""
    for operation in [
        *["contains", "eq", "ge", "getitem", "gt", "le", "lt", "ne", "neg"],
        *_BINARY,
    ]:
        function = getattr(operator, f"__{operation}__")
        setattr(_Proxy, f"__{operation}__", _on_real(function))
    for operation in _BINARY:
        function = getattr(operator, f"__{operation}__")
        setattr(_Proxy, f"__r{operation}__", _on_real(function, reflected=True))


def _on_real(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    """Return a method that calls an operator's function with the real object."""

    def method(self: _Proxy, *others: Any) -> Any:
        return function(*others, self._real()) if reflected else function(self._real(), *others)

    return method


_forward_operators()


class _StandIn(ModuleType):
    """A module that is not imported yet."""

    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        if name in _OF_IMPORT:
            raise AttributeError(name)
        if name.startswith("__") or not _FINDER.defers(self.__name__):
            return getattr(_FINDER.import_now(self.__name__), name)
        if full_name in DECORATORS:
            return functools.partial(_decorate_later, self.__name__, name)
        is_package = "__path__" in vars(self)
        if is_package and importlib.util.find_spec(full_name) is not None:
            return importlib.import_module(full_name)
        return _Proxy(self.__name__, name)


def _decorate_later(
    module: str, name: str, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Return a function that is decorated when ``module`` is imported."""
    if function is None:
        return lambda decorated: _decorate_later(module, name, decorated, *args, **kwargs)
    target = function

    @functools.wraps(function, updated=())
    def call(*call_args: Any, **call_kwargs: Any) -> Any:
        return target(*call_args, **call_kwargs)

    def decorate() -> None:
        nonlocal target
        target = getattr(sys.modules[module], name)(function, *args, **kwargs)

    _FINDER.waiting.setdefault(module, []).append(decorate)
    return call


class _Finder:
    """Finds stand-ins within :func:`deferred_imports`, and the modules themselves otherwise."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        """Functions that run when a module is imported, by its name."""
        self._lock = threading.RLock()
        self._entered = 0
        self._importing = 0

    def enter(self) -> None:
        with self._lock:
            self._entered += 1
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def leave(self) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                _remove_stand_ins()

    def defers(self, name: str) -> bool:
        return self._entered > 0 and not self._importing and not _is_imported(name)

    def import_now(self, name: str) -> ModuleType:
        """Import a module and all that it imports itself, none of it deferred."""
        with self._lock:
            self._importing += 1
            try:
                _remove_stand_ins()
                return importlib.import_module(name)
            finally:
                self._importing -= 1

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _root(name) is None or (spec := self._spec(name, path, target)) is None:
            return None
        if self.defers(name) and name not in ALONE:
            stand_in = ModuleSpec(name, self, origin=spec.origin)  # type: ignore[arg-type]
            stand_in.has_location = spec.has_location
            stand_in.submodule_search_locations = spec.submodule_search_locations
            return stand_in
        loader: Any = spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._settle(module)

            loader.exec_module = exec_module
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has nothing to execute."""

    def _spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for a module."""
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        return next((spec for spec in specs if spec is not None), None)

    def _settle(self, module: ModuleType) -> None:
        """Put a module that was imported just now in the place of its stand-in and its proxies."""
        name = module.__name__
        for act in self.waiting.pop(name, ()):
            act()
        for holder in list(sys.modules.values()):
            names = vars(holder) if isinstance(holder, ModuleType) else {}
            for key, value in list(names.items()):
                if type(value) is _Proxy and value._module == name:
                    names[key] = getattr(module, value._name)
                elif type(value) is _StandIn and value.__name__ == name:
                    names[key] = module


def _root(name: str) -> str | None:
    """Return the row of :data:`DEFERRED` that a module belongs to."""
    return next((root for root in DEFERRED if name == root or name.startswith(f"{root}.")), None)


def _is_imported(name: str) -> bool:
    """Return whether the package of a deferred module has been imported for real."""
    module = sys.modules.get(_root(name) or name)
    return module is not None and type(module) is not _StandIn


def _remove_stand_ins() -> None:
    """Take stand-ins, and modules that were imported without their package, out of ``sys.modules``
    and out of the packages that they lie in."""
    modules = sys.modules.copy().items()  # at once: other threads may import meanwhile
    stand_ins = {name for name, module in modules if type(module) is _StandIn}
    alone = {name for name, _ in modules if name in ALONE and name.rpartition(".")[0] in stand_ins}
    for name in stand_ins | alone:
        module = sys.modules.pop(name, None)
        package, _, child = name.rpartition(".")
        holder = sys.modules.get(package)
        if holder is not None and vars(holder).get(child) is module:
            del vars(holder)[child]


_FINDER = _Finder()
