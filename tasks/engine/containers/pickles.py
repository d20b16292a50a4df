"""Pickles read through a closed list. Nothing a pickle names is imported; what it may name is a table of inert stand-ins.

A *global* is a (module, name) pair a pickle asks for. A *stand-in* takes a global's place: a class of ours that keeps fields and does
nothing else, a plain string, or an immutable builtin type. Never a function: a pickle's BUILD could change its defaults. A global without
a stand-in is refused by name, before anything of it could run.

Source: Python's pickle documentation, "Restricting Globals"; opcodes in Lib/pickletools.py.
"""

import gc
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from reports.errors import FormatError, HostilePickleError
from tasks.engine.containers.pickle_scan import find_fault

Global = tuple[str, str]
Allowed = Mapping[Global, object]

# What the C unpickler raises on bytes that are no pickle, or one that misuses our stand-ins.
BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class Record:
    """Base of stand-ins: keeps the fields named in `__slots__`, refuses any other.

    Every stand-in has a `__setstate__` of its own class, so that a pickle's BUILD on the class itself fails instead of changing it.
    """

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        for name, value in state_fields(state):
            if name not in self.__slots__:
                raise AttributeError(f"{type(self).__name__} has no field {name!r}")
            setattr(self, name, value)


class Bag(dict[object, object]):
    """Stand-in for OrderedDict: its entries, without attributes (such as `_metadata` of a state dict)."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class Opaque:
    """Stand-in for a value that no reader looks into: takes any arguments and state, keeps nothing."""

    __slots__ = ()

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _ClosedUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, allowed: Allowed, where: str, persistent: Callable[[object], object] | None) -> None:
        super().__init__(stream, encoding="utf-8")
        self._allowed, self._where, self._persistent = allowed, where, persistent

    def find_class(self, module: str, name: str) -> object:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise HostilePickleError(
                f"pickle asks for {module}.{name}, which is not in the closed list; nothing of it was run",
                where=self._where,
                remedy="Trust the file only if you know its writer; a known format's global can be added to the closed list.",
            ) from None

    def persistent_load(self, pid: object) -> object:
        if self._persistent is None:
            raise FormatError("pickle refers to objects outside itself", where=self._where, remedy="The file is not of this format.")
        return self._persistent(pid)


def load_closed(content: bytes, allowed: Allowed, *, where: str, persistent: Callable[[object], object] | None = None) -> object:
    """Return the object a pickle describes, built from stand-ins.

    Args:
        content: the pickle.
        allowed: the closed list: what each global stands for.
        where: the file, for messages.
        persistent: what a persistent id stands for; None refuses them.

    Returns:
        Plain values and stand-ins.

    Raises:
        HostilePickleError: a global outside the list.
        FormatError: not a pickle, cut short, or one that misuses the listed globals.
    """
    fault = find_fault(content)
    if fault:
        raise _broken(content, where, fault)
    try:
        with _paused_collector():
            return _ClosedUnpickler(io.BytesIO(content), allowed, where, persistent).load()
    except FormatError:
        raise
    except BROKEN as error:
        raise _broken(content, where, f"{type(error).__name__}: {error}"[:200]) from error


def state_fields(state: object) -> Iterator[tuple[str, object]]:
    """Yield what an object's pickled state holds.

    Args:
        state: a dict of attributes, or (dict or None, dict of slots).

    Yields:
        Name, value.

    Raises:
        TypeError: any other state.
    """
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in parts:
        if isinstance(part, dict):
            yield from part.items()
        elif part is not None:
            raise TypeError(f"state is a {type(part).__name__}")


def _broken(content: bytes, where: str, detail: str) -> FormatError:
    return FormatError(
        f"pickle of {len(content)} bytes is cut short, damaged or not of this kind ({detail})",
        where=where,
        remedy="Restore the file from another copy or export another step.",
    )


@contextmanager
def _paused_collector() -> Iterator[None]:
    # Millions of new objects and no garbage: the collector would take two thirds of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
