"""Accept length, measured as DeepSpec measures it: propose, verify, accept, commit, over task files.

decode.py is the protocol; this file runs it over prompts, sums integers and writes them down. Only what that loop
counts is called accept length. Read next: decode.py, data_glm.py (task files, stop ids), calibrate.py (what the
confidence head is worth), schedule.py (how long proposals should be under load).
"""
import argparse
import hashlib
import json
import os
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from decode import Trace, check_pair, speculative_decode
from targets import plain_errors


def acceptance_metrics(traces: list[Trace], block_size: int) -> dict:
    """The numbers of a task from integer sums over all proposals; see the names' definitions in the README."""
    accepted = [n for t in traces for n in t.acceptance_lengths]
    proposed = [n for t in traces for n in t.proposal_lengths]
    drafted = [n for t in traces for n in t.accepted_draft_lengths]
    proposals, total = len(accepted), sum(accepted)
    rate = [sum(n > k for n in drafted) / max(sum(n > k for n in proposed), 1) for k in range(block_size)]
    return {"num_samples": len(traces), "num_proposals": proposals, "accept_len": total / max(proposals, 1),
            "draft_tokens_per_proposal": sum(proposed) / max(proposals, 1),
            "verify_rate": total / max(sum(proposed) + proposals, 1), "accept_rate": rate}


# ---------------------------------------------------------------------------------------------------------------------
# Task files


def summarise(samples: list[dict], block_size: int) -> dict:
    """Metrics of a task, plus what a person wants to know of its speed."""
    traces = [Trace([], s["acceptance_lengths"], s["proposal_lengths"], s["accepted_draft_lengths"]) for s in samples]
    seconds, tokens = sum(s["seconds"] for s in samples), sum(len(s["new_ids"]) for s in samples)
    return acceptance_metrics(traces, block_size) | {"new_tokens": tokens, "tokens_per_s": tokens / max(seconds, 1e-9)}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)


def decode_task(name: str, target, draft, tokenizer, settings: dict, journal: "Journal | None" = None,
                stop=lambda: False, folder="eval_datasets") -> list[dict]:
    """Decode the prompts of one task, shared out over the processes, and gather the samples on every one of them.

    Prompt i gets seed `seed + i`. Prompts that leave no room below the target's length are counted and named, not
    dropped in silence. Samples that the journal already holds are not decoded again.
    """
    from data_glm import encode_prompt, load_task
    seed_all(settings["seed"])
    prompts = load_task(name, folder, settings["limit"], settings["seed"])
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    stops, content = settings["stop_token_ids"], file_hash(Path(folder) / f"{name}.jsonl")
    done = journal.samples(name, content) if journal else {}
    mine = [i for i in range(rank, len(prompts), world) if i not in done]
    bar = tqdm(mine, desc=name, unit="prompt", dynamic_ncols=True, disable=rank > 0)
    fresh, lengths, too_long = [], [n for s in done.values() for n in s["acceptance_lengths"]], []
    for i in bar:
        if stop():
            break
        ids = encode_prompt(prompts[i], tokenizer, settings["chat_family"])
        if ids.shape[1] + settings["max_new_tokens"] + draft.config.block_size > settings["max_length"]:
            too_long.append(i)
            continue
        seed_all(settings["seed"] + i)
        start = time.perf_counter()
        trace = speculative_decode(target, draft, ids.to(target.device), max_new_tokens=settings["max_new_tokens"],
                                   temperature=settings["temperature"], stop_token_ids=stops,
                                   confidence_threshold=settings["confidence_threshold"])
        fresh.append({"task": name, "file": content, "index": i, "seconds": time.perf_counter() - start,
                      "prompt_tokens": ids.shape[1],
                      "new_ids": trace.output_ids[ids.shape[1]:], "acceptance_lengths": trace.acceptance_lengths,
                      "proposal_lengths": trace.proposal_lengths,
                      "accepted_draft_lengths": trace.accepted_draft_lengths})
        if journal:
            journal.add(fresh[-1])
        lengths += trace.acceptance_lengths
        bar.set_postfix_str(f"accept length {sum(lengths) / max(len(lengths), 1):.3f}")
    if too_long:
        print(f"{name}: {len(too_long)} prompts are too long for {settings['max_length']} tokens and were left out: "
              f"{too_long[:20]}", flush=True)
    gathered = [fresh]
    if world > 1:
        gathered = [None] * world
        dist.all_gather_object(gathered, fresh)
    samples = sorted([*done.values(), *(s for part in gathered for s in part)], key=lambda s: s["index"])
    if not samples and not stop():
        raise ValueError(f"{name}: no sample is left after filtering; the file is empty or every prompt is too long")
    return samples


def make_settings(recipe, target, tokenizer, draft, **changes) -> dict:
    """What a result depends on, besides draft and task files."""
    from data_glm import stop_token_ids
    settings = {"temperature": recipe.eval_temperature, "max_new_tokens": recipe.eval_max_new_tokens,
                "confidence_threshold": 0.0, "seed": recipe.eval_seed, "limit": None, "chat_family": recipe.chat_family,
                "thinking": recipe.thinking, "max_length": recipe.max_position_embeddings,
                "stop_token_ids": list(recipe.stop_token_ids) or stop_token_ids(target, tokenizer, draft.config)}
    return settings | {k: v for k, v in changes.items() if v is not None}


def evaluate(target, draft, recipe, stop=lambda: False, folder="eval_datasets") -> dict[str, dict]:
    """Evaluation inside training: the recipe's tasks, its number of prompts, the final protocol and seed; metrics by
    task.

    The prompts are prefixes of the final evaluation's. All ranks take part in the same tasks, or nobody starts.
    """
    from transformers import AutoTokenizer

    from targets import target_path
    tokenizer = AutoTokenizer.from_pretrained(target_path(recipe))
    tasks = agree_on_tasks(recipe.eval_tasks, folder)
    settings = make_settings(recipe, target, tokenizer, draft, limit=recipe.eval_limit)
    results = {}
    for name in tasks:
        if stop():
            break
        samples = decode_task(name, target, draft, tokenizer, settings, stop=stop, folder=folder)
        if samples:
            results[name] = summarise(samples, draft.config.slots)
    return results


def agree_on_tasks(names, folder) -> list[str]:
    """The task names, after every process showed that it has the same files; a file on some nodes only would hang the
    rest."""
    names = list(names) or sorted(p.stem for p in Path(folder).glob("*.jsonl"))
    if not names:
        raise FileNotFoundError(f"no task file in {folder}; python data_glm.py tasks builds them")
    hashes = {n: file_hash(Path(folder) / f"{n}.jsonl") for n in names}
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, hashes)
        odd = [r for r, other in enumerate(everyone) if other != everyone[0]]
        if odd:
            raise ValueError(f"processes {odd} have other task files in {folder} than process 0; "
                             "copy the same ones everywhere")
    return names


def file_hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


class Journal:
    """Finished samples on disk, one json line each, so that a killed sweep goes on at the next sample.

    Every process appends to its own file and reads all of them. Lines made under other settings are not used: the file
    name carries their hash.
    """

    def __init__(self, out: Path, key: str):
        from data_glm import drop_torn_line, read_rows
        self.out, self.key = out, key
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.path = out / f"samples-{key}.{rank}.jsonl"
        self.lines = []
        for path in sorted(out.glob(f"samples-{key}.*.jsonl")):
            drop_torn_line(path)                 # its sample is decoded again
            self.lines += read_rows(path)
        if dist.is_initialized():
            dist.barrier()                       # nobody appends before everybody has read
        self.file = self.path.open("a")

    def samples(self, task: str, content: str) -> dict[int, dict]:
        """Finished samples of a task file with this hash, by index."""
        return {s["index"]: s for s in self.lines if (s["task"], s["file"]) == (task, content)}

    def add(self, sample: dict) -> None:
        self.file.write(json.dumps(sample) + "\n")
        self.file.flush()


def write_json(path: Path, value) -> None:
    """Whole or not at all: temporary name, flush to disk, rename."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def newest_checkpoint(folder: Path) -> Path:
    """The folder that `latest` names, else a sentence about what to do."""
    link = folder / "latest"
    if not link.exists():
        raise FileNotFoundError(f"no checkpoint in {folder}; train one with python train.py, "
                                "or name one with --draft DIR")
    return link.resolve() if link.is_symlink() or link.is_dir() else folder / link.read_text().strip()


def table(results: dict[str, dict], block_size: int) -> str:
    head = ["task", "samples", "proposals", "accept len", *(f"@{k}" for k in range(block_size)), "verify", "tokens/s"]
    rows = [[n, r["num_samples"], r["num_proposals"], f"{r['accept_len']:.3f}", *(f"{x:.3f}" for x in r["accept_rate"]),
             f"{r['verify_rate']:.3f}", f"{r['tokens_per_s']:.1f}"] for n, r in results.items()]
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    lines = ([str(x).rjust(w) if i else str(x).ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
             for row in [head, *rows])
    return "\n".join("  ".join(line) for line in lines)


def foreign_recipe(config, target: str):
    """A recipe for a draft that came without one: geometry from its config, everything else DeepSpec's protocol."""
    from transformers import AutoConfig

    from recipe import Recipe
    layers = config.num_target_layers or AutoConfig.from_pretrained(target).get_text_config().num_hidden_layers
    return Recipe(name="foreign", target=str(target), num_target_layers=layers,
                  target_layer_ids=config.target_layer_ids, hidden_size=config.hidden_size,
                  num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
                  head_dim=config.head_dim, intermediate_size=config.intermediate_size, vocab_size=config.vocab_size,
                  mask_token_id=config.mask_token_id, max_position_embeddings=config.max_position_embeddings,
                  eval_tasks=("gsm8k",))


def run(options) -> dict:
    """The command: load, decode every task, write results.json after each."""
    from transformers import AutoTokenizer

    from capture import load_target
    from data_glm import BUILDERS, build_tasks, load_task
    from dflash2 import read_draft
    from export import refuse_errors
    from ranks import alone_in, first_here_then_others, start_world
    from recipe import DEFAULT, load_recipe
    from targets import target_path
    for name in ("limit", "max_new_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= (options.confidence_threshold or 0) <= 1:
        raise ValueError(f"--confidence-threshold must lie between 0 (off) and 1, got {options.confidence_threshold}")
    world = start_world()
    folder = Path(options.draft) if options.draft else newest_checkpoint(Path("out") / DEFAULT.name)
    refuse_errors(folder, quiet=world.rank > 0)
    draft = read_draft(folder, device=world.device)
    if (folder / "recipe.json").is_file():
        recipe = load_recipe(folder / "recipe.json")
    elif options.target:
        recipe = foreign_recipe(draft.config, options.target)
    else:
        raise ValueError(f"{folder} has no recipe.json, so its target is unknown; name it with --target PATH")
    if options.target:                           # before it counts: journal and results name the target that ran
        recipe = replace(recipe, target=options.target)
    names = options.task or recipe.eval_tasks[:1]
    missing = tuple(n for n in names if n in BUILDERS and not (Path(options.datasets) / f"{n}.jsonl").is_file())
    first_here_then_others(world, lambda: build_tasks(missing, Path(options.datasets)) if missing else None)
    names = agree_on_tasks(names, options.datasets)
    for name in names:                           # a missing or broken file is known now, not after hours
        load_task(name, options.datasets)
    path = target_path(recipe)
    target = load_target(recipe, world.device, path=path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    check_pair(target, draft)
    settings = make_settings(recipe, target, tokenizer, draft, temperature=options.temperature, limit=options.limit,
                             max_new_tokens=options.max_new_tokens, confidence_threshold=options.confidence_threshold)
    files = sorted(folder.glob("*.safetensors"))
    identity = {"settings": settings, "draft": [file_hash(f) for f in files],
                "tasks": {n: file_hash(Path(options.datasets) / f"{n}.jsonl") for n in names}}
    out = Path(options.out) if options.out else folder / "eval"
    # A sample depends on its own task and not on the limit: a longer run takes over what a shorter one decoded.
    key = json.dumps([settings | {"limit": None}, identity["draft"], recipe.target])
    key = hashlib.sha256(key.encode()).hexdigest()[:12]
    results, samples = {}, {}
    with alone_in(out, world):
        journal = Journal(out, key)
        for name in names:
            found = decode_task(name, target, draft, tokenizer, settings, journal, folder=options.datasets)
            samples[name] = [s for s in found if settings["limit"] is None or s["index"] < settings["limit"]]
            results[name] = summarise(samples[name], draft.config.slots)
            everything = [s for part in samples.values() for s in part]
            value = identity | {"draft_folder": folder.name, "recipe": recipe.name, "target": recipe.target,
                                "versions": {"torch": torch.__version__, "transformers": version("transformers")},
                                "metrics": results | {"overall": summarise(everything, draft.config.slots)},
                                "samples": samples}
            if world.rank == 0:
                write_json(out / "results.json", value)
    if world.rank == 0:
        shown = value["metrics"] if len(names) > 1 else results
        print(f"\n{recipe.name} {folder.name}, temperature {settings['temperature']}, "
              f"thinking {settings['thinking']}, {settings['max_new_tokens']} new tokens\n"
              f"{table(shown, draft.config.slots)}\n{out / 'results.json'}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description="Accept length of a draft, by DeepSpec's protocol.")
    parser.add_argument("--task", action="append", help="task name, repeatable; default: the recipe's first eval task")
    parser.add_argument("--draft", help="checkpoint folder; default: the newest one of the default recipe")
    parser.add_argument("--target", help="folder or hub name of the target, for a draft without recipe.json")
    parser.add_argument("--limit", type=int, help="prompts per task; default: DeepSpec's cap")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--confidence-threshold", type=float)
    parser.add_argument("--datasets", default="eval_datasets", help="folder of the task files")
    parser.add_argument("--out", help="folder for results.json; default: eval/ in the checkpoint")
    options = parser.parse_args()
    try:
        with plain_errors(ValueError):
            run(options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
