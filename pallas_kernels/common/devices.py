"""Facts of the GPUs that kernels are compiled and tuned for: the one owner of their limits and rates.

Sources: NVIDIA's data sheets (memory, bandwidth, dense matrix rates, clocks) and the CUDA programming guide (shared
memory per block and per core). Rates are upper bounds of a device, not measurements.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import get_abstract_mesh


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of GPU. Bytes, bytes per second, operations per second (a multiply-add is two)."""

    kind: str  # as the driver spells it
    slug: str  # names tuned/<slug>.json
    capability: int  # 90 = compute capability 9.0
    cores: int  # streaming multiprocessors
    core_shared_bytes: int
    block_shared_bytes: int  # the most that one block may ask for
    bandwidth: float
    bf16_flops: float
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int

    @property
    def arch(self) -> str:
        """Name of its AOT table, e.g. "sm_90"."""
        return f"sm_{self.capability}"


DEVICES = (
    Device(
        "NVIDIA A100-SXM4-80GB", "a100", 80, cores=108, core_shared_bytes=167_936, block_shared_bytes=166_912,
        bandwidth=2.039e12, bf16_flops=312e12, l2_bytes=41_943_040, clock_ghz=1.41, memory_bytes=85_899_345_920,
    ),
    Device(
        "NVIDIA H200", "h200", 90, cores=132, core_shared_bytes=233_472, block_shared_bytes=232_448,
        bandwidth=4.8e12, bf16_flops=989e12, l2_bytes=62_914_560, clock_ghz=1.98, memory_bytes=150_754_820_096,
    ),
    Device(
        "NVIDIA B200", "b200", 100, cores=148, core_shared_bytes=233_472, block_shared_bytes=232_448,
        bandwidth=8.0e12, bf16_flops=2250e12, l2_bytes=132_644_864, clock_ghz=1.965, memory_bytes=191_510_806_528,
    ),
)  # fmt: skip
SMALLEST_CAPABILITY = 80  # of the kernels: asynchronous copies and bfloat16 matrix instructions


@dataclasses.dataclass(frozen=True)
class Target:
    """What the current trace is for. `device` is None on a CPU and on a GPU of unknown kind."""

    platform: str  # "cpu", "gpu", ...
    kind: str
    device: Device | None


def current_target() -> Target:
    """The device of the abstract mesh in force (ahead-of-time compilation names one), else the default backend's."""
    abstract = get_abstract_mesh().abstract_device
    if abstract is not None:
        return Target(abstract.platform, abstract.device_kind, _by_kind(abstract.device_kind))
    device = jax.devices()[0]
    return Target(device.platform, device.device_kind, _by_kind(device.device_kind))


def device_for(name: str) -> Device:
    """The device of that arch ("sm_90") or slug ("h200"); ValueError lists both otherwise."""
    for device in DEVICES:
        if name in (device.arch, device.slug):
            return device
    known = ", ".join(f"{d.arch} ({d.slug})" for d in DEVICES)
    raise ValueError(f"device={name!r} is not one that kernels are compiled for; known: {known}.")


def _by_kind(kind: str) -> Device | None:
    """Exact name first; a sister of the same generation ("NVIDIA H100 ...") shares its limits and tiles."""
    sisters = {"A100": "a100", "H100": "h200", "H200": "h200", "GH200": "h200", "B200": "b200", "GB200": "b200"}
    for device in DEVICES:
        if device.kind == kind:
            return device
    for word in kind.replace("-", " ").split():
        if word in sisters:
            return device_for(sisters[word])
    return None
