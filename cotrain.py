"""Online co-training: the target learns from rewards, its drafter learns from the target, and vLLM rolls out with both.

    python cotrain.py [recipe]                   out/cotrain/<recipe>; the same command resumes
    python cotrain.py [recipe] --frozen          the baseline: the drafter stays as it was, the target relives the
                                                 updates of out/cotrain/<recipe>; then both are drawn

While a target is trained with reinforcement learning, the drafter that makes its rollouts fast falls behind it. Each
step here is: rollout by the engine with the drafter attached, rewards, old log-probabilities (the same forward pass
hands out the hidden states a drafter needs), a GRPO update of the target, its weights into the engine, and, when due,
some optimizer steps of the drafter and its weights into the engine. `cotrain`, at the bottom, reads in that order.

The engine serves the newest *published* drafter and nothing else: an update of the target does not touch the draft, and
a drafter that was trained but not published changes nothing. Captured states carry the version of the target they came
from; states of two versions never meet in a batch. Read next: rollout.py (the engine), dflash2.py (the draft).
"""
import argparse
import copy
import dataclasses
import functools
import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from capture import HFTarget
from chat import encode_prompt
from checkpoint import prune, publish, steps_in
from data_glm import read_rows
from dflash2 import new_draft, serving_names
from journal import Clock, cut_lines
from layouts import load_draft_tensors
from optimizers import make_optimizers
from recipe import COTRAIN, Cotrain, recipe_hash
from rollout import check_contract, engine_has_dflash2, generate, send, serves, serving_state, start_engine, tensor_hash
from serve_check import interpret_triton, require_vllm
from targets import decoder_of, download, flush, locked, plain_errors, target_path
from tasks import REASONING, hub_rows

PATIENCE = 3                                     # due cycles without training, or failed publishes, before the run ends
OUT = Path("out") / "cotrain"


# ---------------------------------------------------------------------------------------------------------------------
# Rewards and the target's update


@functools.cache
def problem_set(task: str, seed: int, size: int):
    """(problem i, score(answer, problem)): reasoning-gym's generators and judges, or GSM8K's training questions."""
    if task == "gsm8k":
        rows = list(hub_rows("openai/gsm8k", "main/train*.parquet"))
        entries = [{"question": row["question"] + REASONING, "answer": row["answer"].split("####")[-1].strip()}
                   for row in rows]
        order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(seed)).tolist()
        return lambda i: entries[order[i % len(order)]], lambda a, e: a == e["answer"].replace(",", "")
    import reasoning_gym
    config = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}.get(task, {})
    data = reasoning_gym.create_dataset(task, seed=seed, size=size, **config)
    return data.__getitem__, data.score_answer


def problems(c: Cotrain, step: int) -> list[tuple[str, object]]:
    """The step's prompts, each with a function from an answer's text to its reward: its last number is judged."""
    entry_of, score = problem_set(c.task, c.seed, c.steps * c.prompts + 1)
    entries = [entry_of((step - 1) * c.prompts + i) for i in range(c.prompts)]

    def judge(entry: dict, text: str) -> float:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
        return float(score(numbers[-1] if numbers else None, entry))
    return [(entry["question"], functools.partial(judge, entry)) for entry in entries]


def advantages(rewards: list[float], group: int) -> list[float]:
    """GRPO: how much better an answer is than its siblings, in standard deviations; 0 where all are alike."""
    r = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    a = (r - r.mean(1, keepdim=True)) / (r.std(1, unbiased=False, keepdim=True) + 1e-6)
    return torch.where((r == r[:, :1]).all(1, keepdim=True), 0, a).flatten().tolist()    # a mean may be rounded


def token_logp(head: nn.Module, final: Tensor, ids: Tensor, prompt: int) -> Tensor:
    """Log-probabilities [n] of the answer's tokens: ids [S] behind a prompt of that length, final [S, H]."""
    logits = head(final[prompt - 1:-1]).float()
    return logits.log_softmax(-1).gather(1, ids[prompt:, None]).squeeze(1)


def update_actor(model: nn.Module, optimizer, samples: list[dict], c: Cotrain) -> None:
    """One pass of the clipped policy gradient over the samples, a token mean per mini-batch."""
    for first in range(0, len(samples), c.actor_batch):
        part = samples[first:first + c.actor_batch]
        ids = pad_sequence([s["ids"] for s in part], batch_first=True).to(model.device)
        final = decoder_of(model)(input_ids=ids).last_hidden_state     # right padding: nobody attends to it
        terms = []
        for row, tokens, s in zip(final, ids, part, strict=True):
            n = len(s["ids"])
            new = token_logp(model.get_output_embeddings(), row[:n], tokens[:n], s["prompt"])
            ratio = (new - s["logp"].to(new)).exp()
            terms.append(torch.minimum(ratio * s["advantage"],
                                       ratio.clamp(1 - c.clip, 1 + c.clip) * s["advantage"]))
        optimizer.zero_grad()
        (-torch.cat(terms).mean()).backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        else:
            tqdm.write(f"actor: skipping a mini-batch, gradient norm {norm}")
    optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------------------------------
# Collecting, deciding, training


def collect(buffer: list[list[dict]], samples: list[dict], version: int, c: Cotrain) -> tuple[int, int]:
    """Cut windows out of answers and hand them to the owners in turn. Returns (windows cut, answers too short for one).

    A window is the last prompt token and `window` answer tokens, with `context` more rows before it as what blocks
    attend to. What an older target said is dropped first, never mixed in; owners hold the newest within their limits.
    """
    for owner in buffer:
        owner[:] = [item for item in owner if item["version"] == version]
    long = [s for s in samples if s["prompt"] and len(s["ids"]) - s["prompt"] > c.window]
    for i, s in enumerate(long):
        if len(s["context"]) != len(s["ids"]):
            raise ValueError(f"{len(s['context'])} hidden rows for {len(s['ids'])} tokens: row i must be token i's")
        first, end = max(0, s["prompt"] - 1 - c.context), s["prompt"] + c.window
        mask = (torch.arange(first, end) >= s["prompt"]).long()
        buffer[i % c.owners].append({"ids": s["ids"][first:end], "context": s["context"][first:end].clone(),
                                     "mask": mask, "version": version})
    for owner in buffer:
        while len(owner) > c.samples_per_owner or sum(len(item["ids"]) for item in owner) > c.tokens_per_owner:
            owner.pop(0)
    return len(long), len(samples) - len(long)


def decide(step: int, buffer: list[list[dict]], version: int, c: Cotrain) -> tuple[bool, str]:
    """(go, reason): whether the drafter is trained in this step, on what the owners hold and a target of `version`.
    One owner that cannot train stops all, before any of them starts."""
    if not c.enable_drafter_training:
        return False, "frozen"
    if step % c.train_interval:
        return False, "interval_not_reached"
    if not any(buffer):
        return False, "no_trainable_batch"
    if not all(buffer):
        return False, "owner_without_samples"
    if {item["version"] for owner in buffer for item in owner} != {version}:
        return False, "stale_data"
    return True, "training_ready"


def train_drafter(draft, optimizers: dict, buffer: list[list[dict]], c: Cotrain, step: int) -> tuple[list[float], int]:
    """drafter_steps optimizer steps, each on drafter_batch fresh windows of every owner. Returns (losses, skipped):
    a step whose loss or gradient is not finite is skipped and named."""
    losses, skipped = [], 0
    draft.train()
    for i in range(c.drafter_steps):
        generator = torch.Generator().manual_seed((step << 16) + i)
        items = [owner[j] for owner in buffer
                 for j in torch.randperm(len(owner), generator=generator)[:c.drafter_batch].tolist()]
        ids, context, mask = (pad_sequence([item[key] for item in items], batch_first=True).to(draft.fc.weight.device)
                              for key in ("ids", "context", "mask"))
        loss, _ = draft(ids, context, mask, seeds=[(step << 24) + (i << 12) + b for b in range(len(items))],
                        lengths=[len(item["ids"]) for item in items])
        draft.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(draft.parameters(), c.recipe.grad_clip)
        if not (loss.isfinite() and norm.isfinite()):
            skipped += 1
            tqdm.write(f"drafter: skipping optimizer step {i + 1} of RL step {step}, loss {loss.item()}, gradient norm "
                       f"{norm.item()}: " + "; ".join(why for _, why in draft.complaints))
            draft.complaints.clear()
            continue
        for optimizer, peak in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * c.recipe.lr_scale
            optimizer.step()
        losses.append(loss.item())
    draft.zero_grad()
    return losses, skipped


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def drafter_folder(c: Cotrain) -> Path | None:
    """The checkpoint that the engine starts with; "fresh" writes an untrained draft, other names are downloaded."""
    if not c.drafter:
        return None
    if c.drafter != "fresh":
        return Path(c.drafter) if c.drafter.startswith(("out/", "/", ".")) else download(c.drafter)
    torch.manual_seed(c.recipe.seed)
    folder = OUT / f"{c.name}-fresh"
    write_drafter(new_draft(c.recipe), folder)
    return folder


def write_drafter(draft, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft.config.save(folder)
    save_file({n: p.detach().contiguous() for n, p in draft.named_parameters()}, folder / "model.safetensors")


def load_actor(c: Cotrain, path: Path) -> HFTarget:
    """The target with gradients, behind the hooks that hand out its hidden states."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if c.actor_lr else None)
    actor = HFTarget(model.to("cuda" if torch.cuda.is_available() else "cpu"), c.recipe.target_layer_ids)
    actor.model.requires_grad_(c.actor_lr > 0)
    return actor


def actor_tensors(actor: HFTarget) -> dict[str, Tensor]:
    """The target's weights under its checkpoint's names; a tied head is its embedding."""
    tied = actor.lm_head.weight is actor.embed_tokens.weight
    return {n: t for n, t in actor.model.state_dict().items() if not (tied and n.startswith("lm_head."))}


@torch.no_grad()
def look_back(actor: HFTarget, samples: list[dict], keep_states: bool) -> None:
    """Old log-probabilities of every answer and, from the same pass, the hidden states that a drafter learns from."""
    for s in samples:
        captured = actor.capture(s["ids"][None])
        s["logp"] = token_logp(actor.lm_head, captured.final[0], s["ids"].to(actor.device), s["prompt"]).cpu()
        if keep_states:
            s["context"] = captured.context[0].float().cpu()


def draft_tensors(draft) -> dict[str, Tensor]:
    """A copy of the drafter's tensors as they are now, under the names of checkpoints and engines."""
    return serving_names({n: p.detach().clone() for n, p in draft.named_parameters()})


def publish_drafter(llm, tensors: dict[str, Tensor], version: int) -> None:
    """The drafter's tensors into the engine, read back and compared; RuntimeError when they did not arrive."""
    send(llm, "draft", tensors, version)
    if not serves(llm, tensors):
        raise RuntimeError(f"the engine serves something else after publishing draft version {version}")


def save(out: Path, step: int, state: dict, draft) -> None:
    """out/step_<n>/: the drafter as engines load it, and everything a resume needs; whole or not there."""
    partial = out / f".step_{step}.partial"
    write_drafter(draft, partial / "drafter")
    torch.save(state | {"step": step}, partial / "state.pt")
    flush(*partial.rglob("*"), partial)
    publish(partial, out / f"step_{step}")
    prune(out, 2)


def cotrain(c: Cotrain, out: Path, replay: Path | None = None) -> Path:
    """Run a co-training recipe to its end, or go on where `out` stands. replay: the folder of a finished run whose
    answers the target learns from instead of its own, so that both runs have the same targets at every step."""
    # What must fit, before anything expensive starts.
    path, folder = target_path(c.recipe), drafter_folder(c)
    spec = check_contract(c, folder, engine_has_dflash2())
    recorded = {row["step"]: row["samples"] for row in read_rows(replay / "rollouts.jsonl")} if replay else {}
    if replay and len(recorded) < c.steps:
        raise ValueError(f"{replay} recorded {len(recorded)} of {c.steps} steps; finish it first: cotrain.py {c.name}")
    actor = load_actor(c, path)
    draft = new_draft(c.recipe).to(actor.device).attach(actor.embed_tokens, actor.lm_head)
    draft.load_tensors({n: t.float() for n, t in load_draft_tensors(folder).items()}, where=str(folder))
    optimizers = make_optimizers(draft, c.recipe)
    actor_optimizer = torch.optim.AdamW(actor.model.parameters(), lr=c.actor_lr, weight_decay=0.0)
    state = {"recipe": recipe_hash(c), "target_version": 0, "draft_version": 0, "published": draft_tensors(draft)}

    out.mkdir(parents=True, exist_ok=True)
    start = max(steps_in(out), default=0)
    if start:
        state = torch.load(out / f"step_{start}" / "state.pt", weights_only=True)
        if state["recipe"] != recipe_hash(c):
            raise ValueError(f"{out} was made by another version of recipe {c.name}; move it away to start anew")
        actor.model.load_state_dict(state["actor"])
        actor_optimizer.load_state_dict(state["actor_optimizer"])
        draft.load_tensors(state["draft"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        cut_lines(out / name, start)

    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(path)
    llm = start_engine(c, path, spec)
    if start:
        send(llm, "target", actor_tensors(actor))
        send(llm, "draft", state["published"], state["draft_version"])
        tqdm.write(f"resumed at step {start}: target version {state['target_version']}, draft version "
                   f"{state['draft_version']}")
    buffer, idle, failed, clock = [[] for _ in range(c.owners)], 0, 0, Clock()

    for step in (bar := tqdm(range(start + 1, c.steps + 1), initial=start, total=c.steps, desc=out.name, unit="step")):
        clock.reset()
        due = c.enable_drafter_training and step % c.train_interval == 0
        line = {"step": step, "target_version": state["target_version"], "draft_version": state["draft_version"]}
        with clock("rollout"):
            tasks = problems(c, step)
            prompts = [encode_prompt(text, tokenizer, c.recipe.chat_family)[0].tolist() for text, _ in tasks]
            try:
                answers, line["accept_len"] = generate(llm, prompts, c, step)
            except Exception as error:
                raise RuntimeError(f"rollout of step {step} failed in the engine ({type(error).__name__}: {error}); "
                                   "the same command goes on behind the newest checkpoint") from error
        with clock("reward"):
            asked = [(judge, prompt) for (_, judge), prompt in zip(tasks, prompts, strict=True) for _ in range(c.group)]
            rewards = [judge(tokenizer.decode(answer, skip_special_tokens=True))
                       for (judge, _), answer in zip(asked, answers, strict=True)]
            samples = [{"ids": torch.tensor(prompt + answer), "prompt": len(prompt), "advantage": a}
                       for (_, prompt), answer, a in zip(asked, answers, advantages(rewards, c.group), strict=True)]
        learned = samples if not replay else [s | {"ids": torch.tensor(s["ids"])} for s in recorded[step]]
        with clock("old_logp"):
            look_back(actor, learned, due)
            if due:
                line["collected"], line["too_short"] = collect(buffer, learned, state["target_version"], c)
            go, line["reason"] = decide(step, buffer, state["target_version"], c)
            if go:                               # embedding and head that go with the captured states, not the updated
                draft.attach(*(copy.deepcopy(m).requires_grad_(False) for m in (actor.embed_tokens, actor.lm_head)))
        with clock("actor"):
            if c.actor_lr:
                update_actor(actor.model, actor_optimizer, learned, c)
                state["target_version"] += 1
        with clock("sync"):
            if c.actor_lr:
                send(llm, "target", actor_tensors(actor))

        with clock("drafter"):
            if go:
                losses, skipped = train_drafter(draft, optimizers, buffer, c, step)
                line["skipped"], go = skipped, bool(losses)
                line |= {"drafter_loss": sum(losses) / len(losses), "drafter_loss_first": losses[0],
                         "drafter_loss_last": losses[-1]} if go else {"reason": "no_finite_loss"}
        line["trained"], line["published"] = go, False
        with clock("publish"):
            # A draft that was trained and not yet published, maybe by a run that was killed between the two.
            if c.publish_interval <= 0 or step % c.publish_interval == 0:
                tensors = draft_tensors(draft)
                if any(not torch.equal(t, state["published"][name]) for name, t in tensors.items()):
                    try:
                        publish_drafter(llm, tensors, state["draft_version"] + 1)
                        state |= {"draft_version": state["draft_version"] + 1, "published": tensors}
                        line["published"], failed = True, 0
                    except RuntimeError as error:
                        failed += 1
                        tqdm.write(f"publish of step {step} failed: {error}")
                        if not serves(llm, state["published"]):
                            raise RuntimeError(f"the engine's draft is torn: {error}") from error
                        if failed == PATIENCE:
                            raise RuntimeError(f"{failed} publishes failed in a row; the last: {error}") from error

        served = llm.collective_rpc(serving_state)[0]
        tokens = sum(map(len, answers))
        line |= {"reward": sum(rewards) / len(rewards), "tokens": tokens, "served_version": served["draft"],
                 "served_hash": served["hash"], "actor_hash": tensor_hash(actor_tensors(actor)),
                 "tokens_per_s": tokens / max(clock.seconds["rollout"], 1e-9),
                 "seconds": {phase: round(s, 3) for phase, s in clock.seconds.items()}}
        with (out / "rollouts.jsonl").open("a") as file:
            rows = [{"ids": s["ids"].tolist(), "prompt": s["prompt"], "advantage": s["advantage"]} for s in learned]
            file.write(json.dumps({"step": step, "samples": rows}) + "\n")
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        bar.set_postfix_str(f"accept length {line['accept_len'] or 0:.3f}, reward {line['reward']:.3f}, "
                            f"{line['reason']}" + (", published" if line["published"] else ""))
        if step % c.save_every == 0 or step == c.steps:
            save(out, step, state | {
                "actor": actor.model.state_dict(), "actor_optimizer": actor_optimizer.state_dict(),
                "draft": dict(draft.named_parameters()), "optimizers": [o.state_dict() for o in optimizers]}, draft)
        if due:
            idle = 0 if go else idle + 1
            if idle:
                tell_idle(c, line, idle)
    return out


def tell_idle(c: Cotrain, line: dict, idle: int) -> None:
    """A due cycle that trained nothing is said aloud; the third in a row ends the run with the reason and the mend."""
    if line["reason"] == "no_finite_loss":
        mend = "the drafter's loss is not finite: lower lr, or start from the last good checkpoint"
    else:
        mend = (f"{line['too_short']} of {c.prompts * c.group} answers are shorter than the window of {c.window} + 1 "
                f"tokens and were left out, {line['collected']} were cut for {c.owners} owners; make `window` "
                "smaller, or let fewer owners hold more")
    text = f"step {line['step']}: drafter training was due and did not happen ({line['reason']}): {mend}"
    if idle >= PATIENCE:
        raise RuntimeError(f"{text}. {PATIENCE} due cycles in a row")
    tqdm.write("warning: " + text)


def draw(co: Path, frozen: Path, path: Path) -> dict:
    """A picture of accept lengths and rewards by step; returns mean and largest step of each run's second half."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), dpi=100)
    numbers, runs = {}, {"co-trained": list(read_rows(co / "metrics.jsonl")),
                         "frozen": list(read_rows(frozen / "metrics.jsonl"))}
    for name, rows in runs.items():
        lengths = [row["accept_len"] for row in rows]
        left.plot([row["step"] for row in rows], lengths, marker=".", label=name)
        half = torch.tensor(lengths[len(lengths) // 2:], dtype=torch.float64)
        numbers[name] = {"mean": half.mean().item(), "spread": half.diff().abs().max().item()}
    published = [row["step"] for row in runs["co-trained"] if row["published"]]
    for step in published:
        left.axvline(step, color="tab:blue", alpha=0.15)
    left.set(xlabel="RL step (lines: drafter published)", ylabel="accept length by the engine", ylim=(1, None))
    left.legend()
    rows = runs["co-trained"]
    right.plot([row["step"] for row in rows], [row["reward"] for row in rows], color="tab:green")
    right.set(xlabel="RL step", ylabel="mean reward")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    same = [a["actor_hash"] == b["actor_hash"] for a, b in zip(*runs.values(), strict=True)]
    return {"second half": numbers, "publishes": len(published), "same targets": all(same)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Co-train target and drafter with vLLM rollouts.")
    parser.add_argument("recipe", nargs="?", default="toy", choices=COTRAIN)
    parser.add_argument("--frozen", action="store_true", help="the baseline of a finished run, and the picture of both")
    options = parser.parse_args()
    c, run = COTRAIN[options.recipe], OUT / options.recipe
    out, replay = (run.with_name(run.name + "-frozen"), run) if options.frozen else (run, None)
    if options.frozen:
        c = dataclasses.replace(c, enable_drafter_training=False)
    with plain_errors(ValueError, TypeError, RuntimeError), locked(out / "lock"):
        require_vllm()
        if c.recipe.draft == "dflash2" and not torch.cuda.is_available():
            interpret_triton()
        cotrain(c, out, replay)
        if options.frozen:
            print(json.dumps(draw(run, out, run / "cotrain.png"), indent=1))


if __name__ == "__main__":
    main()
