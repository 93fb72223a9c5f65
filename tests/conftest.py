"""What all tests share."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No test is judged by its time: machines differ, and they are busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so their children; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What torch asks for where kernels on a GPU must give the same bits every time; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with more threads, many times so on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
