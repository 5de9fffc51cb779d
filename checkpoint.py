"""Checkpoints that are whole or not there, and the resume that continues from them bit for bit.

    out/<recipe>/step_<n>/   after n optimizer steps:
        model.safetensors    the draft, DeepSpec tensor names, in the compute dtype
        config.json          its geometry
        recipe.json          the recipe that trained it
        trainer.json         the loop's counters; size and checksum of every other file
        state/               fp32 masters and optimizer moments, each rank's shards (torch.distributed.checkpoint)
    out/<recipe>/latest      a link to the newest one

A checkpoint is written under a temporary name, flushed to disk and renamed; `latest` moves last. Functions that say
"collective" are called by all ranks together. Read next: train.py, which calls these.
"""
import contextlib
import json
import shutil
import sys
import zlib
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from layouts import stamp
from ranks import end_world, gather, say, start_world, whole
from recipe import Recipe, load_recipe, save_recipe
from targets import flush, plain_errors

PIECE = 1 << 26                                   # bytes of a file that travel at once


def full_tensors(draft: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The draft's trainable tensors, unsharded, on the CPU (collective)."""
    return {name: whole(p.detach()).to("cpu", dtype).contiguous() for name, p in draft.named_parameters()}


def training_state(draft: torch.nn.Module, optimizers) -> dict[str, torch.Tensor]:
    """The very tensors that a step changes: masters under their names, moments under name and slot.

    torch.distributed.checkpoint reads them when it saves and writes into them when it loads. Adam's counts are not
    among them: they are one number, and whoever is not sharded would lie on the disk of one node only.
    """
    state = dict(draft.named_parameters())
    names = {p: name for name, p in state.items()}
    for optimizer in optimizers:
        for p, slots in optimizer.state.items():
            state |= {f"{names[p]}.{slot}": tensor for slot, tensor in slots.items() if slot != "step"}
    return state


def adam_counts(optimizers) -> list[torch.Tensor]:
    """Steps that every parameter of AdamW has taken: as many equal numbers."""
    return [slots["step"] for optimizer in optimizers for slots in optimizer.state.values() if "step" in slots]


def checksum(path: Path) -> list[int]:
    """[bytes, crc32] of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def write_weights(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file that is the same on every node: the library puts metadata in any order."""
    save_file(tensors, path, metadata=metadata)
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) | {"__metadata__": metadata}
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":")).encode().ljust(length))


def save_checkpoint(out: Path, step: int, draft, optimizers, recipe: Recipe, counters: dict,
                    dtype: torch.dtype) -> None:
    """Write out/step_<step>/ (collective). SystemExit on all ranks when that fails; what was there stays usable.

    Where every node has a disk of its own, each holds its ranks' shards and all the rest: enough to go on with the same
    ranks on the same nodes. `sync` gives every node the others' shards.
    """
    rank, final, partial = dist.get_rank(), out / f"step_{step}", out / f".step_{step}.partial"
    for left in out.glob(".step_*.partial"):                         # by a run that was killed in here or in prune
        shutil.rmtree(left, ignore_errors=True)                      # its other ranks remove it, too
    problem = f"{partial} cannot be removed" if partial.exists() else ""
    dist.barrier()
    state, first, sums, metadata = partial / "state", False, {}, b""
    try:
        partial.mkdir(parents=True)
        first = True
    except FileExistsError:                                          # another rank of this disk was faster
        pass
    except OSError as error:
        problem = str(error)
    try:
        dcp.save(training_state(draft, optimizers), checkpoint_id=state)
        sums = {path.name: checksum(path) for path in state.glob(f"__{rank}_*")}
        if rank == 0:
            sums[".metadata"], metadata = checksum(state / ".metadata"), (state / ".metadata").read_bytes()
    except (OSError, CheckpointException) as error:
        problem = problem or str(error).strip().splitlines()[-1]
    everyone, tensors = gather((sums, metadata)), full_tensors(draft, dtype)
    if first and not problem:
        try:
            (state / ".metadata").write_bytes(everyone[0][1])
            write_weights(partial / "model.safetensors", tensors, stamp(draft.config))
            draft.config.save(partial, dtype)
            shutil.copymode(partial / "config.json", partial / "model.safetensors")                 # was made private
            save_recipe(recipe, partial / "recipe.json")
            files = {path.name: checksum(path) for path in sorted(partial.glob("*.*")) if path.is_file()}
            trainer = counters | {"step": step, "files": files,
                                  "state": {name: value for sums, _ in everyone for name, value in sums.items()},
                                  "adam_steps": max(map(int, adam_counts(optimizers)), default=0)}
            (partial / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n")
            flush(*partial.rglob("*"), partial)
        except (OSError, SafetensorError) as error:
            problem = str(error)
    if problems := [text for text in gather(problem) if text]:
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(out).free / 1e6
        raise SystemExit(f"step {step} could not be saved in {out}, where {free:.1f} MB are free: {problems[0]}. Those "
                         "before it are whole: make room or mend the permissions, then start the same command again")
    if first:
        publish(partial, final)
        prune(out, recipe.keep_checkpoints)
    dist.barrier()


def publish(partial: Path, final: Path) -> None:
    """Rename a finished checkpoint into place, then move `latest` to it."""
    if final.exists():                                               # from a run that had to fall back to an older step
        shutil.rmtree(final)
    partial.rename(final)
    move_latest(final)


def move_latest(final: Path) -> None:
    link = final.parent / ".latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / "latest")
    flush(final.parent)


def write_alike(path: Path, value) -> None:
    """Write a JSON file that every rank holds alike, whole or not at all, whosever disk it lies on."""
    partial = path.with_name(f".{path.name}.{dist.get_rank()}")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def steps_in(out: Path) -> list[int]:
    """Steps with a checkpoint folder, ascending."""
    return sorted(int(path.name[5:]) for path in out.glob("step_*") if path.name[5:].isdigit())


def prune(out: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints, step_0 (the untrained baseline) and those that were best in an evaluation."""
    plain = [step for step in steps_in(out) if step and not (out / f"step_{step}" / "best.json").exists()]
    for step in plain[:-keep]:
        shutil.rmtree((out / f"step_{step}").rename(out / f".step_{step}.partial"))


def set_aside(out: Path, after: int) -> None:
    """Rename checkpoints past step `after`, where a run resumes, to aside_step_<n>; `latest` names it (collective).

    Were they left in place, the next resume could jump to them, and pruning would take them for the newest. `latest`
    lags behind where a run was killed between a checkpoint's rename and its own.
    """
    later = [step for step in steps_in(out) if step > after]
    dist.barrier()
    for step in later:
        say(f"{out / f'step_{step}'} is now aside_step_{step}; delete it when you do not need it")
        with contextlib.suppress(FileNotFoundError):                 # another rank of this disk was faster
            mine = (out / f"step_{step}").rename(out / f".step_{step}.partial")
            shutil.rmtree(out / f"aside_step_{step}", ignore_errors=True)
            mine.rename(out / f"aside_step_{step}")
    if after >= 0 and (out / "latest").resolve().name != f"step_{after}":
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            move_latest(out / f"step_{after}")
    dist.barrier()


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint folder for this rank, in words; empty when it is whole.

    A state/ that was deleted is no damage: the run continues from the weights, see load_state. Other ranks' shards may
    lie on other nodes, unless the number of ranks has changed.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        load_recipe(folder / "recipe.json")
        trainer = json.loads((folder / "trainer.json").read_text())
        sums, may_lack = trainer["files"], set()
        if (folder / "state").exists():
            sums = sums | {f"state/{name}": value for name, value in trainer["state"].items()}
            if trainer["world_size"] == world_size:
                may_lack = {f"state/{name}" for name in trainer["state"] if name.startswith("__")
                            and not name.startswith(f"__{rank}_")}
        for name, expected in sums.items():
            if (folder / name).exists():
                if (found := checksum(folder / name)) != expected:
                    return f"{name} has [bytes, crc32] {found} instead of {expected}"
            elif name not in may_lack:
                return f"{name} is missing" + (" (with a disk on every node: bash run.sh sync)" * ("__" in name))
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
        problems = {rank: text for rank, text in enumerate(gather(
            damage(out / f"step_{step}"))) if text}
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
    trainer = json.loads((folder / "trainer.json").read_text())
    for count in adam_counts(optimizers):
        count.fill_(trainer["adam_steps"])
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
    return counters | {key: trainer[key] for key in carried}


def change_counters(folder: Path, **changes) -> None:
    """Change counters of a whole checkpoint, on every disk that holds it (to be called on all ranks)."""
    path = folder / "trainer.json"
    write_alike(path, json.loads(path.read_text()) | changes)


def sync(out: Path) -> None:
    """Give every node what the others hold of the checkpoints in `out` (collective, one process per node).

    Files travel by broadcast in pieces; a step that a node lacks appears there whole, a file it lacks under its name
    once it is complete. SystemExit when two nodes hold different files under one name.
    """
    held = {str(path.relative_to(out)): checksum(path) for step in steps_in(out)
            for path in (out / f"step_{step}").rglob("*") if path.is_file()}
    everyone, mine = gather(held), dist.get_rank()
    for name in sorted({name for one in everyone for name in one}):
        holders = [rank for rank, one in enumerate(everyone) if name in one]
        (size, crc), *others = {tuple(everyone[rank][name]) for rank in holders}
        if others:
            raise SystemExit(f"{name} is not the same on nodes {holders}; these are different runs: move {out} away on "
                             "the nodes where it is the wrong one")
        if len(holders) == len(everyone):
            continue
        say(f"{name}, {size / 1e6:.1f} MB: from node {holders[0]} to {sorted(set(range(len(everyone))) - {*holders})}")
        step = name.split("/")[0]
        folder = out if (out / step).exists() else out / f".{step}.sync"
        path = folder / (name if folder == out else name.partition("/")[2])
        partial = path.with_name(f".{path.name}.sync")
        lacking = mine not in holders
        if lacking:
            path.parent.mkdir(parents=True, exist_ok=True)
        with (open(out / name, "rb") if mine == holders[0] else partial.open("wb") if lacking
              else contextlib.nullcontext()) as file:
            for start in range(0, size, PIECE):
                piece = torch.empty(min(PIECE, size - start), dtype=torch.uint8)
                if mine == holders[0]:
                    file.readinto(piece.numpy())
                dist.broadcast(piece, holders[0])
                if lacking:
                    file.write(piece.numpy())
        if lacking:
            flush(partial)
            partial.rename(path)
    for folder in sorted(out.glob(".step_*.sync"), key=lambda path: int(path.name.split("_")[1][:-5])):
        publish(folder, out / folder.name[1:-5])
    dist.barrier()
    say(f"{out}: steps {steps_in(out)} are on all {len(everyone)} nodes")


if __name__ == "__main__":
    from recipe import get_recipe
    if sys.argv[1:2] != ["sync"] or len(sys.argv) > 3:
        raise SystemExit("usage: torchrun --nnodes N --node-rank R ... checkpoint.py sync [recipe]")
    start_world()
    with plain_errors():
        sync(Path("out") / get_recipe(*sys.argv[2:]).name)
    end_world()
