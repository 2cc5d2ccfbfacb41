"""Compile the CUDA sources of csrc/cuda/kernels to the PTX texts that the core carries, *_ptx.inc.

NVRTC 12.9 does it (the extra `ptx`; it needs no GPU): the last one that targets sm_70. A driver of
any later device compiles this text on loading. The version in its header is lowered to what the
drivers of CUDA 11 read, which the instructions used allow.

    python tools/make_ptx.py           # write the files
    python tools/make_ptx.py --check   # only say whether they are what the sources give
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# By name of the CUDA source in csrc/cuda/kernels: the headers in csrc/cuda that it includes.
MODULES = {
    "pack": ("kernel_args.h",),
    "adasum": ("adasum_args.h", "kernel_args.h"),
}
# 7.0 came with CUDA 11.0, the first whose drivers NCCL 2.18 takes.
PTX_VERSION = "7.0"
OPTIONS = ("--gpu-architecture=compute_70", "--std=c++17", "--device-as-default-execution-space")
# Compilers limit the length of one string literal.
LITERAL_LINES = 200

HEADER = """\
// Made by tools/make_ptx.py from {module}.cu; do not edit. Pieces of one text, as initialisers.
// source: {digest}
"""


def sources(module: str) -> list[str]:
    """Name the files that a module is made from, the CUDA source first."""
    headers = [f"csrc/cuda/{name}" for name in MODULES[module]]
    return [f"csrc/cuda/kernels/{module}.cu", *headers]


def generated_file(module: str) -> Path:
    """Name the file that holds a module's PTX text."""
    return ROOT / f"csrc/cuda/kernels/{module}_ptx.inc"


def source_digest(module: str, root: Path = ROOT) -> str:
    """Hash what a generated file is made from.

    Returns:
        The SHA-256 of the sources and of what decides how they are compiled, in hexadecimal.
    """
    digest = hashlib.sha256(" ".join((PTX_VERSION, *OPTIONS)).encode())
    for name in sources(module):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def recorded_digest(generated: str) -> str:
    """Read the hash that a generated text was made from; "" where it names none."""
    match = re.search(r"(?m)^// source: ([0-9a-f]+)$", generated)
    return match.group(1) if match else ""


def ptx_of(generated: str) -> str:
    """Give back the PTX text that a generated file holds."""
    return "".join(re.findall(r'R"ptx\((.*?)\)ptx"', generated, re.DOTALL))


def wheel_file(name: str) -> Path | None:
    """Find a file of NVIDIA's wheels, below site-packages/nvidia; None when it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / name).exists():
            return Path(folder) / name
    return None


def nvrtc_library() -> Path | None:
    """Find the NVRTC of the wheel; None when it is not installed."""
    return wheel_file("cuda_nvrtc/lib/libnvrtc.so.12")


def compile_ptx(library: Path, module: str) -> str:
    """Compile the kernels of a module with NVRTC.

    Raises:
        RuntimeError: with the compiler's log, when the source has errors.
    """
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    path = ROOT / sources(module)[0]
    options = [option.encode() for option in (*OPTIONS, f"-I{ROOT / 'csrc'}")]
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None
    )
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    if status != 0:
        raise RuntimeError(_read(nvrtc, "ProgramLog", program))
    return _lower(_read(nvrtc, "PTX", program))


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def _lower(ptx: str) -> str:
    """Set the version that old drivers read; drop comments, empty lines, and a hint of PTX 8.3."""
    ptx = re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSION}", ptx)
    ptx = re.sub(r'(?m)^\s*\.pragma "used_bytes_mask .*";$', "", ptx)
    lines = (re.sub(r"\s*//.*", "", line) for line in ptx.splitlines())
    return "".join(f"{line}\n" for line in lines if line.strip())


def generate(module: str, ptx: str) -> str:
    """Wrap a module's PTX text for the core."""
    lines = ptx.splitlines(keepends=True)
    pieces = ["".join(lines[i : i + LITERAL_LINES]) for i in range(0, len(lines), LITERAL_LINES)]
    literals = "".join(f'R"ptx({piece})ptx",\n' for piece in pieces)
    return HEADER.format(module=module, digest=source_digest(module)) + literals


def main() -> int:
    """Write or check the generated files; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    library = nvrtc_library()
    if library is None:
        print("NVRTC 12.9 is missing: pip install 'hvdlite[ptx]'", file=sys.stderr)
        return 2
    status = 0
    for module in MODULES:
        text = generate(module, compile_ptx(library, module))
        path = generated_file(module)
        if not options.check:
            path.write_text(text)
        elif text != path.read_text():
            print(f"{path.relative_to(ROOT)} is not what its source gives", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
