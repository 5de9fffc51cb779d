"""Is a corpus the target's own, whole, and masked as it should be? `python data_glm.py verify [recipe]`.

Masks, templates and on-policy answers decide the accept length more than the loss does, and none of them complains when
it is wrong: half of a corpus of 1.5 M conversations was once lost because a pattern did not match the thinking
rendering. So: one table, a gate for each line that has a right value, samples to look at, an exit code.
"""
import hashlib
import json
from collections import Counter

import torch

from capture import load_target
from chat import CLOSE, OPEN, family_rule, inlined, render_spans, squeeze
from corpus import read_rows
from data_glm import checked_target, corpus_lines, corpus_path, encode_row, paint, source_path, with_reason
from recipe import Recipe

MAX_MISSING = 0.01                               # of the source's ids
MIN_WELL_FORMED = 0.95                           # of the turns: think tags as they should be, an answer
MAX_LEAKED = 0.001                               # of the turns: names of special tokens in the text
MIN_ROUND_TRIP = 0.999                           # of the rows
MAX_NLL = 1.25                                   # nats a token, over the target's entropy


def answer_kind(content: str, thinking: bool) -> str:
    """What a generated turn looks like under the think-tag contract."""
    closes = content.count(CLOSE)
    if not thinking and (closes or OPEN in content):
        return "a think tag, thinking is off"
    if thinking and closes != 1:
        return "several </think>" if closes else "no </think>: truncated, or a reasoning parser took it"
    return "well formed" if content.rpartition(CLOSE)[2].strip() else "an empty answer"


def typed_kind(parts: list[dict]) -> str:
    """The same for a sequence of typed parts."""
    if not any(p["type"] == "thinking" for p in parts):
        return "no thinking part"
    return "well formed" if parts[-1]["type"] == "text" and parts[-1]["text"].strip() else "an empty answer"


def answer_nll(target, rows: list[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """(mean negative log-likelihood, mean entropy) of the supervised tokens under the target, nats a token."""
    total, count = torch.zeros(2, dtype=torch.float64), 0
    for ids, mask in rows:
        ids, mask = torch.tensor(ids, device=target.device), torch.tensor(mask, device=target.device).bool()
        with torch.inference_mode():
            final = target.capture(ids[None], torch.ones_like(ids)[None]).final[0]
            logs = torch.log_softmax(target.lm_head(final[:-1][mask[1:]]).float(), -1)      # row i predicts token i + 1
        nll = -logs.gather(1, ids[1:][mask[1:], None]).sum()
        total += torch.stack([nll, -(logs.exp() * logs).nan_to_num().sum()]).double().cpu()
        count += len(logs)
    return tuple((total / max(count, 1)).tolist())


def verify(recipe: Recipe, n: int = 3, sample: int = 32) -> bool:
    """Print n samples in colour and the table; whether all gates hold.

    On-policy: of `sample` rows the answers' mean NLL under the target. What a target samples has its entropy as mean
    NLL, what it writes greedily less, what others wrote more; answers of other rows must be less likely still.
    """
    rule = family_rule(recipe.chat_family)
    _, tokenizer = checked_target(recipe)
    specials = [token for token in tokenizer.all_special_tokens if token not in (OPEN, CLOSE)]
    ids, tags, count, chosen, trouble = Counter(), Counter({"well formed": 0}), Counter(), [], []
    for line in corpus_lines(recipe):
        row = json.loads(line)
        ids[row.get("id")] += 1
        for message in row["messages"]:
            if message["role"] == "assistant":
                content = inlined(message, rule)["content"]
                typed = isinstance(content, list)
                tags[typed_kind(content) if typed else answer_kind(content, rule["thinking"] == "on")] += 1
                count["truncated"] += message.get("finish_reason") == "length"
                content = "".join(p[p["type"]] for p in content) if typed else content
                count["leaked"] += any(token in content for token in specials)
        try:
            text, spans = render_spans(with_reason(row), tokenizer, recipe.chat_family, row.get("tools"))
            encoded = encode_row(row, tokenizer, recipe)
        except Exception as error:               # also what a template raises
            trouble.append(f"row {row.get('id')}: {error}")
            continue
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        back = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        answer = squeeze(content).removeprefix(OPEN).removeprefix(CLOSE)
        whole = typed or answer in squeeze(text[slice(*spans[-1])])
        if back != text or not whole:
            trouble.append(f"row {row.get('id')}: " + ("the tokens decode to another text" if back != text else
                                                       "the rendered turn is not the answer of the row"))
        count["round trip"] += back == text and whole
        count["kept"] += sum(encoded[1]) >= recipe.min_supervised
        count["cut"] += encoded[2]
        key = hashlib.sha256(str(row.get("id", line)).encode()).digest()           # a sample that is the same each time
        chosen = sorted([*chosen, (key, row)], key=lambda pair: pair[0])[:sample]
    chosen = [row for _, row in chosen]
    for row in chosen[:n]:
        print(f"---- row {row.get('id')}\n{paint(*encode_row(row, tokenizer, recipe)[:2], tokenizer)}")
    for line in trouble[:n]:
        print(f"---- {line}")

    rows, turns = ids.total(), max(tags.total(), 1)
    table = [("rows", rows, rows > 0)]
    if recipe.corpus.startswith("regen:"):
        wanted = {row["id"] for row in read_rows(source_path(recipe))}
        missing = len(wanted - set(ids))
        table += [(f"of {len(wanted)} source ids, missing", missing, missing <= MAX_MISSING * len(wanted)),
                  ("ids that the source has not", len(set(ids) - wanted), not set(ids) - wanted)]
    doubled = sum(times > 1 for name, times in ids.items() if name is not None)
    table += [("ids more than once", doubled, not doubled),
              ("turns", turns, None),
              *((f"  {kind}", f"{times} ({times / turns:.1%})", None if kind != "well formed" else
                 times >= MIN_WELL_FORMED * turns) for kind, times in tags.most_common()),
              ("  out of length", f"{count['truncated']} ({count['truncated'] / turns:.1%})", None),
              ("  with a special token's name", count["leaked"], count["leaked"] <= MAX_LEAKED * turns),
              ("rows that come back from their tokens", f"{count['round trip'] / max(rows, 1):.2%}",
               count["round trip"] >= MIN_ROUND_TRIP * rows),
              (f"rows with {recipe.min_supervised} supervised tokens in {recipe.max_length}",
               f"{count['kept'] / max(rows, 1):.2%}", count["kept"] >= recipe.min_retention * rows),
              (f"rows cut at {recipe.max_length} tokens", count["cut"], None)]
    if len(chosen) > 1:
        target = load_target(recipe)
        others = [row | {"messages": [*row["messages"][:-1], other["messages"][-1]]}
                  for row, other in zip(chosen, chosen[1:] + chosen[:1], strict=True)]
        (own, entropy), (shuffled, _) = (answer_nll(target, [encode_row(row, tokenizer, recipe)[:2] for row in group])
                                         for group in (chosen, others))
        table += [(f"NLL of {len(chosen)} answers, nats a token", f"{own:.3f}", own <= MAX_NLL * entropy + 0.05),
                  ("  the target's entropy there", f"{entropy:.3f}", None),
                  ("  NLL of another row's answer", f"{shuffled:.3f}", own < shuffled)]
    print(f"---- {corpus_path(recipe)}")
    for what, value, passed in table:
        print(f"{what:<60} {value!s:>20}  {'' if passed is None else 'ok' if passed else 'FAILED'}")
    failed = [what.strip() for what, _, passed in table if passed is False]
    print(f"FAILED: {'; '.join(failed)}" if failed else "all gates passed")
    return not failed
