"""The training loop: `python train.py [recipe]`, or `torchrun --nproc_per_node N train.py [recipe]`.

Every optimizer step takes the next global batch of the corpus, asks the frozen target for its hidden states, trains the
draft on them and writes down what happened; `train`, at the bottom, reads in that order. What stands above it are pure
functions of the step (learning rate, order of data, share of a rank), the optimizers and the journal. The loop does not
know which engine runs the target (capture.py does) nor what the loss means (dspark.py does).
Read next: checkpoint.py (how a run survives) and eval_deepspec.py (how good the draft is).
"""
import contextlib
import hashlib
import json
import math
import sys
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import eval_deepspec
import export
from capture import bigram_markov_init, load_target
from captures import CaptureCache, capture_batch, open_capture_cache
from checkpoint import choose_checkpoint, full_tensors, load_counters, load_state, prune, save_checkpoint, set_aside
from data_glm import drop_torn_line, load_tokens, read_rows
from dflash2 import new_draft
from dspark import DSparkDraft
from ranks import (
    StopRequest,
    World,
    agree,
    alone_in,
    first_here_then_others,
    gather,
    say,
    signals_restored,
    start_world,
    whole,
)
from recipe import Recipe, get_recipe, recipe_hash
from targets import plain_errors, target_path

BIGRAM_SAMPLES = 1024                            # of the corpus, for the Markov head's start
SUMMED_METRICS = ("nonfinite_tokens", "blocks")  # counts; every other metric is a mean over the micro-steps


# ---------------------------------------------------------------------------------------------------------------------
# Pure functions of the step: learning rate, order of data, who trains on what


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


def epoch_order(seed: int, epoch: int, num_samples: int) -> list[int]:
    """The samples of an epoch in reading order; a resume in mid-epoch reads exactly those that were not read yet."""
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch, -1))
    return torch.randperm(num_samples, generator=generator).tolist()


@dataclass(frozen=True)
class Plan:
    """How a global batch is cut: into micro-steps of `micro` consecutive samples of the epoch's order, each of which is
    split over `replicas` targets, and each target's part over the `tp` ranks that share it."""
    micro: int
    accumulation: int                            # micro-steps per optimizer step
    replicas: int
    tp: int
    scatter: bool                                # False: all ranks of a target train on its whole part
    steps_per_epoch: int                         # whole global batches
    total_steps: int

    def part(self, rank: int, samples: list[int]) -> tuple[list[int], slice]:
        """(the samples of a micro-step that this rank's target captures, the slice of them this rank trains on)."""
        replica, lane = divmod(rank, self.tp)
        held = self.micro // self.replicas
        own = held // self.tp if self.scatter else held
        first = lane * own if self.scatter else 0
        return samples[replica * held:(replica + 1) * held], slice(first, first + own)


def make_plan(recipe: Recipe, num_samples: int, world_size: int, tp: int = 1) -> Plan:
    """Derive the accumulation; SystemExit with the numbers when something does not divide.

    With tp > 1 every target takes `micro_batch` samples. With tp = 1 all ranks together do, so that a micro-step holds
    the same samples at any world size; where there are more ranks than samples, each rank takes one.
    """
    replicas = world_size // tp
    micro = recipe.micro_batch * replicas if tp > 1 else max(recipe.micro_batch, world_size)
    if micro % replicas:
        fitting = [n for n in range(1, micro + 1) if micro % n == 0]
        raise SystemExit(f"{recipe.name}: micro_batch {recipe.micro_batch} does not split over {world_size} processes; "
                         f"start one of {fitting}, or change micro_batch in recipe.py")
    if recipe.global_batch % micro:
        raise SystemExit(f"{recipe.name}: global_batch {recipe.global_batch} is not a multiple of {micro}, the samples "
                         f"of one micro-step ({world_size} processes, micro_batch {recipe.micro_batch}); change one of "
                         "them in recipe.py, or the number of processes")
    steps_per_epoch = num_samples // recipe.global_batch
    if steps_per_epoch == 0:
        raise SystemExit(f"{recipe.name}: {num_samples} samples do not fill one global batch of {recipe.global_batch}; "
                         "use a larger corpus or a smaller global_batch (recipe.py)")
    return Plan(micro, recipe.global_batch // micro, replicas, tp, micro // replicas % tp == 0, steps_per_epoch,
                recipe.max_steps or recipe.epochs * steps_per_epoch)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest orthogonal matrix (K. Jordan, 2024).

    torch's own Muon iterates in bf16, which is ten times slower on a CPU without AMX. A sharded gradient is gathered,
    every rank iterates on the whole matrix and keeps its own rows, so the update does not depend on the world size.
    """

    def __init__(self, matrices, lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = split_like(orthogonalise(whole(p.grad.lerp(buffer, group["momentum"]))), p)   # Nesterov
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def split_like(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank holds whole, sharded as the parameter p is."""
    if not isinstance(p, DTensor):
        return tensor
    return DTensor.from_local(tensor, p.device_mesh, [Replicate()]).redistribute(placements=p.placements)


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """About U V' of matrix = U S V': five Newton-Schulz steps in fp32 bring singular values to between 0.7 and 1.2."""
    x = matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def make_optimizers(draft: torch.nn.Module, recipe: Recipe) -> dict[torch.optim.Optimizer, float]:
    """{optimizer: its learning rate at the schedule's peak}. Muon takes `fc` and the layers' matrices, AdamW the rest.

    The moments are made here rather than in the first step, so that a checkpoint finds them to write and to load into.
    """
    if recipe.optimizer not in ("adamw", "muon"):
        raise SystemExit(f"{recipe.name}: optimizer {recipe.optimizer!r} is neither adamw nor muon; mend recipe.py")
    matrices, rest = [], []
    for name, p in draft.named_parameters():
        for_muon = recipe.optimizer == "muon" and p.ndim == 2 and name.startswith(("fc.", "layers."))
        (matrices if for_muon else rest).append(p)
    adamw = torch.optim.AdamW(rest, lr=recipe.lr, weight_decay=recipe.weight_decay)
    for p in rest:
        adamw.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p.data),
                          "exp_avg_sq": torch.zeros_like(p.data)}
    if not matrices:
        return {adamw: recipe.lr}
    muon = Muon(matrices, recipe.muon_lr)
    for p in matrices:
        muon.state[p] = {"momentum_buffer": torch.zeros_like(p.data)}
    return {adamw: recipe.lr, muon: recipe.muon_lr}


# ---------------------------------------------------------------------------------------------------------------------
# What happened: clock, journal, culprits


class Clock:
    """Seconds by phase since the last reset: `with clock("capture"): ...`."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.start, self.seconds = time.perf_counter(), defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def elapsed(self) -> float:
        return max(time.perf_counter() - self.start, 1e-9)

    def shares(self) -> dict[str, float]:
        return {f"share_{phase}": round(seconds / self.elapsed(), 4) for phase, seconds in self.seconds.items()}


def cut_lines(path: Path, step: int) -> None:
    """Drop the lines of a jsonl file that lie past `step` or were cut short, so that every step stands in it once."""
    if not path.exists():
        return
    drop_torn_line(path)
    try:
        rows = [row for row in read_rows(path) if row["step"] <= step]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


class Journal:
    """metrics.jsonl, TensorBoard and the progress bar, on rank 0."""

    def __init__(self, out: Path, recipe: Recipe, step: int, total_steps: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and rank 0 alone needs it
        cut_lines(out / "metrics.jsonl", step)
        cut_lines(out / "evals.jsonl", step)
        self.log_every, self.total_steps = recipe.log_every, total_steps
        self.file = (out / "metrics.jsonl").open("a")
        self.board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
        self.bar = tqdm(total=total_steps, initial=step, desc=recipe.name, unit="step", dynamic_ncols=True)

    def write(self, line: dict) -> None:
        self.bar.update()
        tau = line.get("tau_probabilistic", line.get("tau_greedy"))
        self.bar.set_postfix_str(f"loss {line['loss']:.3f}, tau {tau:.3f}, "
                                 f"{line['tokens_per_s']:.0f} tokens/s")
        if line["step"] % self.log_every == 0 or line["step"] == self.total_steps:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            for key, value in line.items():
                self.board.add_scalar(key, value, line["step"])

    def close(self) -> None:
        self.bar.close()
        self.file.close()
        self.board.close()


def culprits(draft: torch.nn.Module, metrics: dict, samples: list[int], complaints: list[str]) -> str:
    """Who made a step non-finite: which metrics, and per rank which gradients, samples and terms (collective)."""
    def finite(grad: torch.Tensor) -> bool:
        return bool((grad.to_local() if isinstance(grad, DTensor) else grad).isfinite().all())

    bad = [name for name, p in draft.named_parameters() if p.grad is not None and not finite(p.grad)]
    odd = [key for key, value in metrics.items() if not math.isfinite(value)]
    return f"metrics {odd or 'all finite'}; " + "; ".join(
        f"rank {rank}: {len(names)} gradients, first {(names or ['none'])[0]}, samples {indices}; " + "; ".join(why)
        for rank, (names, indices, why) in enumerate(gather((bad, samples, complaints))) if names or why)


# ---------------------------------------------------------------------------------------------------------------------
# The loop and what it calls


def make_draft(recipe: Recipe, target, folder: Path | None) -> DSparkDraft:
    """The draft of a checkpoint folder, loaded strictly, or a fresh one when folder is None; equal on every rank."""
    torch.manual_seed(recipe.seed)
    draft = new_draft(recipe)
    draft.attach(target.embed_tokens, target.lm_head)
    if folder is not None:
        tensors = export.load_draft_tensors(folder)
        draft.load_tensors({name: tensor.float() for name, tensor in tensors.items()}, where=str(folder))
    draft.to(target.device)
    for p in draft.parameters():
        dist.broadcast(p.data, 0)
    return draft.train()


def start_from_bigrams(draft: DSparkDraft, recipe: Recipe, target, tokens, cache: CaptureCache | None) -> None:
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


def evaluate(target, draft: DSparkDraft, recipe: Recipe, out: Path, step: int, dtype: torch.dtype, stop: StopRequest):
    """Accept length of the draft as it is, on an unsharded copy; the best checkpoint so far is marked as one to keep.

    A failing evaluation prints its traceback and training goes on, its random state as it was.
    """
    try:
        copy = new_draft(recipe).attach(target.embed_tokens, target.lm_head)
        copy.load_tensors(full_tensors(draft, dtype))
        with torch.random.fork_rng():
            results = eval_deepspec.evaluate(target, copy.to(target.device, dtype).eval(), recipe, stop=stop)
    except Exception:
        say(f"the evaluation at step {step} failed, training goes on:\n{traceback.format_exc()}")
        return
    if dist.get_rank() == 0 and results and not stop():
        mean = sum(result["accept_len"] for result in results.values()) / len(results)
        best = max((json.loads(path.read_text())["accept_len"] for path in out.glob("step_*/best.json")), default=0.0)
        record = json.dumps({"step": step, "accept_len": mean, "tasks": results})
        with (out / "evals.jsonl").open("a") as file:
            file.write(record + "\n")
        if mean > best:
            (out / f"step_{step}" / "best.json").write_text(record + "\n")
        say(f"step {step}: accept length {mean:.3f}" + (", the best so far" if mean > best else ""))


def crosses(step: int, interval: float) -> bool:
    """Whether (step - 1, step] holds a multiple of `interval`, in steps and perhaps fractional."""
    return math.floor(step / interval + 1e-9) > math.floor((step - 1) / interval + 1e-9)


@signals_restored()
def train(recipe: Recipe, out: Path | None = None) -> Path:
    """Run a recipe to its end, or go on where its folder `out` (default out/<recipe>) stands. Returns the folder."""
    out = Path("out") / recipe.name if out is None else Path(out)
    world = start_world()
    dtype = getattr(torch, recipe.dtype) if world.device.type == "cuda" else torch.float32
    try:
        (out / "heartbeat").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"cannot write in {out}: {error}; mend its permissions or make room") from error

    # What every rank must hold alike, before anything expensive starts.
    agree(recipe=recipe_hash(recipe), torch=torch.__version__)
    tokens = first_here_then_others(world, lambda: load_tokens(recipe))
    agree(corpus=tokens.key, samples=len(tokens))
    plan = make_plan(recipe, len(tokens), world.size, tp=world.local_size if recipe.engine == "sglang" else 1)
    resumed = choose_checkpoint(out)
    set_aside(out, after=-1 if resumed is None else resumed)
    start, folder = resumed or 0, None if resumed is None else out / f"step_{resumed}"
    if start >= plan.total_steps:
        say(f"{recipe.name}: all {plan.total_steps} steps are done, see {folder}")
        return out

    # Target, draft, optimizers; where the run stands.
    target = first_here_then_others(world, lambda: load_target(recipe, world.device))
    cache = open_capture_cache(recipe, target, tokens) if recipe.cache_captures and plan.tp == 1 else None
    draft = make_draft(recipe, target, folder)
    shard(draft, world, dtype)
    optimizers = make_optimizers(draft, recipe)
    stop, clock = StopRequest(), Clock()
    corpus = {"corpus": tokens.key, "samples": len(tokens)}
    counters = {"recipe_hash": recipe_hash(recipe), **corpus, "world_size": world.size, "rewarm_since": None,
                "skipped_steps": 0, "tokens": 0}
    if folder is None:
        save_checkpoint(out, 0, draft, optimizers, recipe, counters, dtype)                     # the untrained baseline
    else:
        before = load_counters(folder, recipe, corpus)
        counters |= {key: before[key] for key in ("rewarm_since", "skipped_steps", "tokens")}
        if not load_state(folder, draft, optimizers):
            say(f"{folder} has no optimizer state: re-warming the learning rate over {recipe.rewarm_steps} steps")
            counters["rewarm_since"] = start
        say(f"resumed at step {start}")
    if start == 0 and recipe.markov_init == "bigram":
        start_from_bigrams(draft, recipe, target, tokens, cache)
    agree(step=start, plan=plan, counters=counters)
    say(f"{recipe.name}: {len(tokens)} samples; global batch {recipe.global_batch} = {plan.micro} samples x "
        f"{plan.accumulation} micro-steps on {world.size} process(es)"
        + ("" if plan.scatter else ", NOT scattered (the batch does not divide by the ranks of a target)")
        + f"; {plan.total_steps} steps, {plan.steps_per_epoch} per epoch; checkpoints in {out}")
    journal = Journal(out, recipe, start, plan.total_steps) if world.rank == 0 else None

    order, order_of = [], None
    for step in range(start, plan.total_steps):
        epoch, place = divmod(step, plan.steps_per_epoch)
        if epoch != order_of:
            order, order_of = epoch_order(recipe.seed, epoch, len(tokens)), epoch
        batch = order[place * recipe.global_batch:(place + 1) * recipe.global_batch]
        rate = lr_at(step, recipe, plan.total_steps) * rewarm(step, counters["rewarm_since"], recipe)
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
            target.drain()                       # the engine's own device work must not race FSDP's collectives: twice
            with clock("forward"):
                last = i == plan.accumulation - 1
                draft.set_requires_gradient_sync(last)      # gradients add up here and are reduced once per step,
                draft.set_reshard_after_backward(last)      # and until then the weights stay gathered
                loss, measured = draft(input_ids, context, loss_mask, final, seeds=seeds, lengths=lengths.tolist())
            target.drain()                       # either race wedges NCCL
            with clock("backward"):
                (loss / plan.accumulation).backward()
            loss_sum += loss.detach()
            own_tokens += int(lengths.sum())
            own_samples += samples
            complaints += [f"samples {[samples[b] for b in rows]}: {why}" for rows, why in draft.complaints]
            draft.complaints.clear()
            for key, value in measured.items():
                metrics[key] += value if key in SUMMED_METRICS else value / plan.accumulation

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
            counters["tokens"] += int(num_tokens)

        done, finished = step + 1, step + 1 == plan.total_steps
        line = {"step": done, "epoch": done / plan.steps_per_epoch, "loss": loss, "lr": rate,
                "grad_norm": float(grad_norm), **{key: float(value) for key, value in metrics.items()},
                "samples_per_s": recipe.global_batch / clock.elapsed(), "tokens_per_s": num_tokens / clock.elapsed(),
                **clock.shares()}
        clock.reset()
        with clock("log"):
            beat = f"{time.strftime('%F %T')} step {done} loss {loss:.4f}\n"
            (out / "heartbeat" / f"rank_{world.rank}").write_text(beat)
            if journal:
                journal.write(line)

        evaluating = recipe.evals_per_epoch > 0 and crosses(done, plan.steps_per_epoch / recipe.evals_per_epoch)
        if done % recipe.save_every == 0 or evaluating or finished or stopping:
            with clock("save"):
                save_checkpoint(out, done, draft, optimizers, recipe, counters, dtype)
                if world.rank == 0:
                    prune(out, recipe.keep_checkpoints)
        if evaluating and not stopping:
            with clock("evaluate"):
                evaluate(target, draft, recipe, out, done, dtype, stop)
        if stopping:
            say(f"stopped by {stop.came or 'a signal to another rank'}; step {done} is saved, the same command resumes")
            break

    if journal:
        journal.close()
        export.refuse_errors(out / f"step_{done}", target_path(recipe))
    return out


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        raise SystemExit("usage: python train.py [recipe], or torchrun --nproc_per_node N train.py [recipe]")
    recipe = get_recipe(*sys.argv[1:])
    with plain_errors(), alone_in(Path("out") / recipe.name, start_world()):
        train(recipe)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
