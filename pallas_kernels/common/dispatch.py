"""Which implementation of an op runs: the best one that can, or the one that was named, or an error that says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from jax import lax

from pallas_kernels.common.devices import SMALLEST_CAPABILITY, current_target

Implementation = Literal["xla", "pallas_triton", "pallas_mosaic_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


class UnsupportedError(ValueError):
    """A named implementation cannot serve the call; the message lists every reason."""


class Kernel(NamedTuple):
    """A kernel that may serve a call. reasons: why it cannot, one clause each; empty = it can."""

    run: Callable[..., Any]
    reasons: tuple[str, ...]


def dispatch(
    op: str,
    implementation: Implementation | None,
    xla: Callable[..., Any],
    kernels: Mapping[str, Kernel],
    *args: Any,
    interpret: bool = False,
) -> Any:
    """Runs `args` through one implementation of `op`; all of them take the same arguments.

    None: the first of `kernels` without a reason against it where the program is compiled for CUDA, `xla` elsewhere
    and where there is none, so one traced program serves both. A name: exactly that one. interpret: the named kernel is
    interpreted, on any platform.

    Raises ValueError for an unknown name, UnsupportedError where the named kernel cannot serve the call.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation={implementation!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}.")
    if interpret and implementation in (None, "xla"):
        raise ValueError(f"{op}: interpret=True interprets a kernel, so implementation must name one.")
    if implementation == "xla":
        return xla(*args)
    if implementation is None:
        kernel = next((k for k in kernels.values() if not k.reasons), None)
        return xla(*args) if kernel is None else lax.platform_dependent(*args, cuda=kernel.run, default=xla)
    if implementation not in kernels:
        have = ", ".join(["xla", *kernels])
        raise UnsupportedError(f"{op}: implementation={implementation!r} does not exist for this op; it has: {have}.")
    kernel = kernels[implementation]
    reasons = (*kernel.reasons, *(() if interpret else _platform_reasons()))
    if reasons:
        raise UnsupportedError(f"{op}: implementation={implementation!r} cannot serve this call: {'; '.join(reasons)}.")
    return kernel.run(*args)


def _platform_reasons() -> tuple[str, ...]:
    target = current_target()
    if target.platform not in ("gpu", "cuda"):
        return (f"the platform is {target.platform}, not an NVIDIA GPU (interpret=True runs it anywhere, slowly)",)
    if target.device is not None and target.device.capability < SMALLEST_CAPABILITY:
        return (f"{target.kind} is older than compute capability {SMALLEST_CAPABILITY / 10}",)
    return ()
