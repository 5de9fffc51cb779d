"""The processes of a run: who they are, what they tell each other, and how they are asked to stop.

A plain `python train.py` is a world of one process and takes the same path as sixteen: same code, same collectives.
Where the processes meet (torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE) is the only thing read from the
environment.
Read next: train.py, which uses this.
"""
import contextlib
import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from targets import locked

PR_SET_PDEATHSIG = 1                    # prctl(2)
GROUP_TIMEOUT = timedelta(minutes=45)   # torch's 10 minutes expire while a 750 GB target is still loading


@dataclass(frozen=True)
class World:
    """This process among the others; a node's processes are its local ones."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device


def start_world() -> World:
    """Join the process group torchrun describes, or found one of one process. CUDA with NCCL, else CPU with gloo."""
    rank, size, local_rank, local_size = (int(os.environ.get(key, default)) for key, default in (
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)   # who kills torchrun leaves no worker that trains on
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    elif local_size > 1:                # the ranks share the machine's cores instead of fighting for them
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    # For the groups that an engine makes later, too; one that states a timeout of its own keeps it.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = GROUP_TIMEOUT
    if not dist.is_initialized():
        # torchrun's store outlives a restart, with the addresses of the dead in it: every attempt has its own names.
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", next(
            dist.rendezvous("env://"))[0]) if size > 1 else dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT, store=store, rank=rank,
                                world_size=size)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return World(rank, size, local_rank, local_size, device)


def end_world() -> None:
    """Leave the process group, if there is one: the last thing a program does.

    The threads of gloo let go of tensors a moment after a collective has returned; one that does so while the
    interpreter is shutting down aborts the process (SIGABRT), and the group's destruction is what waits for them.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)                # nothing is left that it could stop
    if dist.is_initialized():
        dist.destroy_process_group()


def say(text: str) -> None:
    """Print once, from rank 0, without tearing the progress bar."""
    if dist.get_rank() == 0:
        tqdm.write(text, file=sys.stderr)


def gather(value) -> list:
    """`value` of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(**facts) -> None:
    """Compare facts over all ranks (collective). SystemExit on all of them, naming the odd rank.

    A difference that went unnoticed would train nonsense or hang at some later collective.
    """
    everyone = gather({key: str(value) for key, value in facts.items()})
    for key in facts:
        common, _ = Counter(one[key] for one in everyone).most_common(1)[0]
        if odd := {rank: one[key] for rank, one in enumerate(everyone) if one[key] != common}:
            raise SystemExit(f"the ranks disagree on {key}: most have {common}, but "
                             + ", ".join(f"rank {rank} has {value}" for rank, value in odd.items())
                             + "; give every node the same code, recipe, data and checkpoints")


def first_here_then_others(world: World, function):
    """Call on the first rank of each node, then on its other ranks, which find on disk what the first built there.

    SystemExit with the sentence of an OSError or ValueError: what is called here reads files that a user provides.
    """
    try:
        for turn in (world.local_rank == 0, world.local_rank != 0):
            if turn:
                result = function()
            dist.barrier()
        return result
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


@contextlib.contextmanager
def alone_in(folder: Path, world: World) -> Iterator[None]:
    """Make `folder` and let one run at a time work in it: a second one waits here, and says so (collective)."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock") if world.rank == 0 else contextlib.nullcontext():
        dist.barrier()
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor behind a shard (a collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class StopRequest:
    """SIGTERM or Ctrl-C, remembered: calling it tells whether one came. The loop finishes its step, saves and exits 0.

    A second signal changes nothing (a terminal and torchrun both deliver Ctrl-C); SIGQUIT, Ctrl-\\, ends at once.
    """

    def __init__(self):
        self.came = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, number, frame) -> None:
        self.came = signal.Signals(number).name

    def __call__(self) -> bool:
        return bool(self.came)


@contextlib.contextmanager
def signals_restored():
    """Whatever handles SIGTERM and Ctrl-C inside, afterwards it is what it was before."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
