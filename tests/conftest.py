"""What all tests share."""

from __future__ import annotations

import pytest
import torch

from multihead.kernels import library


@pytest.fixture(autouse=True)
def one_thread():
    """Tests are small, and run beside others: one thread is the fastest. A test of threads sets its own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_native(monkeypatch):
    """As where the native library was not built: for what the other kernels do where they are chosen."""
    monkeypatch.setattr(library, "_FOUND", library._Found(why_not="this test does without"))


@pytest.fixture(params=[True, False], ids=["native", "without native"])
def native(request):
    """Whether there is the native library. A test that takes this runs twice, once as where it was not built."""
    if not request.param:
        request.getfixturevalue("without_native")
    elif not library.available():
        pytest.skip(f"there is no native library: {library.why_not()}")
    return request.param
