"""Compile csrc/gpu/pack.cu to PTX, as pack.ptx beside it, which the core carries.

    python tools/make_ptx.py           # write the file
    python tools/make_ptx.py --check   # only check that it is up to date

The compiler is NVRTC 12.9 (the extra `ptx`; it needs no GPU), the last release that targets sm_70.
The driver of any later device compiles this PTX when the core loads it. The PTX version in the
header is lowered to one that drivers of CUDA 11 read; the kernels use no newer instruction.
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
# The CUDA source, and the header that it includes.
SOURCES = ("csrc/gpu/pack.cu", "csrc/gpu/kernel_args.h")
GENERATED = ROOT / "csrc/gpu/pack.ptx"
# PTX 7.0 came with CUDA 11.0, whose drivers are the oldest that NCCL 2.19 accepts.
PTX_VERSION = "7.0"
OPTIONS = ("--gpu-architecture=compute_70", "--std=c++17", "--device-as-default-execution-space")

HEADER = """\
// Made by tools/make_ptx.py from pack.cu; do not edit.
// source: {digest}
"""


def source_digest(root: Path = ROOT) -> str:
    """Return the SHA-256, in hexadecimal, of the sources and of the compiler's options."""
    digest = hashlib.sha256(" ".join((PTX_VERSION, *OPTIONS)).encode())
    for name in SOURCES:
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def recorded_digest(generated: str) -> str:
    """Return the digest of the sources that a generated text names; "" if it names none."""
    match = re.search(r"(?m)^// source: ([0-9a-f]+)$", generated)
    return match.group(1) if match else ""


def wheel_file(name: str) -> Path | None:
    """Find a file of NVIDIA's wheels below site-packages/nvidia; None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / name).exists():
            return Path(folder) / name
    return None


def nvrtc_library() -> Path | None:
    """Find the NVRTC of the wheel; None if it is not installed."""
    return wheel_file("cuda_nvrtc/lib/libnvrtc.so.12")


def compile_ptx(library: Path) -> str:
    """Compile the kernels with NVRTC, and return the text for the core to carry."""
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    path = ROOT / SOURCES[0]
    options = [option.encode() for option in (*OPTIONS, f"-I{ROOT / 'csrc'}")]
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None
    )
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    # The source has errors; the message is the compiler's log.
    if status != 0:
        raise RuntimeError(_read(nvrtc, "ProgramLog", program))
    return HEADER.format(digest=source_digest()) + _lower(_read(nvrtc, "PTX", program))


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def _lower(ptx: str) -> str:
    """Lower the PTX version; remove comments, empty lines, and a pragma that came with PTX 8.3."""
    ptx = re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSION}", ptx)
    ptx = re.sub(r'(?m)^\s*\.pragma "used_bytes_mask .*";$', "", ptx)
    lines = (re.sub(r"\s*//.*", "", line) for line in ptx.splitlines())
    return "".join(f"{line}\n" for line in lines if line.strip())


def main() -> int:
    """Write or check the generated file; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    library = nvrtc_library()
    if library is None:
        print("NVRTC 12.9 is missing: pip install 'hvdlite[ptx]'", file=sys.stderr)
        return 2
    text = compile_ptx(library)
    if not options.check:
        GENERATED.write_text(text)
    elif text != GENERATED.read_text():
        print(f"{GENERATED.relative_to(ROOT)} is out of date: run make ptx", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
