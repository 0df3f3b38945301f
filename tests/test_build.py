"""The native library: that it is built, found and loaded, and what is said where it is not."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import multihead as mh
from multihead.kernels import library

ROOT = Path(__file__).parents[1]
needs_library = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")


def ask(expressions: str, **environment: str) -> str:
    """What expressions give in a new process, printed."""
    code = f"import multihead as mh; from multihead.kernels import library; print({expressions})"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return run.stdout.strip()


@needs_library
def test_it_is_there():
    assert library.why_not() is None
    assert library.isa() in library.isas()
    assert set(library.isas()) <= {"avx512", "avx2", "baseline", "neon"}
    assert torch.ops.multihead.isa() == library.isa()
    if not os.environ.get("MULTIHEAD_ISA"):
        assert library.isa() == library.isas()[0]
    assert mh.doctor().facts["native"] == f"{library.isa()} (this CPU has {', '.join(library.isas())})"


@needs_library
def test_it_knows_what_the_cpu_has():
    """PyTorch asks the CPU by itself."""
    has = {"AVX2": {"avx2"}, "AVX512": {"avx2", "avx512"}}.get(torch.backends.cpu.get_cpu_capability(), set())
    assert has <= set(library.isas())


@needs_library
def test_isa_by_name():
    last = library.isas()[-1]
    assert ask("library.isa(), mh.doctor().healthy", MULTIHEAD_ISA=last) == f"{last} True"


@needs_library
def test_isa_that_this_cpu_lacks():
    lacking = next(name for name in ("avx512", "neon", "sse9") if name not in library.isas())
    said = ask("mh.doctor().facts['native'], mh.doctor().healthy", MULTIHEAD_ISA=lacking)
    assert said.startswith(f"none: MULTIHEAD_ISA: expected one of {', '.join(library.isas())} (")
    assert said.endswith(f"got {lacking}. Leave it out, and the best is taken. True")


def test_without_it():
    """As where no compiler was when multihead was installed: everything else works."""
    said = ask("library.available(), mh.doctor().facts['native'], mh.doctor().healthy", MULTIHEAD_LIBRARY="/no/such.so")
    assert said == "False none: MULTIHEAD_LIBRARY: expected a file, got /no/such.so True"


def test_not_built(monkeypatch, tmp_path):
    monkeypatch.delenv("MULTIHEAD_LIBRARY", raising=False)
    monkeypatch.setattr(mh, "__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "platform", "linux")
    assert (
        "Next: install one (g++ or clang++), then multihead again; where there is one, `make native`"
        in library._look().why_not
    )
    monkeypatch.setattr(sys, "platform", "darwin")
    assert library._look().why_not == "it is built on Linux only, for now"


def test_what_is_no_library(monkeypatch, tmp_path):
    (tmp_path / library.NAME).write_text("not one")
    monkeypatch.delenv("MULTIHEAD_LIBRARY", raising=False)
    monkeypatch.setattr(mh, "__path__", ["/no/such/folder", str(tmp_path)])
    assert f"{tmp_path / library.NAME} could not be loaded: " in library._look().why_not


def test_older_pytorch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert library._look().why_not == "it needs PyTorch 2.10 or newer, and this is 2.9.1+cpu"


def test_not_available(monkeypatch):
    monkeypatch.setattr(library, "_FOUND", library._Found(why_not="the reason"))
    assert not library.available()
    assert library.isas() == ()
    assert mh.doctor().facts["native"] == "none: the reason"
    with pytest.raises(RuntimeError, match="the reason"):
        library.isa()


@pytest.mark.skipif("libthreads.so" not in os.environ.get("LD_PRELOAD", ""), reason="it is for `make sanitize`")
def test_threads_are_watched():
    """The library shares its work with the threads of tests/threads.cpp, not with PyTorch's."""
    count = ctypes.c_uint32()
    ctypes.CDLL(None).torch_get_num_threads(ctypes.byref(count))  # what the library's own call finds first
    assert count.value == 4 != torch.get_num_threads()


TIMES = "template <int N> int times(int x) { return x * N; }"


@pytest.mark.skipif(
    not all(map(shutil.which, ("c++", "cmake", "nm"))), reason="there is no compiler, no cmake or no nm here"
)
@pytest.mark.parametrize(("inside", "outside"), [(TIMES, ""), ("", TIMES)], ids=["own", "shared"])
def test_no_weak_symbols(inside, outside, tmp_path):
    """The check that runs when the library is linked. Templates and inline functions are weak symbols."""
    made = tmp_path / "kernel_avx2.dir" / "kernel.o"
    made.parent.mkdir()
    source = f"namespace multihead {{ {outside} namespace avx2 {{ {inside} int f(int x) {{ return times<3>(x); }} }} }}"
    options = {"text": True, "timeout": 60, "env": {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}}
    subprocess.run(["c++", "-O0", "-xc++", "-c", "-", "-o", made], input=source, check=True, **options)
    check = ROOT / "csrc" / "no_weak.cmake"
    run = subprocess.run(["cmake", "-DNM=nm", "-P", check, "--", made], capture_output=True, check=False, **options)
    assert (run.returncode == 0) == (not outside)
    assert ("weak symbols" in run.stderr) == bool(outside)


@pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")
def test_a_library_of_another_version_is_left_alone(monkeypatch):
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    assert "is of another version of multihead" in library._look().why_not
