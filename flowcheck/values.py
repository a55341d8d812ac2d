"""Plain Python values as JSON and back: tuples stay tuples, floats keep their bits, every size has a limit.

Param group fields and scheduler states are small trees of None, bool, int, float, str, list, tuple and
dict. JSON has no tuple, no infinity and only string keys, so those three are written as one-key objects.
`Reader` walks decoded JSON and names the field that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from flowcheck.errors import FlowcheckError

MAX_DEPTH = 16
MAX_ITEMS = 1 << 20
MAX_TEXT = 1 << 16

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Item = TypeVar("Item")


class DescriptionError(FlowcheckError):
    """A description, message or job file has a field that does not fit; the text starts with the field's
    path.
    """


def encode_value(value: Any, path: str = "value", depth: int = 0) -> Any:
    """`value` as JSON-ready objects; DescriptionError names the part that has no JSON form, such as a
    tensor.
    """
    if depth > MAX_DEPTH:
        raise DescriptionError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    if type(value) is int:
        return _bounded(value, path)
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"__float__": str(value)}
    if isinstance(value, float):  # numpy.float64 and other subclasses: the same bits as a plain float
        return encode_value(float(value), path, depth)
    if isinstance(value, (list, tuple)):
        items = [encode_value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("__") for key in value):
            return {key: encode_value(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        pairs = [
            [encode_value(key, f"{path} key", depth + 1), encode_value(item, f"{path}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"__dict__": pairs}
    raise DescriptionError(f"{path}: a {type(value).__name__} cannot be described")


def decode_value(data: Any, path: str = "value", depth: int = 0) -> Any:
    """The value that `encode_value` wrote; DescriptionError for anything that it never writes."""
    if depth > MAX_DEPTH:
        raise DescriptionError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, str):
        return text(data, path, MAX_TEXT)
    if isinstance(data, int):
        return _bounded(data, path)
    if data is None or isinstance(data, float):
        return data
    if not isinstance(data, (list, dict)):
        raise DescriptionError(f"{path}: a {type(data).__name__} where a plain value was expected")
    if len(data) > MAX_ITEMS:
        raise DescriptionError(f"{path}: {len(data)} items, at most {MAX_ITEMS}")
    if isinstance(data, list):
        return [decode_value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(data)]
    if "__float__" in data:
        if len(data) != 1 or data["__float__"] not in ("nan", "inf", "-inf"):
            raise DescriptionError(f"{path}: not a float: {str(data)[:60]}")
        return _NONFINITE[data["__float__"]]
    if "__tuple__" in data:
        if len(data) != 1 or not isinstance(data["__tuple__"], list):
            raise DescriptionError(f"{path}: not a tuple: {str(data)[:60]}")
        return tuple(decode_value(data["__tuple__"], path, depth))
    if "__dict__" in data:
        pairs = data["__dict__"]
        if len(data) != 1 or not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
            raise DescriptionError(f"{path}: not a dict: {str(data)[:60]}")
        try:
            return dict(decode_value(pair, f"{path}[{i}]", depth + 1) for i, pair in enumerate(pairs))
        except TypeError:
            raise DescriptionError(f"{path}: a dict key that cannot be a key") from None
    return {key: decode_value(item, f"{path}.{key:.60}", depth + 1) for key, item in data.items()}


def _bounded(number: int, path: str) -> int:
    """A whole number; Python's own have no limit, and what is computed with them would have none."""
    if not -(1 << 63) <= number < 1 << 63:
        raise DescriptionError(f"{path}: a number of {number.bit_length()} bits does not fit in 64 bits")
    return number


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2


class Reader:
    """One JSON object while it is checked: every getter raises DescriptionError with the field's full path.

    `done()` refuses fields that nobody asked for, so a misspelt or newer field is never silently ignored.
    """

    def __init__(self, data: Any, path: str) -> None:
        if not isinstance(data, dict):
            raise DescriptionError(f"{path}: expected an object, got {_kind(data)}")
        self.data: dict[str, Any] = data
        self.path = path
        self._seen: set[str] = set()

    def raw(self, name: str) -> Any:
        self._seen.add(name)
        if name not in self.data:
            raise DescriptionError(f"{self.path}.{name}: missing")
        return self.data[name]

    def fail(self, name: str, problem: str) -> DescriptionError:
        return DescriptionError(f"{self.path}.{name}: {problem}")

    def integer(self, name: str, low: int, high: int) -> int:
        return integer(self.raw(name), f"{self.path}.{name}", low, high)

    def text(self, name: str, limit: int = 1024) -> str:
        return text(self.raw(name), f"{self.path}.{name}", limit)

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            raise self.fail(name, f"expected true or false, got {_kind(value)}")
        return value

    def sequence(self, name: str, limit: int, read: Callable[[Any, str], Item]) -> list[Item]:
        return sequence(self.raw(name), f"{self.path}.{name}", limit, read)

    def value(self, name: str) -> Any:
        return decode_value(self.raw(name), f"{self.path}.{name}")

    def done(self) -> None:
        for name in self.data:
            if name not in self._seen:
                raise DescriptionError(f"{self.path}.{name:.60}: unknown field")


def integer(value: Any, path: str, low: int, high: int) -> int:
    if type(value) is not int:
        raise DescriptionError(f"{path}: expected a whole number, got {_kind(value)}")
    if not low <= value <= high:
        raise DescriptionError(f"{path}: {str(value)[:30]} is not within {low}..{high}")
    return value


def text(value: Any, path: str, limit: int = 1024) -> str:
    if not isinstance(value, str):
        raise DescriptionError(f"{path}: expected a text, got {_kind(value)}")
    if len(value) > limit:
        raise DescriptionError(f"{path}: a text of {len(value)} characters, at most {limit}")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DescriptionError(f"{path}: a text with half of a character in it")
    return value


def sequence(value: Any, path: str, limit: int, read: Callable[[Any, str], Item]) -> list[Item]:
    if not isinstance(value, list):
        raise DescriptionError(f"{path}: expected a list, got {_kind(value)}")
    if len(value) > limit:
        raise DescriptionError(f"{path}: {len(value)} items, at most {limit}")
    return [read(item, f"{path}[{i}]") for i, item in enumerate(value)]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
