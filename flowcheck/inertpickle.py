"""What a pickle says, without making the objects that it names: nothing is imported, nothing is called.

Checkpoints of torch keep names, shapes and places of their tensors in a pickle, and a pickle is a program that may run
anything. Here its instructions are only read (the standard library's `pickletools` cuts them apart): plain values
become values, and what would be an object becomes an `Inert` that tells class and arguments. What an instruction costs
is bounded, so the pickle's size bounds the whole.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

__all__ = ["Inert", "NotRead", "read"]


class NotRead(Exception):
    """The pickle is damaged, or has instructions that checkpoints do not need."""


class Inert:
    """An object that was not made. name: its class or function, such as "torch._utils._rebuild_tensor_v2"; args: what
    that would have been called with, None for the class itself; state: what would have been put into it."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name = name
        self.args = args
        self.state: dict[str, Any] = {}


Make = Callable[[str, tuple[Any, ...]], Any]
"""What stands for a call of the named class or function with these arguments."""

_VALUES = frozenset((
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
))  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": list, "EMPTY_TUPLE": tuple
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(text: bytes, make: Make = Inert) -> Any:
    """The value that a pickle describes. Raises NotRead.

    Its dictionaries keep entries whose key is a text, a number or an Inert; sets are lists. make: what stands for a
    call; it is given an object that was named by the pickle's own numbering as ("persistent", (number,)).
    """
    try:
        return _Reader(make).read(text)
    except NotRead:
        raise
    except Exception as error:  # whatever a torn or hostile one leads to
        raise NotRead(f"{type(error).__name__}: {error!s:.100}") from None


class _Reader:
    def __init__(self, make: Make) -> None:
        self._make = make
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, text: bytes) -> Any:
        stack, memo = self._stack, self._memo
        argument: Any
        for opcode, argument, _ in pickletools.genops(text):
            name = opcode.name
            if name in _VALUES:
                stack.append(argument)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name == "MARK":
                self._marks.append(len(stack))
            elif name in _TUPLES:
                stack.append(tuple(self._pop(len(stack) - _TUPLES[name])))
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                self._more(name, argument)
        raise NotRead("it does not end")

    def _more(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name == "SETITEM":
            self._items(self._pop(len(stack) - 2))
        elif name == "SETITEMS":
            self._items(self._marked())
        elif name == "APPEND":
            self._extend(self._pop(len(stack) - 1))
        elif name in ("APPENDS", "ADDITEMS"):
            self._extend(self._marked())
        elif name == "GLOBAL":
            stack.append(Inert(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = self._pop(len(stack) - 2)
            stack.append(Inert(f"{module!s:.200}.{attribute!s:.200}"))
        elif name in ("REDUCE", "NEWOBJ"):
            self._call(*self._pop(len(stack) - 2))
        elif name == "NEWOBJ_EX":
            self._call(*self._pop(len(stack) - 3)[:2])
        elif name == "BUILD":
            (state,) = self._pop(len(stack) - 1)
            if isinstance(stack[-1], Inert) and isinstance(state, dict):
                stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(self._make("persistent", (stack.pop(),)))
        else:
            raise NotRead(f"its instruction {name} is none that checkpoints need")

    def _pop(self, start: int) -> list[Any]:
        """What lies on the stack from `start` on, taken off; marks below stay where they are."""
        if start < (self._marks[-1] if self._marks else 0):
            raise NotRead("it takes more than there is")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _marked(self) -> list[Any]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _items(self, flat: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, dict):
            for key, value in zip(flat[::2], flat[1::2], strict=True):
                if isinstance(key, (str, int, Inert)):  # a tuple nested a million deep could not even be hashed
                    target[key] = value

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1] += items

    def _call(self, what: Any, args: Any) -> None:
        if not isinstance(what, Inert) or what.args is not None or not isinstance(args, tuple):
            raise NotRead("it calls what is no class or function")
        self._stack.append({} if what.name == "collections.OrderedDict" else self._make(what.name, args))
