"""What the tests share: as few cores and threads on any machine, programs that say how they died, ports of their own.

Bits of a result depend on the number of threads, and a run gives each of its processes a share of the cores that it
sees: here these are two, and one thread everywhere, so that a small and a large machine compute the same. The models
are tiny, and threads that wait for one another on a busy machine make a run of half a minute one of ten.
"""
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tqdm import tqdm

os.environ |= {                                  # before torch is imported
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1",
    "no_proxy": "127.0.0.1,localhost"}
if hasattr(os, "sched_setaffinity"):             # others who test here at the same time have other numbers, mostly
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(os.getpid() + i) % len(cores)] for i in range(2)})
# tqdm's lock is one for all processes that are forked here: killed while it holds it, one would stop those after it.
os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))
started: list[subprocess.Popen] = []


def pytest_configure(config):
    """Whoever started the tests may be a rank. Not at import: ranks that tests start import this file too."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if "not slow" in config.getoption("markexpr"):       # the base tests; before huggingface_hub is imported
        os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session", autouse=True)
def own_cache(request, tmp_path_factory):
    """Targets are made anew and not in the user's folder, but for the large ones of the slow tests."""
    if "not slow" in request.config.getoption("markexpr"):
        os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_running():
    yield
    while started:
        if (process := started.pop()).poll() is None:
            end(process.pid, signal.SIGKILL)
            process.communicate()


def program(*command, processes: int = 0, **options) -> subprocess.Popen:
    """Start python with a script and its arguments, under torchrun where there are `processes`; output goes to a pipe.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
    started.append(subprocess.Popen([sys.executable, *torchrun, *map(str, command)], start_new_session=True, text=True,
                                    **options))
    return started[-1]


def end(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all below it, the lowest first."""
    with contextlib.suppress(OSError):           # one that has ended meanwhile
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            end(int(child), number)
        os.kill(pid, number)


def output_of(process: subprocess.Popen, timeout: float = 1200) -> str:
    """What a program printed, once it has ended well; else its last words, without torchrun's own about them. One that
    hangs is aborted, and each of its processes says where it was."""
    try:
        output = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        end(process.pid, signal.SIGABRT)
        output = f"{process.communicate()[0]}\naborted after {timeout} s"
    shown = re.sub(r"(?s)Traceback[^\n]*\n  File \"<frozen runpy>.*", "", output or "")[-6000:]
    assert process.returncode == 0, f"exit code {process.returncode}:\n{shown}"
    return output


@contextlib.contextmanager
def own_port():
    """A port that nobody else is given meanwhile: bound here and not listening, which lets one server bind it too."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
