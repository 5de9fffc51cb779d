"""Accept length, measured as DeepSpec measures it: propose, verify, accept, commit, over task files.

decode.py is the protocol; this file runs it over prompts, sums integers and writes them down. Only what that loop
counts is called accept length. Read next: decode.py, tasks.py (the prompts), calibrate.py (what the
confidence head is worth), schedule.py (how long proposals should be under load).
"""
import argparse
import hashlib
import json
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from corpus import drop_torn_line, read_rows, write_atomic
from decode import Clock, NoDraft, Trace, check_pair, decode, speculative_decode  # noqa: F401
from ranks import gather
from targets import plain_errors
from tasks import BUILDERS, TASKS, build_tasks, list_tasks, load_task

LISTS = ("acceptance_lengths", "proposal_lengths", "accepted_draft_lengths")     # of a Trace, in its order
DECODING = ("max_new_tokens", "temperature", "stop_token_ids", "confidence_threshold", "confidence_temperatures")


def acceptance_metrics(traces: list[Trace], block_size: int) -> dict:
    """The numbers of a task from integer sums over all proposals, as the README defines them; a rate is 0 where nothing
    was proposed."""
    accepted = [n for t in traces for n in t.acceptance_lengths]
    proposed = [n for t in traces for n in t.proposal_lengths]
    drafted = [n for t in traces for n in t.accepted_draft_lengths]
    proposals, total = len(accepted), sum(accepted)
    rate = [sum(n > k for n in drafted) / max(sum(n > k for n in proposed), 1) for k in range(block_size)]
    return {"num_samples": len(traces), "num_proposals": proposals, "accept_len": total / max(proposals, 1),
            "draft_tokens_per_proposal": sum(proposed) / max(proposals, 1),
            "verify_rate": total / max(sum(proposed) + proposals, 1), "accept_rate": rate}


# ---------------------------------------------------------------------------------------------------------------------
# One task


def summarise(samples: list[dict], block_size: int, batch_size: int) -> dict:
    """Metrics of a task for people: accept_rate is None at slots that were never proposed, the speed is that of samples
    decoded at this batch size (the journal may hold others; None: only others)."""
    metrics = acceptance_metrics([Trace([], *(s[name] for name in LISTS)) for s in samples], block_size)
    longest = max((n for s in samples for n in s["proposal_lengths"]), default=0)
    timed = [(len(s["new_ids"]), s["seconds"]) for s in samples if s["batch_size"] == batch_size]
    return metrics | {
        "accept_rate": [x if k < longest else None for k, x in enumerate(metrics["accept_rate"])],
        "new_tokens": sum(len(s["new_ids"]) for s in samples), "near_ties": sum(s["near_ties"] for s in samples),
        "tokens_per_s": sum(n for n, _ in timed) / sum(seconds for _, seconds in timed) if timed else None}


def encode_task(name: str, tokenizer, settings: dict, draft, folder) -> tuple[dict[int, torch.Tensor], list[int]]:
    """Prompts [1, S] of a task by index, and the indices of those that leave no room below the target's length."""
    from chat import encode_prompt
    texts = load_task(name, folder, settings["limit"], settings["seed"])
    prompts = {i: encode_prompt(text, tokenizer, settings["chat_family"]) for i, text in enumerate(texts)}
    room = settings["max_length"] - settings["max_new_tokens"] - draft.config.block_size
    too_long = [i for i, ids in prompts.items() if ids.shape[1] > room]
    if len(too_long) == len(prompts):
        raise ValueError(f"{name}: no sample is left after filtering; the file is empty or every one of {len(prompts)} "
                         f"prompts is longer than {room} tokens")
    return {i: ids for i, ids in prompts.items() if i not in set(too_long)}, too_long


def decode_task(name: str, target, draft, tokenizer, settings: dict, folder, journal: "Journal | None" = None,
                stop=lambda: False) -> list[dict]:
    """Decode the prompts of one task, shared out over the replicas, and gather the samples on every process.

    A replica is a process, or the processes over which an engine spreads its target. Prompt i gets seed `seed + i`.
    Prompts that are too long are counted and named. Samples that the journal already holds are not decoded again.
    """
    prompts, too_long = encode_task(name, tokenizer, settings, draft, folder)
    rank, world = dist.get_rank(), dist.get_world_size()
    shared = getattr(target, "tp", 1)            # processes of a replica: they decode the same prompts
    content = file_hash(Path(folder) / f"{name}.jsonl")
    done = journal.samples(name, content) if journal else {}
    mine = [i for i in sorted(prompts)[rank // shared::world // shared] if i not in done]
    fresh, lengths = [], [n for s in done.values() for n in s["acceptance_lengths"]]
    traces = decode(target, draft, [prompts[i].to(target.device) for i in mine], **{k: settings[k] for k in DECODING},
                    slots=settings["batch_size"], seeds=[settings["seed"] + i for i in mine])
    start, problem = time.perf_counter(), ""
    try:
        with tqdm(total=len(mine), desc=name, unit="prompt", dynamic_ncols=True, disable=rank > 0) as bar:
            while not stop() and (one := next(traces, None)):
                i, trace, now = mine[one[0]], one[1], time.perf_counter()
                S = prompts[i].shape[1]
                sample = {"task": name, "file": content, "index": i, "seconds": now - start, "prompt_tokens": S,
                          "batch_size": settings["batch_size"], "new_ids": trace.output_ids[S:],
                          "near_ties": trace.near_ties, **{k: getattr(trace, k) for k in LISTS},
                          "confidence_logits": [[round(x, 4) for x in row] for row in trace.confidence_logits]}
                fresh.append(sample)
                if journal and rank % shared == 0:
                    journal.add(sample)
                lengths += trace.acceptance_lengths
                bar.set_postfix_str(f"accept length {sum(lengths) / max(len(lengths), 1):.3f}")
                bar.update()
                start = now
    except Exception:
        if world == 1:
            raise
        problem = f"process {rank}: {traceback.format_exc()}"
    traces.close()
    if too_long and rank == 0:
        print(f"{name}: {len(too_long)} prompts are too long for {settings['max_length']} tokens and were left out: "
              f"{too_long[:20]}", flush=True)
    gathered = gather((fresh, problem))          # nobody is left waiting for one that failed
    if problems := [text for _, text in gathered if text]:
        raise RuntimeError("\n".join(problems))
    return sorted([*done.values(), *(s for part, _ in gathered[::shared] for s in part)], key=lambda s: s["index"])


def make_settings(recipe, target, tokenizer, draft, **changes) -> dict:
    """What a result depends on, besides draft and task files."""
    from data_glm import stop_token_ids
    settings = {"temperature": recipe.eval_temperature, "max_new_tokens": recipe.eval_max_new_tokens,
                "confidence_threshold": 0.0, "confidence_temperatures": None, "batch_size": 1,
                "seed": recipe.eval_seed, "limit": None, "chat_family": recipe.chat_family, "thinking": recipe.thinking,
                "max_length": recipe.max_position_embeddings,
                "stop_token_ids": list(recipe.stop_token_ids) or stop_token_ids(target, tokenizer, draft.config)}
    return settings | {k: v for k, v in changes.items() if v is not None}


def evaluate(target, draft, recipe, stop) -> dict[str, dict]:
    """Evaluation inside training: metrics by task, by the final protocol and seed, over the recipe's number of prompts,
    the first ones of the final evaluation; stop() abandons it. All ranks take part in the same tasks, or nobody starts.
    """
    from transformers import AutoTokenizer

    from targets import target_path
    tokenizer = AutoTokenizer.from_pretrained(target_path(recipe))
    settings, results = make_settings(recipe, target, tokenizer, draft, limit=recipe.eval_limit), {}
    for name in agree_on_tasks(recipe.eval_tasks, TASKS):
        if any(gather(stop())):                  # all ranks or none: the rest is collective
            break
        samples = decode_task(name, target, draft, tokenizer, settings, TASKS, stop=stop)
        if samples:
            results[name] = summarise(samples, draft.config.slots, settings["batch_size"])
    return results


def agree_on_tasks(names, folder) -> list[str]:
    """The task names (none: every file in `folder`), after every process showed that it has the same files; one on some
    nodes only would hang the rest."""
    names = list(names) or sorted(p.stem for p in Path(folder).glob("*.jsonl"))
    if not names:
        raise FileNotFoundError(f"no task file in {folder}; python data_glm.py tasks builds them")
    everyone = gather({n: file_hash(Path(folder) / f"{n}.jsonl") for n in names})
    if odd := [rank for rank, hashes in enumerate(everyone) if hashes != everyone[0]]:
        raise ValueError(f"processes {odd} have other task files in {folder} than process 0; copy the same ones "
                         "everywhere")
    return names


def file_hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


class Journal:
    """Finished samples on disk, one json line each, so that a killed sweep goes on at the next sample.

    Every process appends to its own file and knows the lines of all, whosever disk they lie on. Lines made under other
    settings are not used: the file name carries their hash.
    """

    def __init__(self, out: Path, key: str):
        self.lines, rank = {}, dist.get_rank()
        for path in sorted(out.glob(f"samples-{key}.*.jsonl")):
            drop_torn_line(path)                 # its sample is decoded again
            self.lines |= {(s["task"], s["file"], s["index"]): s for s in read_rows(path)}
        # Every node may have a disk of its own: what only some hold is handed to all. Nobody appends before that.
        held = gather(set(self.lines))
        mine = held[rank] - set.intersection(*held) - set().union(*held[:rank])
        for part in gather({name: self.lines[name] for name in mine}):
            self.lines = part | self.lines
        self.file = (out / f"samples-{key}.{rank}.jsonl").open("a")

    def samples(self, task: str, content: str) -> dict[int, dict]:
        """Finished samples of a task file with this hash, by index."""
        return {index: s for (name, file, index), s in self.lines.items() if (name, file) == (task, content)}

    def add(self, sample: dict) -> None:
        self.file.write(json.dumps(sample) + "\n")
        self.file.flush()


def write_json(path: Path, value) -> None:
    write_atomic(path, [json.dumps(value, indent=1)])


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def newest_checkpoint(folder: Path) -> Path:
    """The folder that `latest` names, else a sentence about what to do."""
    if not (folder / "latest").exists():
        raise FileNotFoundError(f"no checkpoint in {folder}; train one with python train.py, "
                                "or name one with --draft DIR")
    return (folder / "latest").resolve()


def table(results: dict[str, dict]) -> str:
    """Metrics as `summarise` makes them, a row for each task; a dash stands where there is no number."""
    def number(x: float | None, digits: int = 3) -> str:
        return "-" if x is None else f"{x:.{digits}f}"

    slots = range(len(next(iter(results.values()))["accept_rate"]))
    rows = [["task", "samples", "proposals", "accept len", *(f"@{k}" for k in slots), "verify", "tokens/s"]]
    rows += [[name, str(r["num_samples"]), str(r["num_proposals"]), number(r["accept_len"]),
              *map(number, r["accept_rate"]), number(r["verify_rate"]), number(r["tokens_per_s"], 1)]
             for name, r in results.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


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


def open_draft(folder: Path, target: str | None, device="cpu"):
    """(draft, recipe) of a checkpoint; its recipe's target is replaced by `target`, which a draft without one needs."""
    from dflash2 import read_draft
    from recipe import load_recipe
    draft = read_draft(folder, device=device)
    if (folder / "recipe.json").is_file():
        recipe = load_recipe(folder / "recipe.json")
    elif target:
        recipe = foreign_recipe(draft.config, target)
    else:
        raise ValueError(f"{folder} has no recipe.json, so its target is unknown; name it with --target PATH")
    return draft, replace(recipe, target=target or recipe.target)


def speedup(target, draft, prompts: list[torch.Tensor], settings: dict) -> dict:
    """Plain and speculative decoding of the same prompts on the same engine, in turns, batch by batch.

    The first batch runs once unmeasured. `pays_above` is the accept length from which a proposal costs less than the
    plain steps it saves.
    """
    common, slots = {k: settings[k] for k in DECODING}, settings["batch_size"]
    forms = {"plain": (NoDraft(target), common | {"confidence_threshold": 0.0}), "speculative": (draft, common)}
    total = {name: {"tokens": 0, "steps": 0, "phases": Counter()} for name in forms}
    ratios, gained = [], 0

    def timed(name: str, first: int):
        batch, (one, options), clock = prompts[first:first + slots], forms[name], Clock()
        traces = dict(decode(target, one, batch, **options, slots=slots, clock=clock,
                             seeds=[settings["seed"] + first + i for i in range(len(batch))]))
        tokens = sum(len(trace.output_ids) - batch[i].shape[1] for i, trace in traces.items())
        return tokens, [n for trace in traces.values() for n in trace.acceptance_lengths], clock.seconds

    for name in forms:
        timed(name, 0)
    for first in range(0, len(prompts), slots):
        speed = {}
        for name, form in total.items():
            tokens, lengths, seconds = timed(name, first)
            speed[name] = tokens / sum(seconds.values())
            form["tokens"] += tokens
            form["steps"] += len(lengths)
            form["phases"].update(seconds)
        ratios.append(speed["speculative"] / speed["plain"])
        gained += sum(lengths)                   # the speculative form's, which ran last
    for form in total.values():
        form["tokens_per_s"] = form["tokens"] / sum(form["phases"].values())
        form["ms_per_step"] = {phase: 1000 * s / max(form["steps"], 1) for phase, s in form["phases"].items()}
    cost = {name: sum(v for k, v in form["ms_per_step"].items() if k != "prefill") for name, form in total.items()}
    return total | {"ratio": total["speculative"]["tokens_per_s"] / total["plain"]["tokens_per_s"],
                    "ratio_p10_p50_p90": torch.tensor(ratios).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist(),
                    "pays_above": cost["speculative"] / cost["plain"],
                    "accept_len": gained / max(total["speculative"]["steps"], 1)}


def show_speedup(name: str, r: dict) -> str:
    spread = ", ".join(f"{x:.2f}" for x in r["ratio_p10_p50_p90"])
    lines = [f"{name}: plain {r['plain']['tokens_per_s']:.1f} tokens/s, speculative "
             f"{r['speculative']['tokens_per_s']:.1f}, ratio {r['ratio']:.2f} (10%, 50%, 90% of batches: {spread}); "
             f"accept length {r['accept_len']:.2f}, this draft pays above {r['pays_above']:.2f}"]
    lines += [f"  {form:<12} ms per step: " + ", ".join(f"{k} {v:.1f}" for k, v in r[form]["ms_per_step"].items())
              for form in ("plain", "speculative")]
    return "\n".join(lines)


def check_options(options) -> None:
    """What can be said before anything is loaded. ValueError with the option's name."""
    for name in ("limit", "max_new_tokens", "batch_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= (options.confidence_threshold or 0) <= 1:
        raise ValueError(f"--confidence-threshold must lie between 0 (off) and 1, got {options.confidence_threshold}")
    if options.calibrate and (options.confidence_threshold or options.calibrated):
        raise ValueError("--calibrate needs whole proposals and confidences as they are: leave out "
                         "--confidence-threshold and --calibrated")


def run(options) -> dict:
    """The command: load, decode every task, write results.json after each; then what else was asked for."""
    from transformers import AutoTokenizer

    import calibrate
    from capture import load_target
    from export import refuse_errors
    from ranks import alone_in, first_here_then_others, start_world
    from recipe import DEFAULT
    from targets import target_path
    options = argparse.Namespace(**vars(parser().parse_args([])) | vars(options))
    check_options(options)
    world = start_world()
    folder = Path(options.draft) if options.draft else newest_checkpoint(Path("out") / DEFAULT.name)
    refuse_errors(folder, quiet=world.rank > 0)
    draft, recipe = open_draft(folder, options.target, world.device)
    hashes = [file_hash(f) for f in sorted(folder.glob("*.safetensors"))]
    heat = None
    if options.calibrated:
        temperature = recipe.eval_temperature if options.temperature is None else options.temperature
        heat = calibrate.load_temperatures(folder, draft.config.slots, hashes, temperature)
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
                             max_new_tokens=options.max_new_tokens, confidence_threshold=options.confidence_threshold,
                             confidence_temperatures=heat, batch_size=options.batch_size)
    identity = {"settings": settings, "draft": hashes,
                "tasks": {n: file_hash(Path(options.datasets) / f"{n}.jsonl") for n in names}}
    out = Path(options.out) if options.out else folder / "eval"
    results, samples, slots, batch = {}, {}, draft.config.slots, settings["batch_size"]
    with alone_in(out, world):
        journal = Journal(out, journal_key(settings, hashes, draft.config, path))
        for name in names:
            found = decode_task(name, target, draft, tokenizer, settings, options.datasets, journal)
            samples[name] = [s for s in found if settings["limit"] is None or s["index"] < settings["limit"]]
            results[name] = summarise(samples[name], slots, batch)
            everything = [s for part in samples.values() for s in part]
            value = identity | {"draft_folder": folder.name, "recipe": recipe.name, "target": recipe.target,
                                "versions": {"torch": torch.__version__, "transformers": version("transformers")},
                                "metrics": results | {"overall": summarise(everything, slots, batch)},
                                "samples": samples}
            if world.rank == 0:
                write_json(out / "results.json", value)
        if options.speedup and world.rank < getattr(target, "tp", 1):       # a target over several ranks needs them all
            value["speedup"] = {}
            for name in names:
                prompts, _ = encode_task(name, tokenizer, settings, draft, options.datasets)
                prompts = [ids.to(target.device) for ids in prompts.values()]
                value["speedup"][name] = speedup(target, draft, prompts, settings)
        if world.rank == 0:
            write_json(out / "results.json", value)
            show(value, out)
            if options.calibrate:
                fitted = calibrate.calibrate(everything, out)
                write_json(folder / "calibration.json", identity | fitted)
                print(f"\nsurvival probability, held-out half\n{calibrate.table(fitted)}\n"
                      f"{folder / 'calibration.json'}\n{out / 'calibration.png'}")
            if options.tensorboard:
                write_scalars(value["metrics"], out / "tensorboard", folder)
    return value


def journal_key(settings: dict, draft: list[str], config, target: Path) -> str:
    """Hash of what a sample depends on beside its task: settings (but for limit and batch), hashes of the draft's
    weights, its config, the target's files. These may hold hundreds of gigabytes: their sizes and times stand for them,
    as process 0 sees them, since nodes with disks of their own have other times."""
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(target.iterdir()) if f.is_file()]
    parts = gather([settings | {"limit": None, "batch_size": None}, draft, repr(config), files])[0]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def show(value: dict, out: Path) -> None:
    """Print the table and draw the picture of results.json."""
    from report import draw_evaluation
    settings, metrics = value["settings"], dict(value["metrics"])
    overall = metrics.pop("overall")
    if len(metrics) > 1:
        metrics["overall"] = overall
    draw_evaluation(value, out / "eval.png")
    print(f"\n{value['recipe']} {value['draft_folder']}, temperature {settings['temperature']}, "
          f"thinking {settings['thinking']}, {settings['max_new_tokens']} new tokens, batch {settings['batch_size']}, "
          f"near ties {overall['near_ties']}\n{table(metrics)}\n{out / 'results.json'}")
    for name, measured in value.get("speedup", {}).items():
        print(show_speedup(name, measured))


def write_scalars(metrics: dict, out: Path, folder: Path) -> None:
    """TensorBoard scalars, at the checkpoint's step."""
    from torch.utils.tensorboard import SummaryWriter
    digits = folder.resolve().name.rpartition("_")[2]
    with SummaryWriter(str(out)) as writer:
        for name, m in metrics.items():
            values = {"accept_len": m["accept_len"], "verify_rate": m["verify_rate"]}
            values |= {f"accept_rate/{k}": x for k, x in enumerate(m["accept_rate"]) if x is not None}
            for key, x in values.items():
                writer.add_scalar(f"eval/{name}/{key}", x, int(digits) if digits.isdigit() else 0)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Accept length of a draft, by DeepSpec's protocol.")
    p.add_argument("--task", action="append", help="task name, repeatable; default: the recipe's first eval task")
    p.add_argument("--draft", help="checkpoint folder; default: the newest one of the default recipe")
    p.add_argument("--target", help="folder or hub name of the target, for a draft without recipe.json")
    p.add_argument("--limit", type=int, help="prompts per task; default: DeepSpec's cap")
    p.add_argument("--temperature", type=float)
    p.add_argument("--max-new-tokens", type=int)
    p.add_argument("--batch-size", type=int, default=1, help="prompts decoded at once (per replica)")
    p.add_argument("--confidence-threshold", type=float, help="cut proposals before the first slot below it")
    p.add_argument("--calibrate", action="store_true", help="judge the confidence head, fit a temperature per slot")
    p.add_argument("--calibrated", action="store_true", help="use the temperatures stored beside the checkpoint")
    p.add_argument("--speedup", action="store_true", help="measure against plain decoding, in turns")
    p.add_argument("--tensorboard", action="store_true", help="scalars into tensorboard/ of the output folder")
    p.add_argument("--list", action="store_true", help="the tasks, their sizes and sources")
    p.add_argument("--datasets", default=str(TASKS), help="folder of the task files")
    p.add_argument("--out", help="folder for results.json; default: eval/ in the checkpoint")
    return p


def main() -> None:
    options = parser().parse_args()
    try:
        with plain_errors(ValueError, code=2):
            if options.list:
                print(list_tasks(Path(options.datasets)))
            else:
                run(options)
    except SystemExit as end:                    # from what training shares: a sentence, or 1 after one
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        raise SystemExit(130 if end.code == 130 else 2) from end
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
