"""Checkpoints that are whole or not there, and the resume that continues from them bit for bit.

    out/<recipe>/step_<n>/   after n optimizer steps:
        model.safetensors    the draft, DeepSpec tensor names, in the compute dtype
        config.json          its geometry
        recipe.json          the recipe that trained it
        trainer.json         the loop's counters; size and checksum of every file in state/
        state/               fp32 masters and optimizer moments, each rank's shards (torch.distributed.checkpoint)
    out/<recipe>/latest      a link to the newest one

A checkpoint is written under a temporary name, flushed to disk and renamed; `latest` moves last. Functions that say
"collective" are called by all ranks together. Read next: train.py, which calls these.
"""
import json
import os
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from layouts import stamp
from ranks import gather, say, whole
from recipe import Recipe, load_recipe, save_recipe


def full_tensors(draft: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The draft's trainable tensors, unsharded, on the CPU (collective)."""
    return {name: whole(p.detach()).to("cpu", dtype).contiguous() for name, p in draft.named_parameters()}


def training_state(draft: torch.nn.Module, optimizers) -> dict[str, torch.Tensor]:
    """The very tensors that a step changes: masters under their names, moments under name and slot.

    torch.distributed.checkpoint reads them when it saves and writes into them when it loads.
    """
    state = dict(draft.named_parameters())
    names = {p: name for name, p in state.items()}
    for optimizer in optimizers:
        for p, slots in optimizer.state.items():
            state |= {f"{names[p]}.{slot}": tensor for slot, tensor in slots.items()}
    return state


def checksum(path: Path) -> list[int]:
    """[bytes, crc32] of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def flush(*paths: Path) -> None:
    """fsync files and folders: a rename must not become durable before what it names."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save_checkpoint(out: Path, step: int, draft, optimizers, recipe: Recipe, counters: dict,
                    dtype: torch.dtype) -> None:
    """Write out/step_<step>/ (collective). SystemExit on all ranks when that fails; what was there stays usable.

    Where every node has a disk of its own, nodes but the first hold only shards until the folders are mirrored.
    """
    rank, final, partial = dist.get_rank(), out / f"step_{step}", out / f".step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)                       # left by a run that was killed while saving
    dist.barrier()
    problem, mine = "", {}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        dcp.save(training_state(draft, optimizers), checkpoint_id=partial / "state")
        written = list((partial / "state").glob(f"__{rank}_*")) + [partial / "state" / ".metadata"] * (rank == 0)
        mine = {path.name: checksum(path) for path in written}
    except (OSError, CheckpointException) as error:
        problem = str(error).strip().splitlines()[-1]
    sums = {name: value for one in gather(mine) for name, value in one.items()}
    tensors = full_tensors(draft, dtype)
    if rank == 0 and not problem:
        try:
            draft.config.save(partial, dtype)
            save_file(tensors, partial / "model.safetensors", metadata=stamp(draft.config))
            shutil.copymode(partial / "config.json", partial / "model.safetensors")  # save_file makes it private
            save_recipe(recipe, partial / "recipe.json")
            trainer = counters | {"step": step, "state": sums}
            (partial / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n")
            flush(*partial.rglob("*"), partial)
        except (OSError, SafetensorError) as error:
            problem = str(error)
    if problems := [text for text in gather(problem) if text]:
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(out).free / 1e6
        raise SystemExit(f"step {step} could not be saved in {out}, where {free:.1f} MB are free: {problems[0]}. Those "
                         "before it are whole: make room or mend the permissions, then start the same command again")
    if rank == 0:
        publish(partial, final)
    dist.barrier()
    if partial.exists():                                             # this node has a disk of its own
        publish(partial, final)


def publish(partial: Path, final: Path) -> None:
    """Rename a finished checkpoint into place, then move `latest` to it."""
    if final.exists():                                               # from a run that had to fall back to an older step
        shutil.rmtree(final)
    partial.rename(final)
    link = final.parent / ".latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / "latest")
    flush(final.parent)


def steps_in(out: Path) -> list[int]:
    """Steps with a checkpoint folder, ascending."""
    return sorted(int(path.name[5:]) for path in out.glob("step_*") if path.name[5:].isdigit())


def prune(out: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints, step_0 (the untrained baseline) and those that were best in an evaluation."""
    plain = [step for step in steps_in(out) if step and not (out / f"step_{step}" / "best.json").exists()]
    for step in plain[:-keep]:
        shutil.rmtree((out / f"step_{step}").rename(out / f".step_{step}.partial"))


def set_aside(out: Path, after: int) -> None:
    """Rename checkpoints past step `after`, where a run resumes, to aside_step_<n> (collective).

    Were they left in place, the next resume could jump to them, and pruning would take them for the newest.
    """
    for turn in (True, False):                                       # rank 0 first; others may have disks of their own
        for step in steps_in(out) if (dist.get_rank() == 0) is turn else ():
            if step > after:
                shutil.rmtree(out / f"aside_step_{step}", ignore_errors=True)
                (out / f"step_{step}").rename(out / f"aside_step_{step}")
                say(f"{out / f'step_{step}'} is now aside_step_{step}; delete it when you do not need it")
        dist.barrier()


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint folder, in words; empty when it is whole.

    A state/ that was deleted is no damage: the run continues from the weights, see load_state.
    """
    try:
        load_recipe(folder / "recipe.json")
        json.loads((folder / "config.json").read_text())
        sums = json.loads((folder / "trainer.json").read_text())["state"]
        with safe_open(folder / "model.safetensors", "pt") as file:  # compares the header with the file's length
            file.keys()
        for name in sums if (folder / "state").exists() else ():
            if (found := checksum(folder / "state" / name)) != sums[name]:
                return f"state/{name} has [bytes, crc32] {found} instead of {sums[name]}"
    except Exception as error:                                       # whatever a damaged file provokes is the answer
        return f"{type(error).__name__}: {error}"
    return ""


def choose_checkpoint(out: Path) -> int | None:
    """The newest step that every rank has and finds whole (collective); None to start fresh.

    SystemExit when there are checkpoints but none is whole: a random draft is not what the user wants to continue with.
    """
    everyone = gather(steps_in(out))
    common = sorted(set.intersection(*map(set, everyone)), reverse=True)
    if any(everyone) and not common:
        say(f"no checkpoint in {out} is on every rank's disk ({dict(enumerate(everyone))}): all ranks start fresh")
    for step in common:
        problems = {rank: text for rank, text in enumerate(gather(damage(out / f"step_{step}"))) if text}
        if not problems:
            return step
        say(f"warning: skipping the damaged checkpoint {out / f'step_{step}'}: "
            + "; ".join(f"rank {rank} found {text}" for rank, text in problems.items()))
    if common:
        raise SystemExit(f"{out} has checkpoints but none is whole (see above); bring one back, or move the folder "
                         "away to start anew")
    return None


def load_state(folder: Path, draft, optimizers) -> bool:
    """Load masters and moments onto this world size, whichever wrote them (collective); False when they are absent."""
    if not (folder / "state").exists():
        return False
    try:
        dcp.load(training_state(draft, optimizers), checkpoint_id=folder / "state")
    except CheckpointException as error:
        raise SystemExit(f"{folder / 'state'} does not fit this draft and optimizer ({error}); delete it to "
                         "go on from the weights alone, with the learning rate re-warmed") from error
    return True


def load_counters(folder: Path, recipe: Recipe, counters: dict) -> dict:
    """`counters` as they stood at a checkpoint. A changed recipe is reported, another corpus refused (SystemExit): its
    order is another."""
    trainer = json.loads((folder / "trainer.json").read_text())
    before, now = asdict(load_recipe(folder / "recipe.json")), asdict(recipe)
    if changed := [f"{key} {before[key]} -> {now[key]}" for key in now if before[key] != now[key]]:
        say(f"the recipe has changed since {folder.name}: {', '.join(changed)}")
    facts = ("corpus", "samples")
    if was := {key: trainer[key] for key in facts if trainer[key] != counters[key]}:
        raise SystemExit(f"{folder} was trained on another corpus ({was}, now {[counters[key] for key in facts]}); "
                         f"bring that one back, or move {folder.parent} away to start anew")
    carried = ("rewarm_since", "skipped_steps", "tokens", "rollbacks", "recent_ce")
    return counters | {key: trainer[key] for key in carried if key in trainer}
