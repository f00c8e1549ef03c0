"""The shapes that evidence is made for, listed once per op; compilation, timing and GPU checks all use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pallas_kernels.common.draw import Draw


class Cost(NamedTuple):
    """What a call must at least do: bytes moved to and from memory, floating-point operations (multiply-add = 2)."""

    nbytes: int
    flops: int


class Budget(NamedTuple):
    """What the compiled kernels of a case must keep.

    matrix: matrix instructions must be present. instructions: at least so many, so that an empty kernel fails.
    spill_bytes: at most so many bytes spilled. sort: whether the program may contain a sort.
    """

    matrix: bool
    instructions: int
    spill_bytes: int = 0
    sort: bool = False


class Update(NamedTuple):
    """An argument that a call updates in place: its position, and that of its new value among the results.

    result None: the new value is the whole result.
    """

    argument: int
    result: int | None = None

    def split(self, args: tuple) -> tuple[Any, tuple]:
        """(the argument, the others)."""
        return args[self.argument], (*args[: self.argument], *args[self.argument + 1 :])

    def join(self, updated: Any, others: tuple) -> tuple:
        """The inverse of `split`."""
        return (*others[: self.argument], updated, *others[self.argument :])

    def of(self, result: Any) -> Any:
        """The argument's new value."""
        return result if self.result is None else result[self.result]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op at one shape.

    args: (draw, small) -> inputs; `small` asks for the same kind of call at a size that interpretation finishes in a
    second. call: (*args, **options) -> result, where options are `implementation`, `interpret` and `config` of the
    public function. want: the same call on NumPy inputs, in float64 where results are not discrete. cost and shape are
    those of the full size.
    """

    op: str
    name: str
    args: Callable[[Draw, bool], tuple]
    call: Callable[..., Any]
    want: Callable[..., Any]
    cost: Cost
    budget: Budget
    update: Update | None = None  # in place
    tolerance: float = 0.0  # of the largest magnitude of `want`; 0 = equal
    short: bool = False  # part of the short AOT run: one shape per op and format
    configs: tuple[Any, ...] = ()  # tile configs that a sweep tries
    bucket: str = ""  # of the tuned table, where the fastest of them goes
    shape: Mapping[str, int | str] = dataclasses.field(default_factory=dict)  # for tables

    @property
    def key(self) -> str:
        """op/name, unique."""
        return f"{self.op}/{self.name}"
