"""Compiling the kernels on bad machines: no compiler, no room, broken files, two processes, other instruction sets."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chairlift.kernels import build
from chairlift.kernels import native as ops

ISA = "portable"  # the same everywhere
QUICK = tuple(flag for flag in build.FLAGS if flag != "-O3")  # where a test compiles for real

CHILD = f"""
import torch
from chairlift.kernels import build, native as ops
build.FLAGS = {QUICK}
kernels = ops.load("portable")
print(float(kernels.linear(torch.ones(2, 30), kernels.pack(torch.ones(5, 30))).sum()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filled(folder: Path) -> Path:
    """A cache folder with a good library in it; returns the library."""
    good = _library()
    target = folder / good.name
    folder.mkdir()
    target.write_bytes(good.read_bytes())
    return target


def _library() -> Path:
    """A library of these sources, from the cache that the whole run shares."""
    chosen = os.environ.pop("CHAIRLIFT_CACHE", None)
    try:
        return build.build(ISA)
    finally:
        if chosen is not None:
            os.environ["CHAIRLIFT_CACHE"] = chosen


@pytest.fixture
def must_not_compile(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))


def works(path: Path) -> bool:
    kernels = ops.Native(path)
    return float(kernels.linear(torch.ones(2, 30), kernels.pack(torch.ones(5, 30))).sum()) == 300


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


# The cache ----------------------------------------------------------------------------------------------------------


def test_a_library_is_compiled_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", QUICK)
    first = build.build(ISA)
    assert first.parent == folder and works(first)
    assert [path.name for path in folder.iterdir()] == [first.name]
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.build(ISA) == first


@pytest.mark.usefixtures("must_not_compile")
def test_a_kept_library_serves(filled: Path) -> None:
    assert build.build(ISA) == filled
    assert works(filled)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        lambda content: content + b"\0",
    ],
    ids=["cut short", "empty", "one bit", "longer"],
)
def test_a_corrupted_library_is_replaced(
    filled: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    content = filled.read_bytes()
    filled.write_bytes(damage(content))
    monkeypatch.setattr(build, "_compile", lambda *_: content[: -build.CHECKSUM_BYTES])
    assert build.build(ISA) == filled
    assert filled.read_bytes() == content


@pytest.mark.parametrize("change", ["sources", "flags", "compiler"])
def test_what_goes_into_a_library_names_it(
    filled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    if change == "sources":
        other = tmp_path / "csrc"
        other.mkdir()
        for path in build.SOURCES.iterdir():
            (other / path.name).write_bytes(path.read_bytes())
        (other / "simd.h").write_text((build.SOURCES / "simd.h").read_text() + "// changed\n")
        monkeypatch.setattr(build, "SOURCES", other)
    elif change == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    else:
        fake = tmp_path / "c++"
        fake.write_text("#!/bin/sh\necho fake 1.0\n")
        fake.chmod(0o755)
        monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setattr(build, "_compile", lambda *_: b"library")
    assert build.build(ISA).name != filled.name


def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where the folder should be: as unwritable as a read-only one, for root too."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "file" / "cache"))
    content = _library().read_bytes()[: -build.CHECKSUM_BYTES]
    monkeypatch.setattr(build, "_compile", lambda *_: content)
    with caplog.at_level(logging.WARNING):
        path = build.build(ISA)
    assert works(path)
    assert f"cannot keep the compiled kernels in {tmp_path}/file/cache" in caplog.text


def test_two_processes_at_once(folder: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [child.communicate() for child in children]
    assert results == [("300.0\n", ""), ("300.0\n", "")]
    assert len(list(folder.iterdir())) == 1


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_folder() == Path("/somewhere/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == Path.home() / ".cache" / "chairlift"


# Compilers ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: c\+\+, g\+\+, clang\+\+ not found; install g\+\+"):
        build.build(ISA)


@pytest.mark.usefixtures("folder")
def test_without_a_compiler_one_warning_and_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_compilers(monkeypatch)
    ops.native.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert ops.native() is None
            assert ops.native() is None
    finally:
        ops.native.cache_clear()
    assert [record.getMessage()[:22] for record in caplog.records] == ["no native CPU kernels,"]


@pytest.mark.usefixtures("must_not_compile")
def test_without_a_compiler_a_kept_library_serves(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)
    assert build.build(ISA) == filled


@pytest.mark.usefixtures("folder")
def test_a_compiler_named_but_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build(ISA)


@pytest.mark.usefixtures("folder")
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(ISA)


def test_the_sources_compile_without_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick: each source for itself, not optimised."""
    compiler = build._find_compiler()
    assert compiler is not None
    for source in build.SOURCES.glob("*.cpp"):
        command = [*compiler, *QUICK, "-Werror", "-fsyntax-only", str(source)]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""


# Instruction sets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", build.supported_isas())
def test_an_instruction_set_can_be_forced(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_ISA", isa)
    assert build.chosen_isa() == isa
    assert ops.load(isa).isa == isa


@pytest.mark.parametrize("isa", ["avx9000", "AVX2"])
def test_an_unknown_instruction_set_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_ISA", isa)
    ops.native.cache_clear()
    with pytest.raises(ValueError, match=rf"CHAIRLIFT_ISA={isa} does not run on this machine; use one of .*portable"):
        ops.native()


def test_an_old_cpu_gets_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("CHAIRLIFT_ISA", raising=False)
    avx2 = build.ISAS["avx2"].features
    for features, expected in [(frozenset[str](), "portable"), (avx2 - {"f16c"}, "portable"), (avx2, "avx2")]:
        monkeypatch.setattr(build, "_cpu_features", lambda features=features: features)
        assert build.chosen_isa() == expected
    monkeypatch.setenv("CHAIRLIFT_ISA", "avx512")
    with pytest.raises(
        ValueError, match="CHAIRLIFT_ISA=avx512 does not run on this machine; use one of avx2, portable"
    ):
        build.chosen_isa()
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    monkeypatch.delenv("CHAIRLIFT_ISA")
    assert build.chosen_isa() == "neon"
