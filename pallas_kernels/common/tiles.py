"""Tile configurations: frozen, validated, and by default the tuned ones of the device and the shape bucket."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any, TypeVar

from pallas_kernels.common.devices import Device, current_target

MAX_WARPS = 32  # of one block: 1,024 threads
Config = TypeVar("Config")


def power_of_two(value: int) -> bool:
    """Whether value is 1, 2, 4, ...: what tile sizes and warp counts must be."""
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not below value >= 1."""
    return 1 << (value - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Fields of every kernel; an op adds its tile sizes and checks them in `problems`."""

    num_warps: int = 4
    num_stages: int = 1

    def problems(self) -> list[str]:
        """Rules that the fields break, one sentence part each."""
        broken = []
        if not power_of_two(self.num_warps) or self.num_warps > MAX_WARPS:
            broken.append(f"num_warps={self.num_warps} must be a power of two up to {MAX_WARPS}")
        if self.num_stages < 1:
            broken.append(f"num_stages={self.num_stages} must be at least 1")
        return broken

    def __post_init__(self) -> None:
        broken = self.problems()
        if broken:
            raise ValueError(f"{type(self).__name__}: {'; '.join(broken)}.")


def require_powers_of_two(config: Any, *names: str) -> list[str]:
    """A problem for each named field that is not a power of two."""
    return [f"{n}={getattr(config, n)} must be a power of two" for n in names if not power_of_two(getattr(config, n))]


def shared_memory_reasons(what: str, needed: int, device: Device | None = None) -> tuple[str, ...]:
    """The reason against a tile whose buffers exceed what a block of the device (None = the target's) may ask for."""
    device = device or current_target().device
    if device is None or needed <= device.block_shared_bytes:
        return ()
    limit = f"{device.block_shared_bytes:,} B of shared memory that a block has on {device.kind}"
    return (f"{what} needs {needed:,} B, more than the {limit}",)


def tuned(cls: type[Config], op: str, bucket: str, default: Config) -> Config:
    """The config that tuned/<device>.json holds for (op, bucket) of the current target; `default` where it has none."""
    device = current_target().device
    fields = {} if device is None else tuned_table(device.slug).get("ops", {}).get(op, {}).get(bucket, {})
    return dataclasses.replace(default, **fields) if fields else default


@functools.cache
def tuned_table(slug: str) -> dict[str, Any]:
    """Contents of tuned/<slug>.json; empty where the file does not exist."""
    file = resources.files("pallas_kernels") / "tuned" / f"{slug}.json"
    return json.loads(file.read_text()) if file.is_file() else {}
