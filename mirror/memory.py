"""Raw memory for numba kernels: loads, copies and comparisons at absolute addresses.

Kernels here work on memory that no numpy array describes well: a ring block mapped from the kernel, a mapped
file, an arena of cells. An address is an int64; nothing is checked, so every caller proves its bounds first.
The copy is LLVM's memcpy: numba's own slice assignment is several times slower, worst of all out of a ring.

All integers come back as int64 (mixing int64 and uint64 makes numba fall back to float64); `load_u64` therefore
returns the bits of a u64 as a signed number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from mirror.internal import internal

__all__ = [
    "address_of", "copy", "equal", "handle", "int32s_at", "int64s_at", "load_be16", "load_be32", "load_u8", "load_u16",
    "load_u32", "load_u64", "prefetch", "rows_at", "store_u8", "store_u32", "store_u64", "uint8s_at", "uint32s_at",
]

_BYTE_POINTER = ir.IntType(8).as_pointer()


def address_of(array: np.ndarray) -> int:
    """Address of the first byte of `array` (any dtype). The caller keeps the array alive while it is used."""
    return int(array.__array_interface__["data"][0])


def handle(*parts: np.ndarray | int) -> np.ndarray:
    """int64: of each array its address and its shape, of each number itself.

    Numba looks at every array that a kernel is given, which takes 0.2 us each: with some twenty of them as long as the
    kernel's work on a small block. From a handle the kernel finds them itself (`int64s_at` and the like). Whoever makes
    one keeps the arrays alive, and makes a new one for new arrays. Raises ValueError for an array with gaps.
    """
    numbers: list[int] = []
    for part in parts:
        if isinstance(part, int):
            numbers.append(part)
        elif part.flags.c_contiguous and part.flags.writeable:
            numbers += [address_of(part), *part.shape]
        else:
            raise ValueError("only contiguous, writable arrays have a handle")
    return np.array(numbers, np.int64)


def _make_load(bits: int, swap: bool) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer, align=1)
            if swap:
                value = builder.bswap(value)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return load


def _make_store(bits: int) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            pointer = builder.inttoptr(arguments[0], kind.as_pointer())
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], kind)
            builder.store(value, pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


load_u8 = _make_load(8, False)       # (address) -> int64; native (little-endian) order, any alignment
load_u16 = _make_load(16, False)
load_u32 = _make_load(32, False)
load_u64 = _make_load(64, False)     # the 64 bits, read as a signed number
load_be16 = _make_load(16, True)     # network order
load_be32 = _make_load(32, True)
store_u8 = _make_store(8)            # (address, value)
store_u32 = _make_store(32)
store_u64 = _make_store(64)


def _make_prefetch() -> Any:
    @intrinsic
    def prefetch(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            flag = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, flag, flag, flag])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            pointer = builder.inttoptr(arguments[0], _BYTE_POINTER)
            builder.call(function, [pointer, flag(0), flag(3), flag(1)])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return prefetch


def _make_memcpy() -> Any:
    @intrinsic
    def memcpy(typingctx: Any, destination: Any, source: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to = builder.inttoptr(arguments[0], _BYTE_POINTER)
            of = builder.inttoptr(arguments[1], _BYTE_POINTER)
            cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return memcpy


def _make_memcmp() -> Any:
    @intrinsic
    def memcmp(typingctx: Any, first: Any, second: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [_BYTE_POINTER, _BYTE_POINTER, ir.IntType(64)])
            function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
            one = builder.inttoptr(arguments[0], _BYTE_POINTER)
            other = builder.inttoptr(arguments[1], _BYTE_POINTER)
            return builder.call(function, [one, other, arguments[2]])

        return types.int32(types.int64, types.int64, types.int64), codegen

    return memcmp


def _make_pointer() -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], _BYTE_POINTER)

        return types.voidptr(types.int64), codegen

    return pointer


prefetch = _make_prefetch()          # (address): a hint to the cache; any address is allowed
_memcpy = _make_memcpy()
_memcmp = _make_memcmp()
_pointer = _make_pointer()


@internal()
def copy(destination: int, source: int, count: int) -> None:
    """Copy `count` bytes between addresses; the ranges must not overlap."""
    _memcpy(destination, source, count)


@internal()
def equal(first: int, second: int, count: int) -> bool:
    """True if `count` bytes at the two addresses are the same."""
    return _memcmp(first, second, count) == 0


@internal()
def int64s_at(address: int, count: int) -> np.ndarray:
    """int64[count] at an address, not owned."""
    return carray(_pointer(address), (count,), np.int64)


@internal()
def rows_at(address: int, rows: int, columns: int) -> np.ndarray:
    """int64[rows, columns] at an address, not owned."""
    return carray(_pointer(address), (rows, columns), np.int64)


@internal()
def int32s_at(address: int, count: int) -> np.ndarray:
    """int32[count] at an address, not owned."""
    return carray(_pointer(address), (count,), np.int32)


@internal()
def uint8s_at(address: int, count: int) -> np.ndarray:
    """uint8[count] at an address, not owned."""
    return carray(_pointer(address), (count,), np.uint8)


@internal()
def uint32s_at(address: int, count: int) -> np.ndarray:
    """uint32[count] at an address, which may be odd; native order, not owned."""
    return carray(_pointer(address), (count,), np.uint32)
