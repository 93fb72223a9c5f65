"""What all tests share."""

import os
import signal

from hypothesis import settings

# No test is judged by its time: machines differ, and they are busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so their children; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What torch asks for where kernels on a GPU must give the same bits every time; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
