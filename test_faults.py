"""Runs that are killed from outside: `python test_faults.py kills 100 [processes]`, and what pytest does with fewer.

A life is a forked process per rank in a process group of its own; its death is SIGKILL to that group.
"""
import dataclasses
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"              # before numpy starts threads, which do not survive a fork
import pytest  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import checkpoint  # noqa: E402
import train  # noqa: E402
from conftest import output_of, own_port, program, started  # noqa: E402
from recipe import RECIPES, Recipe  # noqa: E402

HERE = Path(__file__).resolve().parent
INTERVAL = 2                                     # steps between checkpoints
PATIENCE = 600                                   # seconds after which a wait is given up: only a hang takes so long


def tiny_recipe(folder: Path) -> Recipe:
    """24 steps on a corpus of random words."""
    draw, rows = random.Random(0), []
    for i in range(34):
        words = " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(12 + i % 7))
        rows.append({"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": words}]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataclasses.replace(RECIPES["tiny"], corpus=str(folder / "chats.jsonl"), corpus_size=0, epochs=6,
                               save_every=INTERVAL)


def live(recipe: Recipe, out: Path, log: Path, processes: int, port: int) -> list[int]:
    """Start a life; the process ids of its ranks, of which the first is that of the group."""
    pids = []
    for rank in range(processes):
        if pid := os.fork():
            pids.append(pid)
            os.setpgid(pid, pids[0])             # here and there: whoever is first
            continue
        os.setpgid(0, pids[0] if pids else 0)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        for key, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", processes),
                           ("LOCAL_WORLD_SIZE", processes), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            os.environ[key] = str(value)
        status = 1
        try:
            train.train(recipe, out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pids


def wait_all(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def last_step(out: Path) -> int:
    """The last whole line of metrics.jsonl."""
    path = out / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return json.loads(whole.rpartition("\n")[2])["step"] if whole else 0


def unfinished(out: Path) -> set:
    """Checkpoints that were being written or removed: name and inode."""
    return {(path.name, path.stat().st_ino) for path in out.glob(".step_*")}


def kill_somewhere(pids: list[int], out: Path, draw: random.Random) -> bool:
    """SIGKILL to the group: one in ten dies while it starts, the others within two steps after a few more steps. False
    if the run was over before."""
    enough = 0 if draw.random() < 0.1 else last_step(out) + draw.randint(0, 5)
    delay, deadline = draw.uniform(0, 0.5 if enough == 0 else 0.12), time.time() + PATIENCE
    started = time.time()
    while last_step(out) < enough or (enough and time.time() - started < 0.2):
        if all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            wait_all(pids)
            return False
        assert time.time() < deadline, "no progress for ten minutes"
        time.sleep(0.002)
    time.sleep(delay)
    os.killpg(pids[0], signal.SIGKILL)
    return -signal.SIGKILL in wait_all(pids)


def kills(port: int, count: int, processes: int = 1, seed: int = 0) -> str:
    """Kill a run `count` times; whenever one comes to its end, its weights must be those of a run nobody touched."""
    folder, draw = Path(tempfile.mkdtemp(prefix="kills-")), random.Random(seed)
    os.chdir(folder)                             # data/ is made here
    recipe, out, log = tiny_recipe(folder), folder / "out", folder / "log"
    assert wait_all(live(recipe, folder / "untouched", log, processes, port)) == [0] * processes, log.read_text()
    expected = load_file(folder / "untouched" / "latest" / "model.safetensors")
    killed = finished = in_save = 0
    lost = []                                    # steps that each resume had to repeat
    while True:
        before, unfinished_before = last_step(out), unfinished(out)
        log.write_text("")
        pids = live(recipe, out, log, processes, port)
        over = killed >= count
        if not over and kill_somewhere(pids, out, draw):
            killed += 1
            in_save += not unfinished(out) <= unfinished_before
        elif over:
            assert wait_all(pids) == [0] * processes, log.read_text()
        said = log.read_text()
        assert not re.search("damaged|Traceback|start fresh|re-warm", said), said
        if resumed := re.search(r"resumed at step (\d+)", said):
            lost.append(before - int(resumed[1]))
            assert 0 <= lost[-1] <= INTERVAL, (before, said)
        for step in checkpoint.steps_in(out):
            damage = checkpoint.damage(out / f"step_{step}")
            assert not damage, f"step_{step}: {damage}"
        if last_step(out) == 24 and (out / "step_24").exists() and (out / "latest").resolve().name == "step_24":
            weights = load_file(out / "latest" / "model.safetensors")
            assert weights.keys() == expected.keys() and all(weights[k].equal(expected[k]) for k in expected)
            finished += 1
            if over:
                break
            shutil.rmtree(out)
    shutil.rmtree(folder)
    return (f"{killed} kills, {in_save} of them while saving, {processes} process(es): {len(lost)} resumes, "
            f"{sum(lost) / max(1, len(lost)):.1f} steps repeated on average and {max(lost, default=0)} at most; "
            f"{finished} runs came to their end, all with the weights of a run nobody touched")


def test_kills():
    """Ten kills, two processes; the script by itself does a hundred."""
    assert "10 kills" in output_of(program(HERE / "test_faults.py", "kills", 10, 2))


@pytest.fixture
def port():
    with own_port() as free:
        yield free


def make_node(folder: Path, corpus: Path) -> Path:
    """A clone as a node of its own has it: the code, a recipe on that corpus, its own out/ and data/; its .venv is this
    environment, with nothing left to set up."""
    (folder / ".venv").mkdir(parents=True)
    for path in [*HERE.glob("*.py"), *HERE.glob("requirements*.txt"), HERE / "run.sh"]:
        shutil.copy(path, folder)
    for path in Path(sys.prefix).iterdir():
        (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / "requirements.done").unlink(missing_ok=True)
    shutil.copy(HERE / "requirements.txt", folder / ".venv" / "requirements.done")
    with (folder / "recipe.py").open("a") as file:
        file.write(f"RECIPES['nodes'] = dataclasses.replace(TINY, name='nodes', corpus={str(corpus)!r}, corpus_size=0, "
                   f"epochs=20, save_every={INTERVAL}, keep_checkpoints=99)\n")
    return folder


def run_sh(node: Path, *words) -> subprocess.Popen:
    """`bash run.sh WORDS` in a node's folder, in a process group of its own, its output in the file said."""
    started.append(subprocess.Popen(["bash", "run.sh", *map(str, words)], cwd=node, start_new_session=True,
                                    stdout=(node / "said").open("w"), stderr=subprocess.STDOUT))
    return started[-1]


def on_both(nodes: list[Path], port: int, command: str, *words) -> list[subprocess.Popen]:
    return [run_sh(node, command, "nodes", "--nnodes", 2, "--node-rank", rank, "--master", "127.0.0.1", "--port", port,
                   "--nproc", 1, *words) for rank, node in enumerate(nodes)]


def reach(processes: list[subprocess.Popen], nodes: list[Path], step: int) -> None:
    deadline = time.time() + PATIENCE
    while last_step(nodes[0] / "out" / "nodes") < step:
        assert time.time() < deadline and all(p.poll() is None for p in processes), say(nodes)
        time.sleep(0.005)


def all_well(processes: list[subprocess.Popen], nodes: list[Path]) -> bool:
    """Whether all end with 0."""
    deadline = time.time() + PATIENCE
    while any(p.poll() is None for p in processes):
        assert time.time() < deadline, say(nodes)
        time.sleep(0.005)
    return not any(p.returncode for p in processes)


def kill(leaders: list[int], others: tuple[int, ...] = ()) -> None:
    """SIGKILL to process groups. Afterwards their leaders are dead, and so are `others`, which follow them into death:
    until then they may still save."""
    handles = [os.pidfd_open(pid) for pid in (*leaders, *others)]
    for pid in leaders:
        os.killpg(pid, signal.SIGKILL)
    for handle in handles:
        select.select([handle], [], [])
        os.close(handle)


def worker_of(process: subprocess.Popen) -> int:
    """The training process below `bash run.sh train`."""
    launcher = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1]
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text())


def say(nodes: list[Path]) -> str:
    return "\n".join(f"{node.name}: {(node / 'said').read_text()}" for node in nodes)


def files(node: Path, step: int) -> set[str]:
    folder = node / "out" / "nodes" / f"step_{step}"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_two_nodes_with_disks_of_their_own(tmp_path, port):
    """Two `run.sh train` on loopback. A killed worker: both restart and resume. Both nodes killed, one of them a step
    behind: both resume at the older one. SIGTERM to one: both save and exit 0. Then sync, and one node goes on alone.
    """
    tiny_recipe(tmp_path)
    nodes = [make_node(tmp_path / f"node_{i}", tmp_path / "chats.jsonl") for i in range(2)]
    outs = [node / "out" / "nodes" for node in nodes]

    running = on_both(nodes, port, "train", "--max-restarts", 1)
    reach(running, nodes, 5)
    kill([worker_of(running[1])])
    reach(running, nodes, last_step(outs[0]) + 9)
    kill([process.pid for process in running], tuple(map(worker_of, running)))
    assert "resumed at step" in say(nodes[:1]), say(nodes)

    newest = checkpoint.steps_in(outs[0])[-1]
    for step in checkpoint.steps_in(outs[1])[-2:]:
        shutil.rmtree(outs[1] / f"step_{step}")
    common = checkpoint.steps_in(outs[1])[-1]
    assert common < newest and {"state/__0_0.distcp"} == files(nodes[0], common) - files(nodes[1], common)
    running = on_both(nodes, port, "train")
    reach(running, nodes, newest + 4)
    os.kill(running[1].pid, signal.SIGTERM)
    assert all_well(running, nodes), say(nodes)
    assert f"resumed at step {common}\n" in say(nodes) and (outs[0] / f"aside_step_{newest}").exists(), say(nodes)

    assert all_well(on_both(nodes, port, "sync"), nodes), say(nodes)
    last = checkpoint.steps_in(outs[1])[-1]
    assert checkpoint.steps_in(outs[0]) == checkpoint.steps_in(outs[1])
    assert all(files(nodes[0], step) == files(nodes[1], step) for step in checkpoint.steps_in(outs[0]))
    assert all_well([run_sh(nodes[1], "train", "nodes", "--nproc", 1)], nodes[1:]), say(nodes[1:])
    assert f"resumed at step {last}\n" in say(nodes[1:]), say(nodes[1:])
    assert last_step(outs[1]) == 80


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] != "kills":
        raise SystemExit("usage: python test_faults.py kills COUNT [PROCESSES]")
    with own_port() as free:
        print(kills(free, *map(int, sys.argv[2:])))
