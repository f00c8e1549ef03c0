"""Facts of the KV formats that need no array library: names, codes, groups, bytes per row. `formats` does the packing.

Host code asks for sizes only, so nothing here may load JAX. A packed row is all element codes, then all scales.
Sources: docs/contract.md "Rounding of what is kept"; byte layouts: docs/cache.md "Rows".
"""

import dataclasses

# Bits of one code. "e8m0" is the power-of-two scale UE8M0.
CODE_BITS = {"e2m1": 4, "e4m3": 8, "e8m0": 8, "bfloat16": 16, "float32": 32}
E2M1_LARGEST = 6.0


@dataclasses.dataclass(frozen=True)
class FormatFacts:
    """One format. Hashable.

    name: registry key. element_code, scale_code: keys of `CODE_BITS`, no scale code = no scale.
    group: elements per scale, None = the whole row. amax_floor: smallest largest magnitude that a scale is made for.
    """

    name: str
    element_code: str
    scale_code: str | None
    group: int | None
    amax_floor: float

    def check_width(self, width: int) -> None:
        """Raises ValueError if rows of `width` elements cannot be packed."""
        if width < 1:
            raise ValueError(f"width {width} of a {self.name} row is not positive")
        if self.group is not None and width % self.group:
            raise ValueError(f"width {width} is not a multiple of the {self.name} group of {self.group}")

    def num_groups(self, width: int) -> int:
        """Groups, hence scales, of a row of `width` elements (1 where the whole row is one group)."""
        return 1 if self.group is None else width // self.group

    def row_bytes(self, width: int) -> int:
        """Bytes of one packed row of `width` elements."""
        self.check_width(width)
        scale_bits = 0 if self.scale_code is None else CODE_BITS[self.scale_code]
        return (width * CODE_BITS[self.element_code] + self.num_groups(width) * scale_bits) // 8


_E4M3_ELEMENT_FLOOR = 1e-4
_FACTS = {
    facts.name: facts
    for facts in (
        # amax / 6 stays at or above the smallest E4M3 subnormal.
        FormatFacts("fp4_e4m3", "e2m1", "e4m3", group=16, amax_floor=E2M1_LARGEST * 2.0**-9),
        # The scale stays at or above the smallest normal float32.
        FormatFacts("mxfp4", "e2m1", "e8m0", group=32, amax_floor=E2M1_LARGEST * 2.0**-126),
        FormatFacts("mxfp8", "e4m3", "e8m0", group=32, amax_floor=_E4M3_ELEMENT_FLOOR),
        FormatFacts("fp8_fp32", "e4m3", "float32", group=None, amax_floor=_E4M3_ELEMENT_FLOOR),
        FormatFacts("bf16", "bfloat16", None, group=None, amax_floor=0.0),
        FormatFacts("fp32", "float32", None, group=None, amax_floor=0.0),
    )
}

FORMAT_NAMES = tuple(_FACTS)


def format_facts(name: str) -> FormatFacts:
    """The facts of the format of that name; ValueError lists the known names otherwise."""
    if name not in _FACTS:
        raise ValueError(f"unknown KV format {name!r}; known formats: {', '.join(FORMAT_NAMES)}")
    return _FACTS[name]
