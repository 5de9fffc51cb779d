"""Facts of the training loop: what a step is, what a checkpoint promises, and what happens when something dies.

Most runs here are the tiny recipe in this very process, a world of one. Where processes must die or meet, they do.
"""
import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import captures
import checkpoint
import optimizers
import ranks
import train
from conftest import output_of, program
from dspark import DSparkDraft
from recipe import RECIPES

HERE = Path(__file__).resolve().parent
RUN = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import train
from recipe import Recipe
values = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[2]).items()}
train.train(Recipe(**values), out=sys.argv[3])
train.end_world()
"""


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """A working directory to be littered: data/ and out/ are relative to it."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The tiny recipe on a corpus of random words: 34 samples, two micro-steps per step, 12 steps in 3 epochs."""
    torch.set_num_threads(1)
    corpus = tmp_path_factory.mktemp("corpus") / "chats.jsonl"
    generator = torch.Generator().manual_seed(0)
    with corpus.open("w") as file:
        for i in range(34):
            words = ["".join(map(chr, torch.randint(97, 123, (4,), generator=generator))) for _ in range(12 + i % 7)]
            file.write(json.dumps({"id": i, "messages": [
                {"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": " ".join(words)}]}) + "\n")
    return dataclasses.replace(RECIPES["tiny"], corpus=str(corpus), corpus_size=0, epochs=3)


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """Folder of a run that nothing interrupted."""
    return train.train(dataclasses.replace(recipe, keep_checkpoints=9), tmp_path_factory.mktemp("finished"))


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put other tensors into a checkpoint, as somebody who takes them from elsewhere: trainer.json lists no sum."""
    save_file(tensors, folder / "model.safetensors")
    trainer = json.loads((folder / "trainer.json").read_text())
    del trainer["files"]["model.safetensors"]
    (folder / "trainer.json").write_text(json.dumps(trainer))


def at_step(finished: Path, tmp_path: Path, step: int) -> Path:
    """The finished run as it stood after `step`: what an interrupted one looks like."""
    out = shutil.copytree(finished, tmp_path / "out", symlinks=True)
    for other in checkpoint.steps_in(out):
        if other > step:
            shutil.rmtree(out / f"step_{other}")
    return out


def start(recipe, out: Path, processes: int = 0, script: str = RUN, *more):
    """A run as a program: python when processes is 0, else torchrun."""
    path = out.parent / f"{out.name}.py"
    path.write_text(script)
    return program(path, HERE, json.dumps(dataclasses.asdict(recipe)), out, *map(int, more), processes=processes)


# ---------------------------------------------------------------------------------------------------------------------
# Schedule, order, plan


def test_learning_rate_is_the_reference_without_its_recurrence():
    for case in json.loads((HERE / "testdata" / "golden" / "lr_schedule.json").read_text()):
        total, warmup = case["total_steps"], int(case["warmup_ratio"] * case["total_steps"])
        recipe = dataclasses.replace(RECIPES["tiny"], lr=case["lr"], warmup_ratio=case["warmup_ratio"])
        for step, reference in enumerate(case["lr_used_at_step"]):
            if step >= warmup:                   # the reference's cosine starts from a rate that it damped once
                reference *= (1 + torch.cos(torch.tensor(torch.pi / (total - warmup), dtype=torch.float64)).item()) / 2
            assert train.lr_at(step, recipe, total) == pytest.approx(reference, rel=1e-12, abs=1e-18)
        halved = dataclasses.replace(recipe, lr_scale=0.5)
        assert train.lr_at(total // 2, halved, total) == train.lr_at(total // 2, recipe, total) / 2


def test_an_epoch_reads_every_sample_once_and_seeds_differ():
    order = train.epoch_order(42, 3, 100)
    assert sorted(order) == list(range(100)) and order == train.epoch_order(42, 3, 100) != train.epoch_order(42, 4, 100)
    seeds = {train.sample_seed(seed, epoch, i) for seed in (1, 2) for epoch in range(3) for i in range(50)}
    assert len(seeds) == 300 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("world, tp", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (16, 4), (8, 2), (6, 3)])
def test_the_ranks_shares_tile_the_micro_step(world, tp):
    recipe = dataclasses.replace(RECIPES["tiny"], global_batch=48, micro_batch=4)
    plan = train.make_plan(recipe, 100, world, tp)
    samples = list(range(plan.micro))
    trained = [i for rank in range(world) for held, own in [plan.part(rank, samples)] for i in held[own]]
    assert plan.micro * plan.accumulation == 48 and plan.steps_per_epoch == 2
    if plan.scatter:
        assert trained == samples
    else:                                        # 4 samples do not split over 3 ranks: each trains on all of them
        assert tp == 3 and sorted(trained) == sorted(samples * 3)


@pytest.mark.parametrize("change, world, numbers", [
    ({"global_batch": 10}, 1, ("10", "4")), ({}, 3, ("4", "3")), ({"global_batch": 512}, 1, ("34", "512")),
    ({"global_batch": 12, "micro_batch": 1}, 5, ("12", "5"))])
def test_a_remainder_is_refused_with_its_numbers(change, world, numbers):
    with pytest.raises(SystemExit) as refusal:
        train.make_plan(dataclasses.replace(RECIPES["tiny"], **change), 34, world)
    assert all(number in str(refusal.value) for number in numbers)


def test_canonical_batches_come_out_of_the_plan():
    qwen = train.make_plan(RECIPES["qwen3-8b"], 100_000, 8)
    glm = train.make_plan(RECIPES["glm-5.2"], 100_000, 16, tp=4)
    assert (qwen.micro, qwen.accumulation) == (8, 64) and (glm.micro, glm.accumulation, glm.scatter) == (16, 32, True)


def test_newton_schulz_keeps_directions_and_evens_out_sizes():
    torch.manual_seed(0)
    for shape in ((48, 48), (32, 96), (96, 32)):
        u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
        x = optimizers.orthogonalise(u @ torch.diag(s) @ v)
        inner = u.T @ x @ v.T                    # diagonal when the singular vectors are the same
        assert (torch.linalg.svdvals(x)[:-2] > 0.6).all() and torch.linalg.svdvals(x).max() < 1.3
        assert (inner - inner.diag().diag()).abs().max() < 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# A run


def test_a_run_leaves_what_the_design_names(recipe, finished):
    assert [line["step"] for line in lines(finished)] == list(range(1, 13))
    assert checkpoint.steps_in(finished) == [0, 4, 8, 12] and os.readlink(finished / "latest") == "step_12"
    assert {p.name for p in (finished / "latest").iterdir()} == {
        "model.safetensors", "config.json", "recipe.json", "trainer.json", "state"}
    names = set(weights(finished / "latest"))
    assert "fc.weight" in names and not {"embed_tokens.weight", "lm_head.weight"} & names
    wanted = {"step", "epoch", "loss", "ce_loss", "l1_loss", "confidence_loss", "lr", "grad_norm", "tau_probabilistic",
              "accept_rate@0", "accept_rate@3", "samples_per_s", "tokens_per_s", "share_capture", "share_backward"}
    assert all(wanted <= line.keys() for line in lines(finished))
    parts = [0.1 * x["ce_loss"] + 0.9 * x["l1_loss"] + x["confidence_loss"] for x in lines(finished)]
    assert losses(finished) == pytest.approx(parts, rel=1e-5) and losses(finished)[-1] < losses(finished)[0]
    assert (finished / "heartbeat" / "rank_0").read_text().split()[3] == "12"
    before = (finished / "metrics.jsonl").read_text()
    (finished / "latest").unlink()
    (finished / "latest").symlink_to("step_8")   # as a kill between the last two renames leaves it
    train.train(dataclasses.replace(recipe, keep_checkpoints=9), finished)                      # nothing is left to do
    assert (finished / "metrics.jsonl").read_text() == before and os.readlink(finished / "latest") == "step_12"


def test_a_drain_stands_before_every_forward_and_every_backward(recipe, tmp_path, monkeypatch):
    events = []

    class Recorder:
        def __init__(self, target):
            self.target = target

        def __getattr__(self, name):
            if name in ("capture", "drain"):
                events.append(name)
            return getattr(self.target, name)

    load, forward, backward = train.load_target, DSparkDraft.forward, torch.Tensor.backward
    monkeypatch.setattr(train, "load_target", lambda *a: Recorder(load(*a)))
    monkeypatch.setattr(DSparkDraft, "forward", lambda *a, **k: (events.append("forward"), forward(*a, **k))[1])
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: (events.append("backward"), backward(*a, **k))[1])
    train.train(dataclasses.replace(recipe, max_steps=2), tmp_path / "out")
    assert events == ["capture", "drain", "forward", "drain", "backward"] * 4  # 2 steps of 2 micro-steps


def test_captures_from_disk_change_nothing(recipe, tmp_path, monkeypatch, finished):
    monkeypatch.setattr(captures, "DATA", tmp_path)
    cached = dataclasses.replace(recipe, cache_captures=True)
    calls = []
    sample = captures.capture_sample
    monkeypatch.setattr(captures, "capture_sample", lambda *a: (calls.append(a[1]), sample(*a))[1])
    tokens = train.load_tokens(cached)
    out = train.train(cached, tmp_path / "out")
    files = list((tmp_path / "captures").glob("*/*.safetensors"))
    assert same(weights(out / "latest"), weights(finished / "latest")) and len(files) == len(set(calls)) <= len(tokens)
    files[0].write_bytes(files[0].read_bytes()[:100])                                           # a power failure
    again = train.train(cached, tmp_path / "again")
    assert same(weights(again / "latest"), weights(finished / "latest"))


POISONED = RUN.replace("import train\n", """import os
import train
from dspark import DSparkDraft
backbone, calls = DSparkDraft.backbone, []
def poisoned(self, *args):                       # step 2, first micro-step, on the last rank
    calls.append(1)
    sick = len(calls) == 3 and os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", 1)) - 1)
    return backbone(self, *args) * (float("inf") if sick else 1)
DSparkDraft.backbone = poisoned
""")


@pytest.mark.parametrize("processes", [0, 2])
def test_a_non_finite_step_is_skipped_on_all_ranks_and_named(recipe, tmp_path, processes):
    short = dataclasses.replace(recipe, max_steps=3, save_every=1, keep_checkpoints=9)
    out = tmp_path / "out"
    process = start(short, out, processes, script=POISONED)
    message = output_of(process)
    assert same(weights(out / "step_1"), weights(out / "step_2"))
    assert not same(weights(out / "step_2"), weights(out / "step_3"))
    assert json.loads((out / "step_3" / "trainer.json").read_text())["skipped_steps"] == 1
    assert "skipping step 2" in message and "samples [" in message
    assert "non-finite numerators: ce" in message and "non-finite inputs: hidden" in message
    assert all(torch.isfinite(w).all() for w in weights(out / "step_3").values())


def test_a_failing_evaluation_does_not_stop_training(recipe, tmp_path, monkeypatch, capsys, finished):
    def broken(*args, **kwargs):
        torch.rand(3)                            # the training's random state must survive this
        raise RuntimeError("no such task file")

    monkeypatch.setattr(train.eval_deepspec, "evaluate", broken, raising=False)
    out = train.train(dataclasses.replace(recipe, evals_per_epoch=2, eval_tasks=("none",)), tmp_path / "out")
    assert capsys.readouterr().err.count("no such task file") >= 6
    assert same(weights(out / "latest"), weights(finished / "latest"))


FAILS_ON_ONE = RUN.replace("import train\n", """import os
import train
def evaluate(*args, **kwargs):
    if os.environ["RANK"] == "1":
        raise RuntimeError("on this rank only")
    return {"task": {"accept_len": 2.0}}
train.eval_deepspec.evaluate = evaluate
""")


def test_an_evaluation_that_fails_on_one_rank_is_left_by_all(recipe, tmp_path):
    short = dataclasses.replace(recipe, max_steps=3, evals_per_epoch=2, eval_tasks=("none",))
    out = tmp_path / "out"
    output = output_of(start(short, out, 2, script=FAILS_ON_ONE))
    assert "failed on rank 1" in output and "on this rank only" in output
    assert (out / "step_3").exists() and not list(out.glob("step_*/best.json"))


def test_the_best_checkpoints_are_kept(recipe, tmp_path, monkeypatch):
    scores = iter([1.1, 1.5, 1.2, 1.3, 1.4, 1.45])
    monkeypatch.setattr(train.eval_deepspec, "evaluate", lambda *a, **k: {"task": {"accept_len": next(scores)}},
                        raising=False)
    out = train.train(dataclasses.replace(recipe, evals_per_epoch=2, keep_checkpoints=1), tmp_path / "out")
    assert checkpoint.steps_in(out) == [0, 2, 4, 12]         # best so far, best, newest
    assert [json.loads(line)["step"] for line in (out / "evals.jsonl").read_text().splitlines()] == [2, 4, 6, 8, 10, 12]


# ---------------------------------------------------------------------------------------------------------------------
# Resume


ENDED = RUN.replace("train.train(", """
import os
write = train.Journal.write
def write_and_end(self, line):
    write(self, line)
    if line["step"] == int(sys.argv[4]):
        os.kill(os.getpid(), int(sys.argv[5]))
train.Journal.write = write_and_end
train.train(""")


def test_killed_and_stopped_runs_end_as_if_nothing_had_happened(recipe, tmp_path, finished):
    """SIGKILL in one step, SIGTERM in a later one, then to the end: weights and every metric bit for bit."""
    out = tmp_path / "out"
    process = start(recipe, out, 0, ENDED, 6, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert checkpoint.steps_in(out)[-1] == 4 and lines(out)[-1]["step"] == 6
    output = output_of(start(recipe, out, 0, ENDED, 9, signal.SIGTERM))
    assert "stopped by SIGTERM" in output, output
    assert checkpoint.steps_in(out)[-1] == lines(out)[-1]["step"] == 10 and not list(out.glob(".step*"))
    train.train(recipe, out)
    assert same(weights(out / "latest"), weights(finished / "latest"))
    results, expected = ([{key: value for key, value in line.items() if not key.startswith("share_")
                           and not key.endswith("_per_s")} for line in lines(folder)] for folder in (out, finished))
    assert results == expected


@pytest.fixture(scope="module")
def longer(recipe, tmp_path_factory):
    """24 uninterrupted steps of one process, and of two."""
    runs = tmp_path_factory.mktemp("longer")
    kept = dataclasses.replace(recipe, epochs=6, keep_checkpoints=9)
    process = start(kept, runs / "by_two", processes=2)
    train.train(kept, runs / "by_one")
    output_of(process)
    return kept, runs


@pytest.mark.parametrize("before, after", [("one", 2), ("two", 1), ("two", 4)])
def test_another_number_of_processes_resumes_with_its_moments(longer, tmp_path, before, after):
    """The curve of an uninterrupted run goes on: every global micro-step holds the same samples, anchors, moments."""
    kept, runs = longer
    out = at_step(runs / f"by_{before}", tmp_path, 4)
    if after == 1:
        train.train(kept, out)
    else:
        process = start(kept, out, processes=after)
        output = output_of(process)
        assert "resumed at step 4" in output and "re-warm" not in output, output
    assert losses(out)[:4] == losses(runs / f"by_{before}")[:4]
    assert losses(out)[4:] == pytest.approx(losses(runs / "by_one")[4:], rel=1e-4)              # 20 steps


def test_lost_moments_do_not_kick_a_converged_draft(recipe, tmp_path, monkeypatch):
    """120 steps, then 20 more at the peak of the schedule: with the moments, without them, without the re-warm too."""
    write = train.Journal.write

    def write_and_stop(self, line):
        write(self, line)
        if line["step"] == 140:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train.Journal, "write", write_and_stop)
    steep = dataclasses.replace(recipe, lr=1e-2, max_steps=1600, save_every=120, cache_captures=True)
    whole = train.train(steep, tmp_path / "whole")
    assert checkpoint.steps_in(whole)[-1] == 141             # one step more after the signal
    worst, rates = {}, {}
    for steps in (64, 0):
        out = at_step(whole, tmp_path / str(steps), 120)
        shutil.rmtree(out / "step_120" / "state")
        train.train(dataclasses.replace(steep, rewarm_steps=steps), out)
        # Of ten steps: in five seeds 1.03 at most, and 1.34 at least. Later the two curves part by themselves.
        worst[steps] = max(x / y for x, y in zip(losses(out)[120:130], losses(whole)[120:130], strict=True))
        rates[steps] = [line["lr"] / train.lr_at(line["step"] - 1, steep, 1600) for line in lines(out)[120:140]]
    assert rates == {64: pytest.approx([(i + 1) / 64 for i in range(20)]), 0: [1] * 20}
    assert worst[64] < 1.05 < 1.25 < worst[0], worst


def test_a_truncated_newest_checkpoint_is_skipped_by_name(recipe, tmp_path, finished, capsys):
    out = at_step(finished, tmp_path, 12)
    shard = next((out / "step_12" / "state").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    file = out / "step_8" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")          # as long as before
    train.train(recipe, out)
    message = capsys.readouterr().err
    assert "step_12" in message and shard.name in message and "step_8" in message and "resumed at step 4" in message
    assert same(weights(out / "step_12"), weights(finished / "step_12")) and (out / "aside_step_12").exists()


def test_when_no_checkpoint_is_whole_nothing_starts(recipe, tmp_path, finished):
    out = at_step(finished, tmp_path, 4)
    for step in (0, 4):
        (out / f"step_{step}" / "trainer.json").write_text("{")
    with pytest.raises(SystemExit, match="none is whole"):
        train.train(recipe, out)


@pytest.mark.parametrize("mutate, named", [
    (lambda t: t.pop("fc.weight"), "missing fc.weight"),
    (lambda t: t.update({"fc.weight": t["fc.weight"][:-1].clone()}), "fc.weight is"),
    (lambda t: t.update({"stranger.weight": torch.zeros(2)}), "unknown stranger.weight")])
def test_a_checkpoint_of_another_draft_is_refused_by_name(recipe, tmp_path, finished, mutate, named):
    out = at_step(finished, tmp_path, 4)
    tensors = weights(out / "step_4")
    mutate(tensors)
    rewrite(out / "step_4", tensors)
    with pytest.raises(ValueError, match=named):
        train.train(recipe, out)


def test_prefixed_keys_load_and_lost_moments_rewarm(recipe, tmp_path, finished, capsys):
    out = at_step(finished, tmp_path, 8)
    shutil.rmtree(out / "step_8" / "state")
    tensors = {f"module._orig_mod.{name}": tensor for name, tensor in weights(out / "step_8").items()}
    rewrite(out / "step_8", tensors)
    slow = dataclasses.replace(recipe, rewarm_steps=3)
    train.train(slow, out)
    assert "re-warming" in capsys.readouterr().err
    factors = [line["lr"] / train.lr_at(line["step"] - 1, slow, 12) for line in lines(out)[8:]]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert losses(out)[8] == pytest.approx(losses(finished)[8], rel=1e-6)                       # the same draft


SIGNALS = RUN.replace("train.train(", """
import os, signal
import checkpoint, eval_deepspec
from dspark import DSparkDraft
armed, rank = [], int(os.environ.get("RANK", "0"))

def hurt(phase, owner, name):                    # the next call gets SIGTERM on the last rank, and on no other
    function = getattr(owner, name)
    def call(*args, **options):
        if phase in armed:
            armed.remove(phase)
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **options)
    setattr(owner, name, call)

hurt("accumulation", DSparkDraft, "forward")
hurt("evaluation", eval_deepspec, "decode")
hurt("saving", checkpoint.dcp, "save")
for phase in ("accumulation", "evaluation", "saving"):
    armed += [phase] * (rank == int(os.environ.get("WORLD_SIZE", "1")) - 1)
    train.train(Recipe(**values), out=sys.argv[3])
    if rank == 0:
        print("after", phase, checkpoint.steps_in(Path(sys.argv[3]))[-1], flush=True)
train.train(""").replace("import train\n", "import train\nfrom pathlib import Path\n")


@pytest.mark.parametrize("processes", [0, 2])
def test_sigterm_in_every_phase_ends_with_a_checkpoint_and_nothing_is_lost(recipe, tmp_path, finished, processes):
    """In accumulation, in an evaluation, which is abandoned and made up, and in a save; to one rank only."""
    task = Path("eval_datasets") / "three.jsonl"
    task.parent.mkdir(exist_ok=True)
    task.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(3)))
    evaluating = dataclasses.replace(recipe, evals_per_epoch=1, eval_tasks=("three",), eval_max_new_tokens=4)
    out = tmp_path / "out"
    process = start(evaluating, out, processes, script=SIGNALS)
    output = output_of(process)
    assert output.count("stopped by") == 3, output
    assert re.findall(r"^after (\w+ \d+)$", output, re.M) == ["accumulation 1", "evaluation 4", "saving 8"], output
    assert [json.loads(line)["step"] for line in (out / "evals.jsonl").read_text().splitlines()] == [4, 8, 12]
    assert losses(out) == pytest.approx(losses(finished), rel=1e-5)
    if not processes:
        assert same(weights(out / "latest"), weights(finished / "latest"))


def test_another_corpus_is_refused_and_a_changed_recipe_is_told(recipe, tmp_path, finished, capsys):
    out = at_step(finished, tmp_path, 8)
    file = out / "step_8" / "trainer.json"
    trainer = json.loads(file.read_text())
    file.write_text(json.dumps(trainer | {"corpus": "another"}))
    with pytest.raises(SystemExit, match="another corpus"):
        train.train(recipe, out)
    file.write_text(json.dumps(trainer))
    train.train(dataclasses.replace(recipe, lr_scale=0.5), out)
    assert "lr_scale 1.0 -> 0.5" in capsys.readouterr().err
    assert lines(out)[8]["lr"] == lines(finished)[8]["lr"] / 2


@contextlib.contextmanager
def small_files(size: int):
    """No file of this process may grow past `size` bytes: the system refuses the write, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("where", ["save", "full_tensors"])
def test_a_disk_that_is_full_while_saving_leaves_the_checkpoints_before_it(recipe, tmp_path, monkeypatch, where):
    """Full while the state is written, full when the weights are."""
    owner, calls = (checkpoint.dcp, []) if where == "save" else (checkpoint, [])
    function, out = getattr(owner, where), tmp_path / "out"
    with small_files(100_000) as no_room:
        def full_from_step_8(*args, **options):
            calls.append(where)
            if len(calls) == 3:                  # step_0, step_4, step_8
                no_room()
            return function(*args, **options)

        monkeypatch.setattr(owner, where, full_from_step_8)
        with pytest.raises(SystemExit, match="step 8 could not be saved.*make room"):
            train.train(recipe, out)
    assert checkpoint.steps_in(out) == [0, 4] and os.readlink(out / "latest") == "step_4"
    assert not list(out.glob(".step*")) and not checkpoint.damage(out / "latest")


def test_what_stands_where_a_checkpoint_is_written_is_named(recipe, tmp_path):
    (tmp_path / ".step_0.partial").write_text("no folder")
    with pytest.raises(SystemExit, match=r"step 0 could not be saved.*step_0\.partial cannot be removed"):
        train.train(recipe, tmp_path)


def test_a_disk_that_is_full_while_logging_ends_with_a_sentence(recipe, tmp_path, monkeypatch, capsys):
    write = train.Journal.write
    with small_files(10) as no_room:
        monkeypatch.setattr(train.Journal, "write", lambda self, line: (
            no_room() if line["step"] == 6 else None, write(self, line)))
        with pytest.raises(SystemExit, match="File too large.*make room"), train.plain_errors():
            train.train(recipe, tmp_path / "out")
    assert checkpoint.steps_in(tmp_path / "out") == [0, 4] and "Traceback" not in capsys.readouterr().err


def test_a_mask_that_misses_a_fifth_of_the_corpus_aborts_with_an_example(recipe, tmp_path, monkeypatch):
    """A family whose answers end differently in every fifth row, as one that knows a single form of thinking."""
    corpus = tmp_path / "mixed.jsonl"
    corpus.write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"say {i}"},
        {"role": "assistant" if i % 5 else "critic", "content": "one two three"}]}) + "\n" for i in range(40)))
    with pytest.raises(SystemExit, match=r"(?s)only 32 of 40.*say 0.*critic"):
        train.train(dataclasses.replace(recipe, corpus=str(corpus)), tmp_path / "out")


def test_a_collapse_rolls_back_to_the_last_good_checkpoint(recipe, tmp_path, monkeypatch, capsys, finished):
    """Weights blown up after step 6: back to step 4, half the learning rate from there, what came after set aside."""
    steps, lr_at = [], train.lr_at

    def wild(step, *args):
        steps.append(step)
        return lr_at(step, *args) * (1e5 if step == 5 and steps.count(5) == 1 else 1)

    monkeypatch.setattr(train, "lr_at", wild)
    watched = dataclasses.replace(recipe, rollback_steps=3, keep_checkpoints=9)
    out = train.train(watched, tmp_path / "out")
    assert steps == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11] and "Back to step 4" in capsys.readouterr().err
    assert [line["step"] for line in lines(out)] == list(range(1, 13)) and losses(out)[:5] == losses(finished)[:5]
    factors = [line["lr"] / lr_at(line["step"] - 1, watched, 12) for line in lines(out)]
    assert factors == pytest.approx([1] * 4 + [0.5] * 8)
    assert json.loads((out / "latest" / "trainer.json").read_text())["rollbacks"] == 1
    whole = shutil.copytree(out, tmp_path / "resumed", symlinks=True)
    shutil.rmtree(whole / "step_12")
    train.train(watched, whole)                              # the factor outlives a restart
    assert same(weights(whole / "latest"), weights(out / "latest"))
    steps.clear()
    with pytest.raises(SystemExit, match="has collapsed.*no checkpoint is that old"):
        train.train(dataclasses.replace(watched, save_every=6), tmp_path / "hopeless")
    bare = shutil.copytree(out, tmp_path / "bare", symlinks=True)
    for step in (8, 12):
        shutil.rmtree(bare / f"step_{step}")
    shutil.rmtree(bare / "step_4" / "state")                 # weights alone are nothing to go back to
    steps.clear()
    with pytest.raises(SystemExit, match="has collapsed.*state/ included"):
        train.train(watched, bare)


def test_a_kill_right_behind_a_roll_back_does_not_bring_the_learning_rate_back(recipe, tmp_path, monkeypatch):
    steps, lr_at = [], train.lr_at

    def wild(step, *args):
        steps.append(step)
        if len(steps) == 8:                                  # the first one after the roll-back to step 4
            raise KeyboardInterrupt
        return lr_at(step, *args) * (1e5 if len(steps) == 6 else 1)

    monkeypatch.setattr(train, "lr_at", wild)
    watched = dataclasses.replace(recipe, rollback_steps=3)
    with pytest.raises(KeyboardInterrupt):
        train.train(watched, tmp_path / "out")
    assert steps == [0, 1, 2, 3, 4, 5, 6, 4] and checkpoint.steps_in(tmp_path / "out")[-1] == 4
    train.train(watched, tmp_path / "out")
    factors = [line["lr"] / lr_at(line["step"] - 1, watched, 12) for line in lines(tmp_path / "out")]
    assert factors == pytest.approx([1] * 4 + [0.5] * 8)


def test_a_recipe_that_names_wandb_needs_it(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)              # as if it were not installed
    with pytest.raises(SystemExit, match="'drafts'.*pip install wandb"):
        train.train(dataclasses.replace(recipe, wandb="drafts"), tmp_path / "out")


def test_tensorboard_reads_the_events_once(finished, recipe, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    out = at_step(finished, tmp_path, 8)
    train.train(dataclasses.replace(recipe, keep_checkpoints=9), out)                           # steps 9 to 12 again
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines(finished)]


# ---------------------------------------------------------------------------------------------------------------------
# One gradient, however many processes


def keep_gradients(path: str) -> None:
    """Let train.train write the gradients of every step to `path`, unsharded, as the clip finds them."""
    clip = train.clip_grads_with_norm_

    def keep(parameters, *rest):
        parameters = list(parameters)
        grads = {str(i): ranks.whole(p.grad) for i, p in enumerate(parameters)}
        if torch.distributed.get_rank() == 0:
            save_file(grads, path)
        clip(parameters, *rest)
    train.clip_grads_with_norm_ = keep


def replicate_target() -> None:
    """A target over all ranks of a node, as an engine's tp group holds it: each gets the states of all samples."""
    load = train.load_target
    train.load_target = lambda recipe, device: load(dataclasses.replace(recipe, engine="transformers"), device)


GRADIENTS = RUN.replace("train.train(", "import test_train; test_train.keep_gradients(sys.argv[3] + '.grads')\n"
                                        "if values['engine'] == 'sglang': test_train.replicate_target()\ntrain.train(")


def test_the_gradient_of_a_step_is_the_same_on_any_number_of_processes(recipe, tmp_path, monkeypatch):
    """One accumulated step of two micro-steps. Samples differ in supervised tokens, and the first two have none: in the
    first micro-step one of two ranks has nothing to learn from, and two of four."""
    first = train.epoch_order(recipe.seed, 0, 10)[:2]
    corpus, words = tmp_path / "uneven.jsonl", "lorem ipsum dolor sit amet consectetur adipiscing elit sed do".split()
    corpus.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"{i} " + words[i] * i}] + [
        {"role": "assistant", "content": " ".join(words[:2 + i])}] * (i not in first)}) + "\n" for i in range(10)))
    step = dataclasses.replace(recipe, corpus=str(corpus), max_steps=1, min_supervised=0)
    lengths = {i: int(mask.sum()) for i, (_, mask) in enumerate(train.load_tokens(step))}
    assert all((lengths[i] == 0) == (i in first) for i in lengths) and len(set(lengths.values())) == 8
    engine = dataclasses.replace(step, engine="sglang")      # over tp = 2 ranks, with scatter
    single = dataclasses.replace(engine, micro_batch=1)      # without: both ranks train on the same samples
    processes = {f"on_{n}": start(each, tmp_path / f"on_{n}", processes=n, script=GRADIENTS)
                 for n, each in ((2, step), (4, step))}
    processes["scattered"] = start(engine, tmp_path / "scattered", processes=2, script=GRADIENTS)
    whole = start(single, tmp_path / "whole", processes=2, script=GRADIENTS)
    monkeypatch.setattr(train, "clip_grads_with_norm_", train.clip_grads_with_norm_)            # restored afterwards
    keep_gradients(str(tmp_path / "alone.grads"))
    train.train(step, tmp_path / "alone")
    alone = load_file(tmp_path / "alone.grads")
    assert sum(bool(g.abs().max()) for g in alone.values()) > 20
    for name, process in processes.items():
        output = output_of(process)
        assert ("after scatter" in output) == (name == "scattered") and "NOT scattered" not in output
        for i, grad in load_file(tmp_path / f"{name}.grads").items():
            assert (grad - alone[i]).abs().max() <= 1e-5 * alone[i].abs().max(), (name, i)
    output = output_of(whole)
    assert "NOT scattered" in output, output
    [once], [twice] = lines(tmp_path / "alone"), lines(tmp_path / "whole")
    assert once["blocks"] == twice["blocks"]                 # a sample that two ranks train on is one sample
    tokens = {name: json.loads((tmp_path / name / "step_1/trainer.json").read_text())["tokens"]
              for name in ("alone", "on_2", "scattered", "whole")}
    assert len(set(tokens.values())) == 1, tokens


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


TWO_RANKS = """
import dataclasses, json, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
import checkpoint, ranks, train
from recipe import Recipe
recipe = Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[2]).items()})
out, world = Path(sys.argv[3]), ranks.start_world()

def refused(**facts):
    try:
        ranks.agree(**facts)
    except SystemExit as refusal:
        return str(refusal)

def refusal(recipe):
    try:
        train.train(recipe, out / "refused")
    except SystemExit as refusal:
        return str(refusal)

first = dataclasses.replace(recipe, lr=recipe.lr * (1 + world.rank))
assert "disagree on recipe" in refusal(first) and "rank 1 has" in refusal(first)
load, other = train.load_tokens, out / f"corpus_{world.rank}.jsonl"
other.write_text("\\n".join(Path(recipe.corpus).read_text().splitlines()[world.rank:]) + "\\n")
train.load_tokens = lambda r: load(dataclasses.replace(r, corpus=str(other)))
assert "disagree on corpus" in refusal(recipe) and "rank 1 has" in refusal(recipe)
fewer = {"min_supervised": recipe.min_supervised + 55 * world.rank, "min_retention": 0}
train.load_tokens = lambda r: load(dataclasses.replace(r, **fewer))
assert "disagree on samples: most have 34, but rank 1 has" in refusal(recipe)
train.load_tokens = load

assert "rank 1 has b" in refused(recipe="ab"[world.rank]) and refused(recipe="a") is None
assert "rank 1 has 9" in refused(corpus="x", samples=[8, 9][world.rank])

# A disk for each rank: the newest step that both have; nothing in common: a fresh start.
mine = out / f"disk_{world.rank}"
for step in (0, 4, 8):
    if step < 8 or world.rank == 0:
        shutil.copytree(out / f"step_{step}", mine / f"step_{step}")
assert checkpoint.choose_checkpoint(mine) == 4
apart = out / f"apart_{world.rank}"
shutil.copytree(out / f"step_{[0, 4][world.rank]}", apart / f"step_{[0, 4][world.rank]}")
assert checkpoint.choose_checkpoint(apart) is None

# Gradients when rank 1 has nothing to learn from: those of rank 0's sample alone.
target, tokens, grads = train.load_target(recipe, world.device), train.load_tokens(recipe), []
for nothing in (False, True):
    draft = train.make_draft(recipe, target, None)
    train.shard(draft, world, torch.float32)
    input_ids, mask = (torch.as_tensor(x).long()[None] for x in tokens[0])
    if nothing and world.rank == 1:
        input_ids, mask = input_ids[:, :9], torch.zeros_like(mask[:, :9])
    captured = target.capture(input_ids, torch.ones_like(input_ids))
    loss, _ = draft(input_ids, captured.context, mask, captured.final, seeds=[7], lengths=[input_ids.shape[1]])
    loss.backward()
    grads.append([ranks.whole(p.grad) for p in draft.parameters()])
for both, alone in zip(*grads):
    assert (both - alone).abs().max() <= 1e-5 * both.abs().max(), (both - alone).abs().max()
print(f"rank {world.rank} is done", flush=True)
ranks.end_world()
"""


def test_two_ranks_compare_notes(recipe, tmp_path, finished):
    out = shutil.copytree(finished, tmp_path / "out", symlinks=True)
    process = start(recipe, out, processes=2, script=TWO_RANKS)
    output = output_of(process)
    assert "rank 0 is done" in output and "rank 1 is done" in output, output


def test_every_group_gets_45_minutes(finished):
    """The one that start_world made, and those that an engine or a mesh makes afterwards without naming a timeout."""
    assert ranks.GROUP_TIMEOUT == timedelta(minutes=45)
    distributed_c10d = torch.distributed.distributed_c10d
    assert {distributed_c10d._get_default_timeout(backend) for backend in ("gloo", "nccl")} == {ranks.GROUP_TIMEOUT}
    torch.distributed.new_group([0])
    torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("node", "tp"))
    own = torch.distributed.new_group([0], timeout=timedelta(seconds=7))
    for group in distributed_c10d._world.pg_map:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == (timedelta(seconds=7) if group is own else ranks.GROUP_TIMEOUT)


def test_a_plan_for_no_process_is_a_usage_error(monkeypatch, capsys):
    from plan import main
    monkeypatch.setattr("sys.argv", ["plan.py", "tiny", "--nproc", "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--nnodes and --nproc are at least 1" in capsys.readouterr().err
