"""Compile the C++ kernels for this machine and keep the library. Refuses to know what the kernels compute.

One library per instruction set, in `$CHAIRLIFT_CACHE` or the user's cache folder. Its name holds a hash of all that
went into it, its last bytes a checksum of the rest: one file, put in place at once, tells if it is right and whole.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
X86 = ("x86_64", "AMD64")
COMPILERS = ("c++", "g++", "clang++")
CHECKSUM_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Isa:
    """An instruction set: the flags that make a compiler use it, and the CPU features it needs."""

    flags: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    machines: tuple[str, ...] = ()  # empty: any


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

ISAS = {  # the fastest first
    "avx512_bf16": Isa(flags=("-march=x86-64-v4", "-mavx512bf16"), features=_AVX512 | {"avx512_bf16"}, machines=X86),
    "avx512": Isa(flags=("-march=x86-64-v4",), features=_AVX512, machines=X86),
    "avx2": Isa(flags=("-march=x86-64-v3",), features=_AVX2, machines=X86),
    "neon": Isa(machines=("aarch64", "arm64")),
    "portable": Isa(),
}


class BuildError(RuntimeError):
    """The kernels cannot be had on this machine; the message says why."""


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine runs, the fastest first."""
    machine, features = platform.machine(), _cpu_features()
    return tuple(
        name for name, isa in ISAS.items() if machine in (isa.machines or (machine,)) and isa.features <= features
    )


def chosen_isa() -> str:
    """`$CHAIRLIFT_ISA`, else the fastest. Raises `ValueError` when this machine does not run it."""
    supported = supported_isas()
    chosen = os.environ.get("CHAIRLIFT_ISA") or supported[0]
    if chosen not in supported:
        raise ValueError(f"CHAIRLIFT_ISA={chosen} does not run on this machine; use one of {', '.join(supported)}")
    return chosen


def build(isa: str) -> Path:
    """The library for `isa`, compiled unless a good one is cached. Raises `BuildError` when there is no way to it."""
    compiler, openmp = _find_compiler(), openmp_library()
    sources = _hash(*(part for path in _source_files() for part in (path.name.encode(), path.read_bytes())))
    if compiler is None:
        return _without_compiler(isa, sources)
    recipe = [*compiler, *FLAGS, *ISAS[isa].flags]
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    name = f"kernels-{isa}-{sources}-{_hash(version, *map(os.fsencode, (*recipe, Path(openmp).name)))}.so"
    cached = cache_folder() / name
    if not _is_whole(cached):
        library = _with_checksum(_compile(recipe, openmp))
        if not _write(cached, library):
            cached = _process_folder() / name
            if not _write(cached, library):
                raise BuildError(f"neither {cache_folder()} nor {cached.parent} can be written; set CHAIRLIFT_CACHE")
    return cached


def cache_folder() -> Path:
    """Where libraries are kept: `$CHAIRLIFT_CACHE`, else `chairlift` in the user's cache folder."""
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "chairlift"


def openmp_library() -> str:
    """What to link for OpenMP: the file that this process has loaded (PyTorch's), so that there is one thread pool."""
    loaded = loaded_openmp_libraries()
    return next((path for path in loaded if "torch" in path), loaded[0] if loaded else "-lgomp")


def loaded_openmp_libraries() -> list[str]:
    """The OpenMP run-time libraries mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp5")))


@cache
def _cpu_features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))


def _find_compiler() -> list[str] | None:
    """`$CXX`, with whatever arguments it has, else the first known compiler on the path."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = shutil.which(named[0]) if named else next(filter(None, map(shutil.which, COMPILERS)), None)
    return [found, *named[1:]] if found else None


def _without_compiler(isa: str, sources: str) -> Path:
    """A library of these sources that was compiled earlier, by whatever compiler."""
    for path in sorted(cache_folder().glob(f"kernels-{isa}-{sources}-*.so")):
        if _is_whole(path):
            return path
    raise BuildError(
        f"no C++ compiler: {os.environ.get('CXX') or ', '.join(COMPILERS)} not found; install g++ or set CXX"
    )


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _compile(recipe: Sequence[str], openmp: str) -> bytes:
    """The library as the compiler makes it: all sources at once, each in a process of its own."""
    sources = [path for path in _source_files() if path.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(prefix="chairlift-") as folder, ThreadPoolExecutor(len(sources)) as pool:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        commands = [[*recipe, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        for _ in pool.map(_run, commands):
            pass
        library = Path(folder, "kernels.so")
        _run([*recipe, "-shared", *objects, openmp, "-o", str(library)])
        return library.read_bytes()


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if result.returncode:
        raise BuildError(f"{shlex.join(command)}\nfailed with status {result.returncode}:\n{result.stderr}")


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _with_checksum(library: bytes) -> bytes:
    return library + hashlib.sha256(library).digest()  # a loader does not look behind the sections of a library


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > CHECKSUM_BYTES and _with_checksum(content[:-CHECKSUM_BYTES]) == content


def _write(path: Path, content: bytes) -> bool:
    """Put `content` at `path` in one step, whoever else does the same; False where that is not allowed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot keep the compiled kernels in %s: %s", path.parent, error)
        return False
    return True


_folder: "tempfile.TemporaryDirectory[str] | None" = None


def _process_folder() -> Path:
    """A folder that ends with this process."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="chairlift-")
    return Path(_folder.name)
