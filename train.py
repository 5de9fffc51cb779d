"""The training loop: `python train.py [recipe]`, or `torchrun --nproc_per_node N train.py [recipe]`.

Every optimizer step takes the next global batch of the corpus, asks the frozen target for its hidden states, trains the
draft on them and writes down what happened; `train`, at the bottom, reads in that order. It does not know which engine
runs the target (capture.py does), what the loss means (dspark.py) nor how a batch is cut (plan.py).
Read next: checkpoint.py (how a run survives) and eval_deepspec.py (how good the draft is).
"""
import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import shutil
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import eval_deepspec
import export
from capture import bigram_markov_init, load_target
from captures import capture_batch, open_capture_cache
from checkpoint import (
    change_counters,
    choose_checkpoint,
    damage,
    full_tensors,
    load_counters,
    load_state,
    save_checkpoint,
    set_aside,
    steps_in,
    write_alike,
)
from data_glm import load_tokens, read_rows
from dflash2 import new_draft
from dspark import DSparkDraft
from journal import Clock, Journal
from layouts import load_draft_tensors
from optimizers import make_optimizers, split_like
from plan import Plan, describe, make_plan
from ranks import (
    StopRequest,
    World,
    agree,
    alone_in,
    end_world,
    first_here_then_others,
    gather,
    say,
    signals_restored,
    start_world,
    whole,
)
from recipe import Recipe, get_recipe, recipe_hash
from recipe_check import require_fit
from targets import plain_errors, target_path

BIGRAM_SAMPLES = 1024                            # of the corpus, for the Markov head's start
SUMMED_METRICS = ("nonfinite_tokens", "blocks")  # counts; every other metric is a mean over the micro-steps
ROLLBACK_LR = 0.5                                # factor on the learning rate after each rollback


# ---------------------------------------------------------------------------------------------------------------------
# Pure functions of the step: learning rate and order of data


def lr_at(step: int, recipe: Recipe, total_steps: int) -> float:
    """Learning rate of step `step`, counted from 0: linear warmup over W = int(warmup_ratio * T) steps, a cosine to 0.

    Closed form on purpose. A recurrent scheduler multiplies what it finds in the parameter group, so a rate that was
    damped once stays damped for the rest of the run.
    """
    warmup = int(recipe.warmup_ratio * total_steps)
    peak = recipe.lr * recipe.lr_scale
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup))) / 2


def rewarm(step: int, since: int | None, recipe: Recipe) -> float:
    """Factor (i+1) / rewarm_steps on the learning rate, i steps after a resume at step `since` that lost the moments.

    Adam's first steps without history are sign-like kicks of size lr; at full rate they destroy a converged draft.
    """
    return 1.0 if since is None else min(1.0, (step - since + 1) / max(1, recipe.rewarm_steps))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """63-bit seed of sample `index`'s anchors in `epoch`: the same on any rank, in any batch, at any world size."""
    digest = hashlib.blake2b(f"{seed}:{epoch}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@functools.lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, num_samples: int) -> list[int]:
    """The samples of an epoch in reading order; a resume in mid-epoch reads exactly those that were not read yet."""
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch, -1))
    return torch.randperm(num_samples, generator=generator).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The parts of the loop


def make_draft(recipe: Recipe, target, folder: Path | None) -> DSparkDraft:
    """The draft of a checkpoint folder, loaded strictly, or a fresh one when folder is None; equal on every rank."""
    torch.manual_seed(recipe.seed)
    draft = new_draft(recipe)
    draft.attach(target.embed_tokens, target.lm_head)
    if folder is not None:
        tensors = load_draft_tensors(folder)
        draft.load_tensors({name: tensor.float() for name, tensor in tensors.items()}, where=str(folder))
    draft.to(target.device)
    for p in draft.parameters():
        dist.broadcast(p.data, 0)
    return draft.train()


def start_from_bigrams(draft: DSparkDraft, recipe: Recipe, target, tokens, cache: Path | None) -> None:
    """Let the Markov head start as the target's own bigram model on the corpus (capture.bigram_markov_init)."""
    def samples():                               # (input_ids [S], final [S, H])
        for i in tqdm(range(min(len(tokens), BIGRAM_SAMPLES)), desc="bigrams of the target", unit="sample"):
            input_ids, _, lengths = read_batch(tokens, [i], target.device)
            yield input_ids[0], capture_batch(target, cache, [i], input_ids, lengths).final[0]

    head, rank = draft.markov_head, recipe.markov_rank
    factors = [torch.empty(recipe.vocab_size, rank, device=target.device) for _ in range(2)]
    if dist.get_rank() == 0:
        factors = [f.to(target.device) for f in bigram_markov_init(target.lm_head, samples(), rank)]
    for p, factor in zip((head.markov_w1.weight, head.markov_w2.weight), factors, strict=True):
        dist.broadcast(factor, 0)
        p.data.copy_(split_like(factor, p))


def shard(draft: DSparkDraft, world: World, dtype: torch.dtype) -> None:
    """FSDP2: fp32 masters and gradients are sharded; the weights are gathered once per step and compute in `dtype`."""
    options = {"mesh": init_device_mesh(world.device.type, (world.size,)), "reshard_after_forward": False}
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in draft.layers:
        fully_shard(layer, **options)
    fully_shard(draft, **options)


def read_batch(tokens, indices: list[int], device: torch.device):
    """Samples as (input_ids [B, S], loss_mask [B, S], lengths [B] on the CPU), padded with zeros that nothing reads."""
    ids, masks = zip(*(tokens[i] for i in indices), strict=True)
    lengths = torch.tensor([len(row) for row in ids])
    input_ids, loss_mask = (pad_sequence([torch.as_tensor(row).long() for row in rows], batch_first=True).to(device)
                            for rows in (ids, masks))
    return input_ids, loss_mask, lengths


def culprits(draft: torch.nn.Module, metrics: dict, samples: list[int], complaints: list[str]) -> str:
    """Who made a step non-finite: which metrics, and per rank which gradients, samples and terms (collective)."""
    def finite(grad: torch.Tensor) -> bool:
        return bool((grad.to_local() if isinstance(grad, DTensor) else grad).isfinite().all())

    bad = [name for name, p in draft.named_parameters() if p.grad is not None and not finite(p.grad)]
    odd = [key for key, value in metrics.items() if not math.isfinite(value)]
    return f"metrics {odd or 'all finite'}; " + "; ".join(
        f"rank {rank}: {len(names)} gradients, first {(names or ['none'])[0]}, samples {indices}; " + "; ".join(why)
        for rank, (names, indices, why) in enumerate(gather((bad, samples, complaints))) if names or why)


def evaluate(target, draft: DSparkDraft, recipe: Recipe, out: Path, step: int, dtype: torch.dtype,
             stop: StopRequest) -> bool:
    """Accept length of the draft as it is, on an unsharded copy; the best checkpoint so far is marked as one to keep.

    A failing evaluation prints its traceback and training goes on, its random state as it was. Returns whether any rank
    was asked to stop: that abandons the evaluation, and the next start makes it up.
    """
    results = {}
    try:
        copy = new_draft(recipe).attach(target.embed_tokens, target.lm_head)
        copy.load_tensors(full_tensors(draft, dtype))
        with torch.random.fork_rng():
            results = eval_deepspec.evaluate(target, copy.to(target.device, dtype).eval(), recipe, stop=stop)
    except Exception:                            # said by the rank where it happened, which need not be the first
        tqdm.write(f"the evaluation at step {step} failed on rank {dist.get_rank()}, training goes on:\n"
                   + traceback.format_exc(), file=sys.stderr)
    best = max((json.loads(path.read_text())["accept_len"] for path in out.glob("step_*/best.json")), default=0.0)
    stopped, have, bests = zip(*gather((stop(), bool(results), best)), strict=True)
    if any(stopped) or not all(have):            # where it failed on one rank, the others leave here with it
        return any(stopped)
    mean = sum(result["accept_len"] for result in results.values()) / len(results)
    record, better = {"step": step, "accept_len": mean, "tasks": results}, mean > bests[0]
    if better:
        write_alike(out / f"step_{step}" / "best.json", record)
    if dist.get_rank() == 0:
        with (out / "evals.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    say(f"step {step}: accept length {mean:.3f}" + (", the best so far" if better else ""))
    return False


def evaluation_due(recipe: Recipe, plan: Plan, out: Path, step: int) -> bool:
    """Whether an evaluation after `step` steps is wanted (evenly spread, though an interval need not be whole) and not
    in evals.jsonl yet (collective)."""
    before, now = (math.floor(n * recipe.evals_per_epoch / plan.steps_per_epoch + 1e-9) for n in (step - 1, step))
    path = out / "evals.jsonl"
    return step > 0 and now > before and not gather(
        path.exists() and any(row["step"] == step for row in read_rows(path)))[0]


def collapsed(recent: list, step: int, ce: float, window: int) -> int | None:
    """Note the cross-entropy of `step` in `recent`; where it is twice the least of the `window` steps before, that
    step. A skipped step's is not finite and says nothing."""
    if not window or not math.isfinite(ce):
        return None
    least, low = min(recent, default=[math.inf, 0])
    recent.append([ce, step])
    del recent[:-window]
    return low if ce > 2 * least else None


def roll_back(out: Path, low: int, draft: DSparkDraft, optimizers, recipe: Recipe, counters: dict) -> int:
    """Load the newest checkpoint from before step `low`, whose loss still spoke well of it, and halve the learning rate
    from there on (collective). Returns its step. SystemExit where none is left."""
    everyone = gather([step for step in steps_in(out) if 0 < step < low and (out / f"step_{step}" / "state").exists()
                       and not damage(out / f"step_{step}")])
    good = max(set.intersection(*map(set, everyone)), default=None)
    if good is None:
        raise SystemExit(f"the draft has collapsed: its cross-entropy doubled after step {low}, and no checkpoint is "
                         "that old and whole, state/ included. Lower lr_scale in recipe.py and start anew, or "
                         "keep_checkpoints longer")
    folder, rollbacks = out / f"step_{good}", counters["rollbacks"] + 1
    change_counters(folder, rollbacks=rollbacks)             # before anything else: the halved rate outlives a kill
    set_aside(out, after=good)
    load_state(folder, draft, optimizers)
    counters |= load_counters(folder, recipe, counters)
    say(f"the draft has collapsed: its cross-entropy doubled after step {low}. Back to step {good}, with "
        f"{ROLLBACK_LR ** rollbacks:g} of the learning rate")
    return good


@signals_restored()
def train(recipe: Recipe, out: Path | None = None) -> Path:
    """Run a recipe to its end, or go on where its folder `out` (default out/<recipe>) stands. Returns the folder."""
    out = Path("out") / recipe.name if out is None else Path(out)
    world = start_world()
    dtype = getattr(torch, recipe.dtype) if world.device.type == "cuda" else torch.float32
    (out / "heartbeat").mkdir(parents=True, exist_ok=True)
    if recipe.wandb and importlib.util.find_spec("wandb") is None:
        raise SystemExit(f"{recipe.name}: the recipe logs to wandb project {recipe.wandb!r}, but the package is not "
                         "installed: .venv/bin/python -m pip install wandb, or wandb = \"\" in recipe.py")
    stop, clock = StopRequest(), Clock()

    # What every rank must hold alike, before anything expensive starts.
    agree(recipe=recipe_hash(recipe), torch=torch.__version__)
    first_here_then_others(world, lambda: require_fit(recipe, target_path(recipe)))
    tokens = first_here_then_others(world, lambda: load_tokens(recipe))
    agree(corpus=tokens.key, samples=len(tokens))
    plan = make_plan(recipe, len(tokens), world.size, tp=world.local_size if recipe.engine == "sglang" else 1)
    resumed = choose_checkpoint(out)
    set_aside(out, after=-1 if resumed is None else resumed)
    start, folder = resumed or 0, None if resumed is None else out / f"step_{resumed}"
    due = functools.partial(evaluation_due, recipe, plan, out)
    if start >= plan.total_steps and not due(start):
        say(f"{recipe.name}: all {plan.total_steps} steps are done, see {folder}")
        return out

    # Target, draft, optimizers; where the run stands. A target over several ranks is loaded by all of them at once.
    if plan.tp > 1:
        with plain_errors(ValueError):
            target = load_target(recipe, world.device)
    else:
        target = first_here_then_others(world, lambda: load_target(recipe, world.device))
    cache = open_capture_cache(recipe, target, tokens) if recipe.cache_captures and plan.tp == 1 else None
    draft = make_draft(recipe, target, folder)
    shard(draft, world, dtype)
    optimizers = make_optimizers(draft, recipe)
    counters = {"corpus": tokens.key, "samples": len(tokens), "world_size": world.size, "rewarm_since": None,
                "skipped_steps": 0, "tokens": 0, "rollbacks": 0, "recent_ce": []}     # pairs (cross-entropy, step)
    if folder is None:
        save_checkpoint(out, 0, draft, optimizers, recipe, counters, dtype)                     # the untrained baseline
    else:
        counters = load_counters(folder, recipe, counters)
        if not load_state(folder, draft, optimizers):
            say(f"{folder} has no optimizer state: re-warming the learning rate over {recipe.rewarm_steps} steps")
            counters["rewarm_since"] = start
        say(f"resumed at step {start}")
    if start == 0 and recipe.markov_init == "bigram":
        start_from_bigrams(draft, recipe, target, tokens, cache)
    agree(step=start, plan=plan, counters=counters)
    say(f"{describe(recipe, plan, len(tokens))}, in {out}")
    journal = Journal(out, recipe, start, plan.total_steps) if world.rank == 0 else None

    if due(start):                               # the run was killed before its evaluation ended
        evaluate(target, draft, recipe, out, start, dtype, stop)

    copies = 1 if plan.scatter else plan.tp      # ranks that train on the same samples: these are counted once
    step = start
    clock.reset()
    while step < plan.total_steps:
        epoch, place = divmod(step, plan.steps_per_epoch)
        order = epoch_order(recipe.seed, epoch, len(tokens))
        batch = order[place * recipe.global_batch:(place + 1) * recipe.global_batch]
        rate = lr_at(step, recipe, plan.total_steps) * rewarm(step, counters["rewarm_since"], recipe)
        rate *= ROLLBACK_LR ** counters["rollbacks"]
        loss_sum, own_tokens, own_samples, complaints, metrics = 0.0, 0, [], [], defaultdict(float)

        for i in range(plan.accumulation):
            with clock("data"):
                held, own = plan.part(world.rank, batch[i * plan.micro:(i + 1) * plan.micro])
                input_ids, loss_mask, lengths = read_batch(tokens, held, world.device)
            with clock("capture"):
                captured = capture_batch(target, cache, held, input_ids, lengths)
                samples, lengths = held[own], lengths[own]
                seeds, longest = [sample_seed(recipe.seed, epoch, index) for index in samples], int(lengths.max())
                input_ids, loss_mask, context, final = (x[own, :longest].contiguous() for x in (
                    input_ids, loss_mask, captured.context, captured.final))
            target.drain()                       # the engine's own device work must not race the forward's collectives,
            with clock("forward"):
                last = i == plan.accumulation - 1
                draft.set_requires_gradient_sync(last)      # gradients add up here and are reduced once per step,
                draft.set_reshard_after_backward(last)      # and until then the weights stay gathered
                loss, measured = draft(input_ids, context, loss_mask, final, seeds=seeds, lengths=lengths.tolist())
            target.drain()                       # nor the backward's: NCCL wedges
            with clock("backward"):
                (loss / plan.accumulation).backward()
            loss_sum += loss.detach()
            own_tokens += int(lengths.sum()) / copies
            own_samples += samples
            complaints += [f"samples {[samples[b] for b in rows]}: {why}" for rows, why in draft.complaints]
            draft.complaints.clear()
            for key, value in measured.items():
                metrics[key] += value / (copies if key in SUMMED_METRICS else plan.accumulation)

        with clock("optimizer"):
            grads = [p.grad for p in draft.parameters() if p.grad is not None]
            grad_norm = whole(get_total_norm(grads))        # over all ranks, before the clip
            if grad_norm.isfinite():
                clip_grads_with_norm_(draft.parameters(), recipe.grad_clip, grad_norm)
                for optimizer, peak in optimizers.items():
                    for group in optimizer.param_groups:
                        group["lr"] = rate / recipe.lr * peak
                    optimizer.step()
            else:                                # all ranks see the same norm, so all of them skip
                counters["skipped_steps"] += 1
                say(f"skipping step {step + 1}, gradient norm {grad_norm}: "
                    + culprits(draft, metrics, own_samples, complaints))
            draft.zero_grad()
            totals = torch.tensor([float(loss_sum), own_tokens, stop()], dtype=torch.float64, device=world.device)
            dist.all_reduce(totals)
            loss, num_tokens, stopping = totals.tolist()
            loss /= world.size * plan.accumulation
            counters["tokens"] += round(num_tokens)

        step += 1
        line = {"step": step, "epoch": step / plan.steps_per_epoch, "loss": loss, "lr": rate,
                "grad_norm": float(grad_norm), **{key: float(value) for key, value in metrics.items()},
                "samples_per_s": recipe.global_batch / clock.elapsed(), "tokens_per_s": num_tokens / clock.elapsed(),
                **clock.shares()}
        clock.reset()
        with clock("log"):
            beat = f"{time.strftime('%F %T')} step {step} loss {loss:.4f}\n"
            (out / "heartbeat" / f"rank_{world.rank}").write_text(beat)
            if journal:
                journal.write(line)

        if low := collapsed(counters["recent_ce"], step, float(metrics["ce_loss"]), recipe.rollback_steps):
            step = roll_back(out, low, draft, optimizers, recipe, counters)
            if journal:
                journal.close()
                journal = Journal(out, recipe, step, plan.total_steps)
            continue
        evaluating = due(step)
        if evaluating or stopping or step % recipe.save_every == 0 or step == plan.total_steps:
            with clock("save"):
                save_checkpoint(out, step, draft, optimizers, recipe, counters, dtype)
        if evaluating and not stopping:
            with clock("evaluate"):
                stopping = evaluate(target, draft, recipe, out, step, dtype, stop)
        if stopping:
            say(f"stopped by {stop.came or 'a signal to another rank'}; step {step} is saved, the same command resumes")
            break

    if journal:
        journal.close()
        export.refuse_errors(out / f"step_{step}", target_path(recipe))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a draft, or go on where its run stands.")
    parser.add_argument("recipe", nargs="?", help="a name in recipe.py")
    parser.add_argument("--smoke", type=int, metavar="STEPS", help="so many steps in out/<recipe>-smoke; 2 starts anew")
    options = parser.parse_args()
    recipe, world = get_recipe(options.recipe), start_world()
    if options.smoke:
        recipe = dataclasses.replace(recipe, name=f"{recipe.name}-smoke", max_steps=options.smoke, save_every=2,
                                     evals_per_epoch=0)
        if options.smoke == 2:
            shutil.rmtree(Path("out") / recipe.name, ignore_errors=True)
            dist.barrier()
    with plain_errors(), alone_in(Path("out") / recipe.name, world):
        train(recipe)


if __name__ == "__main__":
    main()
    end_world()
