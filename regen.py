"""The target's own answers: every assistant turn of a corpus is written anew by the target.

`generate` is the local back end, continuous batching over a transformers model; `ask_servers` the other one, any
OpenAI-compatible servers, many requests at once. `answer_corpus` keeps what either yields: a finished conversation is
on disk at once, a run that is killed goes on with the ids that are missing, whichever back end finishes them. The
memory behind `generate` is in kvcache.py. Read next: data_glm.py.
"""
import http.client
import itertools
import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

import targets
from capture import applied_head
from chat import CLOSE, OPEN, family_rule, inlined, render, stop_token_ids
from corpus import drop_torn_line, write_atomic
from recipe import Recipe
from targets import locked

WAVE = 1024                                      # conversations that the local back end takes at a time
ATTEMPTS, BACK_OFF = 6, 1.0                      # tries of a request, seconds before the second one (then doubled)
TIMEOUT = 3600                                   # seconds for one answer: 8k tokens of a busy server take minutes


# ---- a corpus that grows by id -------------------------------------------------------------------------------------


def answer_corpus(path: Path, settings: dict, ids: list, answer: Callable[[list], Iterable[dict]]) -> int:
    """Fill the jsonl `path` with a row for each of `ids`, in their order; returns how many there are.

    `answer(missing)` yields finished rows in any order; each is appended to answers.jsonl at once. Rows of ids that are
    not asked for stay, behind the others. ValueError when the folder was made with other settings.
    """
    noted, answers = path.parent / "settings.json", path.parent / "answers.jsonl"
    with locked(path.parent / "lock"):
        try:
            old = json.loads(noted.read_text()) if noted.is_file() else settings
        except ValueError as error:
            raise ValueError(f"{noted} is damaged ({error}); delete it if that folder's answers are of this recipe, "
                             "else move the folder away; then run the same command again") from error
        if old != settings:
            changed = ", ".join(k for k in {**old, **settings} if old.get(k) != settings.get(k))
            raise ValueError(f"{path.parent} was made with other settings ({changed}); move that folder away or set "
                             "the recipe back: one corpus must not mix the two")
        if not noted.is_file():
            write_atomic(noted, json.dumps(settings, indent=2) + "\n")
        drop_torn_line(answers)
        done = {}                                # id -> (file, offset) of its row
        for file in filter(Path.is_file, (path, answers)):
            with open(file, "rb") as lines:
                offset = 0
                for number, line in enumerate(lines, 1):
                    try:
                        done[json.loads(line)["id"]] = file, offset
                    except (ValueError, KeyError, TypeError) as error:
                        raise ValueError(f"{file}, line {number} is no row with an id ({error}); remove that line, "
                                         "then run the same command again") from error
                    offset += len(line)
        if missing := [i for i in ids if i not in done]:
            print(f"corpus {path.parent}: {len(done)} rows there, the target answers {len(missing)} more", flush=True)
            with open(answers, "ab") as file:
                for row in answer(missing):
                    done[row["id"]] = answers, file.tell()
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                    file.flush()
        if missing or answers.is_file():
            wanted = set(ids)
            order = [i for i in ids if i in done] + sorted(i for i in done if i not in wanted)

            def rows() -> Iterator[str]:
                files = {file: open(file, "rb") for file in (path, answers) if file.is_file()}
                for file, offset in map(done.__getitem__, order):
                    files[file].seek(offset)
                    yield files[file].readline().decode()
            write_atomic(path, rows())
            answers.unlink(missing_ok=True)
        return sum(i in done for i in ids)


def as_written(text: str, reason: str, rule: dict, reasoning: str | None = None) -> dict:
    """The assistant message of a generated text. Where the prompt has opened the reasoning, its tag is written, so that
    the message says itself whether it thinks."""
    if reasoning:                                # the server split it off
        return inlined({"role": "assistant", "content": text, "reasoning_content": reasoning, "finish_reason": reason},
                       rule)
    opens = rule["empty"] == CLOSE and not text.startswith(OPEN)
    return {"role": "assistant", "content": OPEN * opens + text, "finish_reason": reason}


def turns_before(row: dict, so_far: list[dict]) -> list[dict] | None:
    """`so_far` and what the row has before its next answer; None when no answer follows.

    A conversation ends where a tool would speak: its recorded words answer a call that the target has not made.
    """
    n = len(so_far)
    rest = row["messages"][n:]
    upto = next((i for i, m in enumerate(rest) if m["role"] in ("assistant", "tool")), None)
    return None if upto is None or rest[upto]["role"] == "tool" else so_far + rest[:upto]


# ---- the local back end --------------------------------------------------------------------------------------------


def answer_locally(recipe: Recipe, folder: Path, tokenizer, rows: Iterable[dict],
                   sampling: Callable[[dict, int], dict], total: int) -> Iterator[dict]:
    """Rows with the answers of the target in `folder`, as they finish. `sampling(row, turn)`: temperature, seed, maybe
    top_k, top_p. Of WAVE conversations at once all first turns are answered, then all second ones, ...
    """
    model, family, rule = load_model(folder, recipe.dtype), recipe.chat_family, family_rule(recipe.chat_family)
    model.set_output_embeddings(applied_head(model.get_output_embeddings(), recipe))
    stops = list(recipe.stop_token_ids) or stop_token_ids(model, tokenizer, None)
    rows, tokens, start = iter(rows), 0, time.perf_counter()
    with tqdm(total=total, unit="row", desc="answers") as bar:
        while under_way := [(row, []) for row in itertools.islice(rows, WAVE)]:
            turn = 0
            while under_way:
                asked = [(row, turns_before(row, so_far)) for row, so_far in under_way]
                prompts = [tokenizer(render([inlined(m, rule) for m in so_far], tokenizer, family, True,
                                            row.get("tools")), add_special_tokens=False)["input_ids"]
                           for row, so_far in asked]
                how, under_way = [sampling(row, turn) for row, _ in asked], []
                heat, seeds = [h["temperature"] for h in how], [h["seed"] for h in how]
                filters = [(h.get("top_k") or 0, h.get("top_p") or 1.0) for h in how]
                for i, new, reason in generate(model, prompts, recipe.corpus_max_new_tokens, heat, seeds, stops,
                                               filters=filters):
                    text = tokenizer.decode(new[:-1] if reason == "stop" else new, clean_up_tokenization_spaces=False)
                    row, so_far = asked[i]
                    so_far = [*so_far, as_written(text, reason, rule)]
                    tokens += len(new)
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                    if turns_before(row, so_far) is None:
                        bar.update()
                        yield row | {"messages": so_far}
                    else:
                        under_way.append((row, so_far))
                turn += 1


def load_model(folder: Path, dtype: str):
    """The target as a transformers causal LM for `generate`: on the GPU in `dtype` if there is one, else in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return targets.load_model(folder, getattr(torch, dtype) if device == "cuda" else torch.float32, device)


def cut_tail(logits: torch.Tensor, filters: list[tuple[int, float]]) -> None:
    """Set to -inf, in place, what top_k and then top_p leave out of each row of logits [B, V]: top_k keeps the k
    largest, top_p the fewest largest ones whose probabilities reach p."""
    for row, (top_k, top_p) in zip(logits, filters, strict=True):
        if top_k and top_k < len(row):
            row.masked_fill_(row < row.topk(top_k).values[-1], -torch.inf)
        if top_p < 1:
            values, order = row.sort(descending=True)
            before = torch.softmax(values, -1).cumsum(-1).roll(1)
            before[0] = 0
            row[order[before >= top_p]] = -torch.inf


@torch.inference_mode()
def generate(model, prompts: list[list[int]], max_new_tokens: int, temperatures: list[float], seeds: list[int],
             stop_ids: list[int], slots: int = 64,
             filters: list[tuple[int, float]] | None = None) -> Iterator[tuple[int, list[int], str]]:
    """Answer many prompts; yields (index, new ids with the stop token, "stop" or "length") in the order of finishing.

    Continuous batching: every slot holds one row, a finished row makes room for a waiting prompt at once, and at the
    end the batch shrinks. A prefix that all prompts share (the system message) is computed once. A row's answer depends
    on its prompt, temperature and seed only: temperature 0 takes the argmax, otherwise one uniform a token, from the
    row's own generator, is looked up in the cumulative distribution; filters[row] = (top_k, top_p) cuts its tail off
    first (0 and 1.0 keep it). `model` comes from `load_model`.
    """
    if not prompts:
        return
    from kvcache import ATTENTION, SlotCache  # not above: transformers takes two seconds to import
    grouped = model.config._attn_implementation == ATTENTION     # a model's own masks are for rows of one length
    slots = min(slots, len(prompts)) if grouped else 1
    decoder, head = targets.decoder_of(model), model.get_output_embeddings()
    device, stop_ids = model.device, set(stop_ids)
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
            warm = logits[sampled] / heat
            if filters:
                cut_tail(warm, [filters[batch[i]] for i in sampled])
            cdf = torch.softmax(warm, -1).cumsum(-1, dtype=torch.float64)
            uniform = torch.stack([torch.rand(1, generator=generators[batch[i]], dtype=torch.float64) for i in sampled])
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


# ---- servers -------------------------------------------------------------------------------------------------------


class Servers:
    """OpenAI-compatible servers: who is well, who has how much to do. Shared by the asking threads."""

    def __init__(self, urls: list[str]):
        self.state = {url.rstrip("/"): {"busy": 0, "errors": 0, "rests_until": 0.0, "served": 0} for url in urls}
        self.lock = threading.Lock()

    def take(self) -> str:
        """The well server with the least to do; when all rest, the first that will be well, after its rest."""
        with self.lock:
            now = time.monotonic()
            url, state = min(self.state.items(), key=lambda pair: (max(pair[1]["rests_until"] - now, 0),
                                                                   pair[1]["busy"], pair[1]["served"]))
            state["busy"] += 1
            wait = state["rests_until"] - now
        time.sleep(max(wait, 0))
        return url

    def give_back(self, url: str, ok: bool) -> None:
        """A server that fails rests, twice as long after each failure in a row, half a minute at most."""
        with self.lock:
            state = self.state[url]
            state["busy"] -= 1
            state["served"] += ok
            state["errors"] = 0 if ok else state["errors"] + 1
            if not ok:
                state["rests_until"] = time.monotonic() + BACK_OFF * min(2 ** (state["errors"] - 1), 30)

    def report(self) -> str:
        return "; ".join(f"{u}: {s['served']} answers, {s['errors']} errors in a row" for u, s in self.state.items())


def request(url: str, body: dict | None = None, timeout: float = TIMEOUT) -> dict:
    """The JSON reply of a server; OSError (urllib's) or ValueError when there is none."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as reply:
        return json.loads(reply.read())


def ask(servers: Servers, body: dict) -> dict:
    """One chat completion, from whichever server is well. OSError after ATTEMPTS tries, ValueError when a server says
    that the request itself is wrong (the context is too long, for example)."""
    for attempt in range(ATTEMPTS):
        url = servers.take()
        try:
            reply = request(f"{url}/chat/completions", body)
            choice = reply["choices"][0]
            servers.give_back(url, True)
            return choice | {"tokens": (reply.get("usage") or {}).get("completion_tokens", 0)}
        except urllib.error.HTTPError as error:
            said = f"{url} answers {error.code}: {error.read()[:300].decode(errors='replace')}"
            wrong = 400 <= error.code < 500 and error.code not in (408, 409, 425, 429)
            servers.give_back(url, wrong)        # a server that refuses a request is well
            if wrong:
                raise ValueError(said) from error
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            # down, torn, or no completion
            said = f"{url}: {type(error).__name__}: {error}"
            servers.give_back(url, False)
        time.sleep(BACK_OFF * 2 ** attempt * random.uniform(0.5, 1) * (attempt < ATTEMPTS - 1))
    raise OSError(f"no answer after {ATTEMPTS} tries; the last one: {said}")


def ask_servers(recipe: Recipe, urls: list[str], rows: Iterable[dict], sampling: Callable[[dict, int], dict],
                total: int, concurrency: int, failures: Path) -> Iterator[dict]:
    """Rows with the servers' answers, as they finish; `concurrency` conversations are under way at once.

    A conversation that fails goes to the file `failures` with the error and stays missing: the next run asks again.
    OSError when a server is not there at the start, or when conversations fail one after the other.
    """
    rule, servers = family_rule(recipe.chat_family), Servers(urls)
    try:
        model = [request(f"{url}/models", timeout=60)["data"][0]["id"] for url in servers.state][0]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise OSError(f"a server of {', '.join(urls)} does not list its model ({type(error).__name__}: {error}); "
                      "start it and give its address up to /v1, as http://127.0.0.1:8000/v1") from error
    waiting, finished = queue.Queue(), queue.Queue()
    fixed = {"model": model, "max_tokens": recipe.corpus_max_new_tokens}
    if rule["thinking"] != "none":
        fixed["chat_template_kwargs"] = {"enable_thinking": rule["thinking"] == "on"}

    def converse(row: dict) -> tuple[dict, int]:
        so_far, tokens, turn = [], 0, 0
        tools = {"tools": row["tools"]} if row.get("tools") else {}
        while (messages := turns_before(row, so_far)) is not None:
            sent = [{k: v for k, v in inlined(m, rule).items() if k != "finish_reason"} for m in messages]
            how = {k: v for k, v in sampling(row, turn).items() if v is not None}
            choice = ask(servers, fixed | {"messages": sent} | how | tools)
            said = choice["message"]
            reasoning = said.get("reasoning_content") or said.get("reasoning")
            so_far = [*messages, as_written(said.get("content") or "", choice.get("finish_reason"), rule, reasoning)]
            tokens, turn = tokens + choice["tokens"], turn + 1
        return row | {"messages": so_far}, tokens

    def work() -> None:
        while True:
            row = waiting.get()
            try:
                finished.put((row, *converse(row)))
            except Exception as error:           # goes to `failures`, by the main thread
                finished.put((row, error, 0))

    for _ in range(concurrency):
        threading.Thread(target=work, daemon=True).start()
    write_atomic(failures, [])
    rows, under_way, tokens, in_a_row, start = iter(rows), 0, 0, 0, time.perf_counter()
    with tqdm(total=total, unit="row", desc="answers") as bar, open(failures, "a", encoding="utf-8") as bad:
        while True:
            while under_way < 2 * concurrency and (row := next(rows, None)) is not None:
                waiting.put(row)
                under_way += 1
            if not under_way:
                break
            row, answer, new = finished.get()
            under_way -= 1
            tokens += new
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update()
            in_a_row = in_a_row + 1 if isinstance(answer, Exception) else 0
            if not in_a_row:
                yield answer
                continue
            bad.write(json.dumps({"id": row["id"], "error": f"{type(answer).__name__}: {answer}"}) + "\n")
            bad.flush()
            if in_a_row > concurrency + 8 or all(s["errors"] > 2 * ATTEMPTS for s in servers.state.values()):
                raise OSError(f"the servers are not well: {in_a_row} conversations failed one after the other, the "
                              f"last with: {answer} ({servers.report()}); mend them, then run the same command again")
    print(servers.report(), flush=True)
