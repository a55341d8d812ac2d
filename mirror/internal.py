"""Functions that only kernels call: compiled once for each kind of memory that they are given, and for kernels alone.

numba compiles a function anew for every literal and every width of integer among a call's arguments, and makes
wrappers for each with which Python could call it. For the many small functions behind a kernel that was more than
half of the compiler's time, which a daemon spends before it first listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.extending import models, register_model

__all__ = ["internal"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _plain(kind: types.Type) -> types.Type:
    """An argument's type without its value, and with 64 bits if it is a signed integer."""
    kind = types.unliteral(kind)
    return types.int64 if kind in types.signed_domain else kind


class _Type(types.Dispatcher):
    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        return super().get_call_type(
            context, tuple(_plain(kind) for kind in args), {name: _plain(kind) for name, kind in kws.items()}
        )


register_model(_Type)(models.OpaqueModel)


class _Inner:
    """What a kernel calls. To Python it is no function: without wrapper a call would end the process."""

    def __init__(self, function: Callable[..., Any], forceinline: bool) -> None:
        # numba hands `forceinline` on to whatever it compiles meanwhile, if that does not say otherwise.
        options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": forceinline}
        self._kernel = njit(cache=True, nogil=True, **options)(function)
        self._numba_type_ = _Type(self._kernel)  # refers to it weakly


def internal(*, forceinline: bool = False) -> Callable[[_Function], _Function]:
    """Decorator of a function for kernels. forceinline: into every caller, whatever its size."""

    def decorate(function: _Function) -> _Function:
        return cast(_Function, _Inner(function, forceinline))

    return decorate
