"""Reads the text of a compiled program: what it launches, what it updates in place, what it copies. No JAX.

The text is XLA's, after all passes: one computation per block, one instruction per line, `ENTRY` the one that runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Cost nothing at run time: names for values, and the ends of what was started.
FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
    "partition-id", "replica-id", "fusion-done", "copy-done", "async-done", "custom-call-done",
})  # fmt: skip
CONTROL = frozenset({"while", "conditional", "call"})  # what they run is counted in the computations they name
IN_PLACE = frozenset({"scatter", "dynamic-update-slice"})  # write into the buffer of their first operand
BRANCHES = ("branch_computations", "true_computation", "false_computation")
COPY, SORT, PRODUCT, KERNEL, FUSION = "copy", "sort", "product", "kernel", "fusion"
TRITON = "__gpu$xla.gpu.triton"  # custom calls that hold a Pallas-Triton kernel

_HEADER = re.compile(r"(ENTRY )?%(\S+) \(.*\) -> .*\{$")
_LINE = re.compile(r"\s*(ROOT )?%(\S+) = ")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_BITS = {"pred": 8, "f8e4m3fn": 8, "f8e5m2": 8, "f8e8m0fnu": 8, "f4e2m1fn": 4}


class Instruction(NamedTuple):
    """One line. result: its type as text. op_name: the Python scopes it came from, "" if it has none."""

    name: str
    opcode: str
    result: str
    op_name: str
    text: str
    root: bool

    def called(self, key: str) -> list[str]:
        """Computations named after `key`, as in body=%name or branch_computations={%a, %b}."""
        found = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|(%\S+?)(?:,|\s|$))", self.text)
        return re.findall(r"%([^\s,}]+)", found[0]) if found else []

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        inside = self.text[self.text.index(self.opcode + "(") :]
        return re.findall(r"%([^\s,)]+)", inside[: inside.index(")")])


class Program(NamedTuple):
    """All computations by name, and the name of the entry."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]
    header: str


class Launch(NamedTuple):
    """One instruction that starts work on the device.

    kind: `KERNEL` (with its name after a colon), `PRODUCT`, `SORT`, `COPY`, `FUSION`, or the opcode or custom call.
    times: how often a run of the program starts it, see `launches`. scope: the op_name of the outermost loop or
    conditional that it runs in, if that has one, else its own: bodies that JAX lowers once name their first use.
    """

    name: str
    kind: str
    times: int
    scope: str


def parse(text: str) -> Program:
    """Reads a program. Raises ValueError for text without an entry."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = current = ""
    lines: list[Instruction] = []
    for line in text.splitlines():
        if not current:
            if header := _HEADER.match(line):
                current, lines = header[2], []
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            computations[current], current = tuple(lines), ""
        elif start := _LINE.match(line):
            lines.append(_instruction(start, line))
    if not entry:
        raise ValueError("the text has no ENTRY computation: it is not a compiled program of XLA.")
    return Program(entry, computations, text.split("\n", 1)[0])


def _instruction(start: re.Match, line: str) -> Instruction:
    rest = line[start.end() :]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    opcode = re.match(r"\s*([\w\-]+)\(", rest[end:])
    op_name = re.search(r'op_name="([^"]*)"', line)
    # Kernels are written into backend_config as code: megabytes that nothing here reads.
    text = re.sub(r"backend_config=\{debug = .*", "", line)
    scopes = op_name[1] if op_name else ""
    return Instruction(start[2], opcode[1] if opcode else "", rest[:end], scopes, text, bool(start[1]))


def _closing(text: str) -> int:
    """Length of the parenthesised start of `text`."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return at + 1
    return len(text)


def array_bytes(result: str) -> list[int]:
    """Bytes of every array in a type."""
    sizes = []
    for kind, dims in _ARRAY.findall(result):
        bits = _BITS.get(kind) or int(re.sub(r"^\D+", "", kind))
        sizes.append(math.prod(int(d) for d in dims.split(",") if d) * bits // 8)
    return sizes


def aliased_parameters(program: Program) -> set[str]:
    """Scopes (as "cache.pages") of the entry's parameters whose buffer a result of the program takes over."""
    header = re.search(r"input_output_alias=\{(.*?)\}, \w+=", program.header)
    numbers = set(re.findall(r": \((\d+), ", header[1])) if header else set()
    entry = program.computations[program.entry]
    number = lambda i: re.search(r" parameter\((\d+)\)", i.text)[1]  # noqa: E731
    return {i.op_name for i in entry if i.opcode == "parameter" and number(i) in numbers}


def launches(program: Program) -> list[Launch]:
    """Everything that the program starts on the device, each place in the program once.

    times: loops of known length multiply, and their condition is never evaluated; one of unknown length counts as a
    single round. Of the branches of a conditional the one that launches most counts, the others get 0.
    """
    return list(_launches(program, program.entry, 1, ""))


def _launches(program: Program, computation: str, times: int, scope: str) -> Iterator[Launch]:
    for one in program.computations[computation]:
        where = scope or one.op_name
        if one.opcode == "while":
            rounds = trip_count(one)
            parts = one.called("body") + (one.called("condition") if rounds is None else [])
            for part in parts:
                yield from _launches(program, part, times * (rounds or 1), where)
        elif one.opcode == "conditional":
            branches = [part for key in BRANCHES for part in one.called(key)]
            found = [list(_launches(program, branch, times, where)) for branch in branches]
            dearest = max(found, key=lambda branch: sum(launch.times for launch in branch))
            for branch in found:
                yield from branch if branch is dearest else (launch._replace(times=0) for launch in branch)
        elif one.opcode == "call":
            for part in one.called("to_apply"):
                yield from _launches(program, part, times, where)
        elif one.opcode not in FREE:
            yield Launch(one.name, _kind(program, one), times, where)


def loops(program: Program) -> list[tuple[Instruction, str]]:
    """All loops that are reached from the entry, each with its scope as in `Launch`."""
    return [(one, scope) for one, scope in _reached(program, program.entry, "") if one.opcode == "while"]


def trip_count(loop: Instruction) -> int | None:
    """Rounds of a loop, None where the compiler does not know them."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text)
    return int(found[1]) if found else None


def _reached(program: Program, computation: str, scope: str) -> Iterator[tuple[Instruction, str]]:
    """Instructions of the computation and of what its loops, conditionals and calls run; not those inside fusions."""
    for one in program.computations[computation]:
        where = scope or one.op_name
        yield one, where
        if one.opcode in CONTROL:
            for part in (part for key in ("body", "condition", *BRANCHES, "to_apply") for part in one.called(key)):
                yield from _reached(program, part, where)


def _kind(program: Program, one: Instruction) -> str:
    if one.opcode in ("custom-call", "custom-call-start"):
        target = re.search(r'custom_call_target="([^"]*)"', one.text)[1]
        parts = one.op_name.split("/")
        return f"{KERNEL}:{parts[-2]}" if target == TRITON and len(parts) > 1 else target
    if one.opcode.startswith("copy"):
        return COPY
    if not one.opcode.startswith("fusion"):
        return {"sort": SORT, "dot": PRODUCT}.get(one.opcode, one.opcode)
    inside = {i.opcode for part in one.called("calls") for i in program.computations[part]}
    return SORT if "sort" in inside else PRODUCT if "dot" in inside else FUSION


def copies_of(program: Program, nbytes: int) -> list[str]:
    """Launched instructions that write a whole array of `nbytes` bytes anew, instead of into the array's own buffer."""
    found = []
    for one, _ in _reached(program, program.entry, ""):
        if one.opcode in FREE | CONTROL | IN_PLACE or nbytes not in array_bytes(one.result):
            continue
        if not _in_place(program, one, nbytes):
            found.append(f"{one.name}: {one.opcode} of {one.result} ({one.op_name or 'inserted by the compiler'})")
    return found


def _in_place(program: Program, one: Instruction, nbytes: int) -> bool:
    if one.opcode.startswith("custom-call"):
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", one.text)
        aliased = {int(number or 0) for number in re.findall(r"\{(\d*)\}: ", found[1])} if found else set()
        return all(at in aliased for at, size in enumerate(array_bytes(one.result)) if size == nbytes)
    if not one.opcode.startswith("fusion"):
        return False
    inside = {i.name: i for part in one.called("calls") for i in program.computations[part]}
    (root,) = (i for i in inside.values() if i.root)
    outputs = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = [_behind_bitcasts(inside, out) for out in outputs if nbytes in array_bytes(out.result)]
    return all(out.opcode in IN_PLACE for out in written)


def _behind_bitcasts(inside: dict[str, Instruction], out: Instruction) -> Instruction:
    while out.opcode == "bitcast":
        out = inside[out.operands[0]]
    return out
