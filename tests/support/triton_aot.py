"""Triton kernels compiled for GPUs that are not here: the instructions, and what ptxas reports of them.

ptxas comes with Triton's wheel. Not covered: what a driver's own compiler does, and any time.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = {"sm_90a": 90, "sm_100a": 100}  # Hopper (H100, H200), Blackwell (B200)
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one target."""

    ptx: str
    registers: int  # of a thread
    shared: int  # bytes of a program
    spills: int  # bytes that a thread stores to and loads from local memory for want of registers
    threads: int  # of a program

    def count(self, instruction: str) -> int:
        """Instructions of the PTX that begin with `instruction`, such as "cvt.rn.satfinite.e4m3x2.f32"."""
        return len(re.findall(rf"^\s*(?:@\S+ )?{re.escape(instruction)}", self.ptx, re.MULTILINE))


def compiled(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], target: str, **options: Any
) -> Compiled:
    """A `triton.jit` function for `target`, a key of `TARGETS`.

    signature: parameter -> Triton's type, such as "*bf16" or "i32"; a parameter in `constants` is a constexpr.
    Pointers, and integers whose type ends in ":16" ("i32:16"), are taken for multiples of 16, as Triton's launcher
    finds them. options: num_warps, enable_fp_fusion and others of a launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    types = {n: "constexpr" if n in constants else signature[n].partition(":")[0] for n in names}
    whole = [n for n in names if n not in constants and (signature[n][0] == "*" or signature[n].endswith(":16"))]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in whole}
    source = ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()}, attributes)
    arch = TARGETS[target]
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, **options})
    ptx = str(built.asm["ptx"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={target}",
            str(path),
            "-o",
            str(Path(folder, "kernel.cubin")),
        ]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, spilled = _USED.search(log), _SPILLED.search(log)
    assert registers is not None and spilled is not None, log
    spills = int(spilled[1]) + int(spilled[2])
    threads = 32 * int(built.metadata.num_warps)
    return Compiled(ptx, int(registers[1]), int(built.metadata.shared), spills, threads)
