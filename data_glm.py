"""Corpora: the target's own answers, loss masks, the token cache. One command, `python data_glm.py`:

    prepare  [recipe]                     the corpus in one form (a file, a Hugging Face data set, or prompts that the
                                          target answers here), and the offline evaluation tasks
    regen    [recipe] [--server URL ...]  every assistant turn of a "regen:SOURCE" corpus, written anew by the target
    verify   [recipe]                     is the corpus the target's own, whole, and masked as it should be?
    tokenize [recipe]                     tokens and loss masks in memory-mapped files, where train.py finds them
    show     [recipe] [--n 3]             samples with the supervised part in colour: look before you train
    tasks    [name ...]                   the evaluation prompts

A drafter imitates its target, so it trains on what the target itself writes. Read next: chat.py (rendering and masks),
corpus.py (rows from anywhere), regen.py (answers), tasks.py; then train.py, which calls `load_tokens`.
"""
import argparse
import functools
import hashlib
import itertools
import json
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from tqdm import tqdm

from chat import FAMILIES, MASK_VERSION, encode, encode_prompt, stop_token_ids  # noqa: F401
from corpus import KINDS, collect, drop_torn_line, read_rows, write_atomic  # noqa: F401
from recipe import Recipe, get_recipe
from recipe_check import config_folder, require_fit
from regen import answer_corpus, answer_locally, ask_servers, generate, load_model  # noqa: F401
from targets import is_complete, locked, plain_errors, publish, target_path
from tasks import BUILDERS, CAPS, OFFLINE, TASKS, TEST_SEED, TRAIN_SEED, build_tasks, gsm_symbolic, load_task  # noqa: F401

DATA = Path("data")

# ---- corpora -------------------------------------------------------------------------------------------------------


def source_path(recipe: Recipe) -> Path:
    """Where `prepare` puts the conversations of a source: data/<source>/train.jsonl."""
    source = Path(recipe.corpus.rpartition(":")[2])
    return DATA / (source.stem if source.suffix in KINDS else source.name) / "train.jsonl"


def corpus_path(recipe: Recipe) -> Path:
    """The jsonl that the recipe trains on: data/<target>-<task or source>/train.jsonl for "own:TASK" and
    "regen:SOURCE", which the target writes; else its source, prepared. A .jsonl file that `prepare` has not read is
    taken as it is: one {"messages": [...]} a line."""
    kind, _, source = recipe.corpus.rpartition(":")
    if not source or kind not in ("own", "regen", ""):
        raise ValueError(f"recipe {recipe.name!r} has the corpus {recipe.corpus!r}; expected a file, a folder, a "
                         "Hugging Face data set, \"regen:\" and one of these, or \"own:gsm_symbolic\"")
    path = source_path(recipe)
    if kind:
        return DATA / f"{Path(recipe.target).name.lower()}-{path.parent.name}" / path.name
    return Path(source) if source.endswith(".jsonl") and not path.is_file() else path


def prepare(recipe: Recipe) -> Path:
    """Make the recipe's corpus, or the source that `regen` starts from. Returns the path of its jsonl.

    "own:gsm_symbolic": the target answers prompts; every row is a function of (target, id). Even rows are greedy, odd
    ones sampled: the draft is used, and measured, both ways, and for each it sees the texts that the target writes that
    way. Anything else: `collect`.
    """
    if recipe.corpus != "own:gsm_symbolic":
        corpus_path(recipe)                      # refuses names of no kind
        path, source = source_path(recipe), recipe.corpus.removeprefix("regen:")
        settings = {"source": source, "size": recipe.corpus_size, "seed": recipe.seed, "version": 1}
        noted = path.with_name("settings.json")
        with locked(path.parent / "lock"):
            if path.is_file() and noted.is_file() and json.loads(noted.read_text()) == settings:
                print(f"corpus of {recipe.name}: {path} (already there; delete it to read the source again)")
            else:
                collect(source, path, recipe.corpus_size, recipe.seed)
                write_atomic(noted, json.dumps(settings, indent=2) + "\n")
        return path
    path = corpus_path(recipe)
    folder, tokenizer = checked_target(recipe)
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)
    settings = {"target": recipe.target, "max_new_tokens": recipe.corpus_max_new_tokens,
                "chat_template": tokenizer.chat_template, "config": config, "seed": recipe.seed,
                "temperature": recipe.corpus_temperature}

    def answers(missing: list[int]) -> Iterator[dict]:
        held_out = frozenset(gsm_symbolic(TEST_SEED, CAPS["gsm_symbolic"]))
        questions = gsm_symbolic(TRAIN_SEED, recipe.corpus_size, held_out)
        rows = ({"id": i, "temperature": recipe.corpus_temperature if i % 2 else 0.0,
                 "seed": recipe.seed * 1_000_003 + i,
                 "messages": [{"role": "user", "content": questions[i]}, {"role": "assistant", "content": ""}]}
                for i in missing)
        return answer_locally(recipe, folder, tokenizer, rows, lambda row, turn: row, len(missing))

    there = answer_corpus(path, settings, list(range(recipe.corpus_size)), answers)
    print(f"corpus of {recipe.name}: {path}, {there} rows", flush=True)
    return path


def checked_target(recipe: Recipe):
    """(folder, tokenizer) of the recipe's target; ValueError when the recipe does not fit it."""
    folder = target_path(recipe)
    tokenizer = load_tokenizer(folder)
    require_fit(recipe, folder, tokenizer)
    return folder, tokenizer


def generation_config(recipe: Recipe) -> dict:
    """The target's generation_config.json; {} where there is none, or one for greedy decoding: it does not say how to
    sample."""
    try:
        path = config_folder(recipe) / "generation_config.json"
    except OSError as error:
        raise OSError(f"{error}; or give --temperature, --top-p and --top-k") from error
    config = json.loads(path.read_text()) if path.is_file() else {}
    return config if config.get("do_sample") else {}


def regen(recipe: Recipe, servers: list[str], limit: int = 0, concurrency: int = 64, **given) -> Path:
    """Replace every assistant turn of the source by the target's own, each conditioned on those before it.

    Through `servers` (OpenAI-compatible, addresses up to /v1), else by the target here. `given`: temperature, top_p,
    top_k; what is None comes from the target's generation config, a temperature that it does not state from the recipe.
    """
    if not recipe.corpus.startswith("regen:"):
        raise ValueError(f"recipe {recipe.name!r} has the corpus {recipe.corpus!r}; regen writes corpora named "
                         "\"regen:SOURCE\", where SOURCE is a file or a Hugging Face data set: set that in the recipe")
    path, source = corpus_path(recipe), source_path(recipe)
    failures = path.with_name("failures.jsonl")
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not there; `python data_glm.py prepare {recipe.name}` makes it")
    config = generation_config(recipe) if None in given.values() else {}
    how = {k: config.get(k) if v is None else v for k, v in given.items()}
    if how["temperature"] is None:
        how["temperature"] = recipe.corpus_temperature
    with open(source, "rb") as file:
        settings = {"target": recipe.target, "source": hashlib.file_digest(file, "sha256").hexdigest(), **how,
                    "max_new_tokens": recipe.corpus_max_new_tokens, "seed": recipe.seed, "family": recipe.chat_family}
    ids = [row["id"] for row in read_rows(source)][:limit or None]

    def sampling(row: dict, turn: int) -> dict:
        seed = hashlib.blake2b(f"{recipe.seed} {row['id']} {turn}".encode(), digest_size=4).digest()
        return how | {"seed": int.from_bytes(seed, "little") >> 1}

    def answers(missing: list) -> Iterator[dict]:
        wanted = set(missing)
        rows = (row for row in read_rows(source) if row["id"] in wanted)
        if servers:
            return ask_servers(recipe, servers, rows, sampling, len(missing), concurrency, failures)
        return answer_locally(recipe, *checked_target(recipe), rows, sampling, len(missing))

    there = answer_corpus(path, settings, ids, answers)
    print(f"corpus of {recipe.name}: {path}, {there} of {len(ids)} conversations"
          + f"; {failures} says what failed, the same command asks again" * (there < len(ids)))
    return path


# ---- the token cache -----------------------------------------------------------------------------------------------

CHUNK = 512                                      # rows that a process tokenises at a time


class Tokens:
    """The tokenised corpus: tokens[i] -> (input_ids int32 [S], loss_mask uint8 [S]), read from memory-mapped files."""

    def __init__(self, folder: Path, min_supervised: int):
        self.key = folder.name
        self.starts = np.fromfile(folder / "starts.bin", np.int64)                 # [rows + 1]
        self.ids = np.memmap(folder / "ids.bin", np.int32, "r")
        self.mask = np.memmap(folder / "mask.bin", np.uint8, "r")
        supervised = np.fromfile(folder / "supervised.bin", np.int32)              # [rows]
        self.rows = np.flatnonzero(supervised >= min_supervised)
        notes = json.loads((folder / "notes.json").read_text())
        self.cut = notes["cut"]                                                    # rows that max_length cut
        self.total = len(supervised) + sum(notes["broken"].values())
        self.dropped = notes["broken"] | {
            f"fewer than {min_supervised} supervised tokens": len(supervised) - len(self.rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.starts[self.rows[i]], self.starts[self.rows[i] + 1]
        return np.array(self.ids[start:end]), np.array(self.mask[start:end])


def corpus_lines(recipe: Recipe) -> Iterator[bytes]:
    """The lines that the recipe trains on: the first corpus_size rows of an own corpus, every row of another."""
    path, own = corpus_path(recipe), recipe.corpus.startswith("own:")
    if not path.is_file():
        make = "regen" if recipe.corpus.startswith("regen:") else "prepare"
        raise FileNotFoundError(f"the corpus {path} is not there; `python data_glm.py {make} {recipe.name}` makes it")
    found = 0
    with open(path, "rb") as lines:
        for line in itertools.islice(lines, recipe.corpus_size if own else None):
            found += 1
            yield line
    if own and found < recipe.corpus_size:
        raise ValueError(f"{path} has {found} rows of the {recipe.corpus_size} that recipe {recipe.name!r} wants; "
                         f"`python data_glm.py prepare {recipe.name}` adds the missing ones")


def with_reason(row: dict) -> list[dict]:
    """The row's messages; a finish reason of the row itself (older corpora) is that of the last one."""
    reason = {"finish_reason": row["finish_reason"]} if row.get("finish_reason") else {}
    return [*row["messages"][:-1], row["messages"][-1] | reason]


def encode_row(row: dict, tokenizer, recipe: Recipe) -> tuple[list[int], list[int], bool]:
    """(ids, mask, whether it was cut at max_length) of a corpus row."""
    ids, mask = encode(with_reason(row), tokenizer, recipe.chat_family, tools=row.get("tools"))
    return ids[:recipe.max_length], mask[:recipe.max_length], len(ids) > recipe.max_length


def encode_lines(lines: list[bytes], folder: Path, recipe: Recipe, key: str) -> tuple:
    """A chunk of the corpus, in any process: ids, masks, lengths and supervised tokens of its rows, how many were cut,
    and why others could not be rendered."""
    tokenizer = load_tokenizer(folder, key)
    ids_of, mask_of, lengths, supervised, cuts, broken = [], [], [], [], 0, Counter()
    for line in lines:
        try:
            ids, mask, cut = encode_row(json.loads(line), tokenizer, recipe)
        except Exception as error:               # also what a template raises; the retention gate looks at the sum
            broken[f"not rendered: {str(error).splitlines()[0][:100]}"] += 1
            continue
        ids_of.append(np.array(ids, np.int32).tobytes())
        mask_of.append(np.array(mask, np.uint8).tobytes())
        lengths.append(len(ids))
        supervised.append(sum(mask))
        cuts += cut
    return b"".join(ids_of), b"".join(mask_of), lengths, supervised, cuts, broken


@functools.cache
def load_tokenizer(folder: Path, key: str = ""):
    """The tokenizer of a folder, loaded once for each key of its content."""
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


def cache_key(recipe: Recipe, folder: Path) -> str:
    """Hash of all that the arrays depend on: corpus content, tokenizer files and template, mask rules, max length."""
    rules = (MASK_VERSION, recipe.chat_family, FAMILIES.get(recipe.chat_family), recipe.thinking, recipe.max_length,
             recipe.mask_token_id)
    digest = hashlib.sha256(repr(rules).encode())
    names = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
    for path in sorted(p for p in folder.rglob("*") if p.name.startswith(names) and p.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode() + path.read_bytes())
    for line in corpus_lines(recipe):
        digest.update(line)
    return digest.hexdigest()[:20]


def load_tokens(recipe: Recipe) -> Tokens:
    """The recipe's corpus as tokens, made on demand under data/cache/<key>/ and read from there afterwards.

    Samples with fewer than min_supervised supervised tokens are left out, and those that the template cannot render;
    when fewer than min_retention of all survive the masks are wrong, and ValueError shows one of them.
    """
    folder = target_path(recipe)
    cache = DATA / "cache" / cache_key(recipe, folder)
    if not is_complete(cache):
        require_fit(recipe, folder, load_tokenizer(folder, cache.name))
        with locked(cache.with_name(cache.name + ".lock")):
            if not is_complete(cache):
                build_cache(recipe, folder, cache)
    tokens = Tokens(cache, recipe.min_supervised)
    if len(tokens) < recipe.min_retention * tokens.total:
        short = np.setdiff1d(np.arange(len(tokens.starts) - 1), tokens.rows)
        span = slice(*tokens.starts[short[0]:short[0] + 2]) if len(short) else slice(0)
        raise ValueError(f"only {len(tokens)} of {tokens.total} samples of {corpus_path(recipe)} have at least "
                         f"{recipe.min_supervised} supervised tokens; expected {recipe.min_retention:.0%}. Either "
                         f"chat_family {recipe.chat_family!r} does not fit this tokenizer, or max_length "
                         f"{recipe.max_length} cuts the answers off, or they are that short. Left out: "
                         f"{tokens.dropped}. One that was, its supervised part in [[ ]]:\n"
                         + paint(tokens.ids[span], tokens.mask[span], load_tokenizer(folder, cache.name), "[[", "]]"))
    return tokens


def build_cache(recipe: Recipe, folder: Path, cache: Path) -> None:
    """Tokenise the corpus into `cache`: ids.bin, mask.bin, starts.bin, supervised.bin, notes.json.

    Chunks of rows go to one process per core and come back in order; a few are under way at a time. Written through
    Python's own files: numpy's report of a full disk says neither that nor where.
    """
    partial = cache.with_name(cache.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    starts, supervised, cut, broken = [np.zeros(1, np.int64)], [], 0, Counter()
    with (open(partial / "ids.bin", "wb") as ids_file, open(partial / "mask.bin", "wb") as mask_file,
          tqdm(desc="tokenize", unit="row") as bar):
        for ids, mask, lengths, counts, cuts, errors in in_processes(encode_lines, corpus_lines(recipe), folder, recipe,
                                                                     cache.name):
            ids_file.write(ids)
            mask_file.write(mask)
            starts.append(starts[-1][-1] + np.cumsum(lengths, dtype=np.int64))
            supervised += counts
            cut += cuts
            broken += errors
            bar.update(len(lengths) + errors.total())
    if not supervised:
        raise ValueError(f"the corpus {corpus_path(recipe)} has no row that can be rendered ({dict(broken)}); look at "
                         "it, then remove it and make it again")
    (partial / "starts.bin").write_bytes(np.concatenate(starts).tobytes())
    (partial / "supervised.bin").write_bytes(np.array(supervised, np.int32).tobytes())
    (partial / "notes.json").write_text(json.dumps({"cut": cut, "broken": broken}, indent=2) + "\n")
    publish(partial, cache)


def follow_parent() -> None:
    """A worker ends with the process that it works for, also when that one is killed."""
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def in_processes(work, lines: Iterator[bytes], *args) -> Iterator:
    """work(chunk, *args) for chunks of lines, in order, on all cores; here when there is but one chunk.

    The workers come from a clean server process: forks of this one could inherit a lock that nobody releases.
    """
    chunks = iter(lambda: list(itertools.islice(lines, CHUNK)), [])
    head = list(itertools.islice(chunks, 2))
    if len(head) < 2:
        yield from (work(chunk, *args) for chunk in head)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    server = get_context("forkserver")
    server.set_forkserver_preload(["data_glm"])
    with ProcessPoolExecutor(cores, server, initializer=follow_parent) as pool:
        waiting = deque()
        for chunk in itertools.chain(head, chunks):
            waiting.append(pool.submit(work, chunk, *args))
            if len(waiting) > cores + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def paint(ids, mask, tokenizer, on: str = "\033[32m", off: str = "\033[0m") -> str:
    """The text of a sample with its supervised runs between `on` and `off`."""
    parts = []
    for generated, run in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([int(i) for i, _ in run], clean_up_tokenization_spaces=False)
        parts.append(on + text + off if generated else text)
    return "".join(parts)


# ---- commands ------------------------------------------------------------------------------------------------------


def show(recipe: Recipe, n: int) -> None:
    """Print n samples, evenly spread over the corpus, with the supervised part in green."""
    tokens, tokenizer = load_tokens(recipe), load_tokenizer(target_path(recipe))
    for i in np.linspace(0, len(tokens) - 1, n).astype(int):
        ids, mask = tokens[i]
        print(f"---- sample {i}: {len(ids)} tokens, {mask.sum()} supervised\n{paint(ids, mask, tokenizer)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "regen", "verify", "tokenize", "show", "tasks"])
    parser.add_argument("names", nargs="*", help="a recipe of recipe.py (else the default one); tasks: their names")
    parser.add_argument("--n", type=int, default=3, help="show, verify: how many samples to print")
    parser.add_argument("--server", action="append", default=[], help="regen: an address up to /v1; may be given again")
    parser.add_argument("--concurrency", type=int, default=64, help="regen: conversations under way at the servers")
    parser.add_argument("--limit", type=int, default=0, help="regen: only the first conversations")
    parser.add_argument("--temperature", type=float, help="regen: sampling; the target's generation config otherwise")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    args = parser.parse_args()
    with plain_errors(ValueError):
        if args.command == "tasks":
            if strangers := set(args.names) - set(BUILDERS):
                parser.error(f"no task named {', '.join(strangers)}; there are: {', '.join(BUILDERS)}")
            raise SystemExit(1 if build_tasks(tuple(args.names or BUILDERS)) else 0)
        if len(args.names) > 1:
            parser.error(f"expected one recipe at most, got {' '.join(args.names)}")
        recipe, start = get_recipe(*args.names), time.perf_counter()
        if args.command == "prepare":
            prepare(recipe)
            build_tasks(tuple(dict.fromkeys(OFFLINE + tuple(name for name in recipe.eval_tasks if name in BUILDERS))))
        elif args.command == "regen":
            regen(recipe, args.server, args.limit, args.concurrency, temperature=args.temperature, top_p=args.top_p,
                  top_k=args.top_k)
        elif args.command == "verify":
            from verify import verify
            raise SystemExit(0 if verify(recipe, args.n) else 1)
        elif args.command == "show":
            show(recipe, args.n)
        else:
            tokens = load_tokens(recipe)
            print(f"tokens of {recipe.name}: {DATA / 'cache' / tokens.key}, {len(tokens)} samples, "
                  f"left out: {tokens.dropped}, cut at {recipe.max_length}: {tokens.cut} "
                  f"({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    main()
