"""Does a recipe fit its target? And what would a recipe for a target look like that has none?

    python recipe.py check NAME [--target PATH] [--gpus N] [--tp N]    a table, the memory of a run; exit code 1 if not
    python recipe.py new PATH                                          a recipe to paste into recipe.py

`check` reads config, tokenizer and the headers of the weights, whatever of it is there, and no tensor. Its complaints
are sentences, and data preparation and training begin with the same ones (`require_fit`). `new` proposes what passes
them and says of which of its choices it is unsure. Read next: recipe.py, targets.py.
"""
import argparse
import json
import math
import textwrap
from dataclasses import dataclass, fields, replace
from pathlib import Path

from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open

from chat import FAMILIES, encode, family_rule, stop_token_ids
from plan import count_parameters, memory_plan
from recipe import Recipe, get_recipe, spread_layers
from targets import SMOLLM2, check_mask_id, check_target, download, plain_errors, target_path

# Config keys by which a target scales its logits, and whether it divides by them.
HEAD_SCALES = {"logits_mup_width_multiplier": True, "logits_scaling": True, "logit_scale": False,
               "lm_head_multiplier": False}
# Layer types whose memory can go back to any earlier token (kvcache.py).
ROLLED_BACK = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "hybrid",
               "hybrid_sliding", "conv"}
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
SAMPLE = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."},
          {"role": "user", "content": "And three?"}, {"role": "assistant", "content": "Seven, then."}]


@dataclass
class Target:
    """What a target's folder says without running it."""
    folder: Path
    whole: object                                # its config
    config: object                               # the part about the text model
    tokenizer: object | None
    tensors: dict[str, tuple[str, list[int]]]    # dtype and shape of those outside numbered layers; ("", []) unknown

    @property
    def tied(self) -> bool:
        return any(getattr(config, "tie_word_embeddings", False) for config in (self.whole, self.config))


def read_target(path: Path, tokenizer=None) -> Target:
    """Config, tokenizer and tensor headers of a folder, or of the folder of a config.json. ValueError says why not."""
    from transformers import AutoConfig, AutoTokenizer
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; name the folder of a Hugging Face model")
    try:
        whole = AutoConfig.from_pretrained(folder)
        if tokenizer is None and any(folder.glob("tokenizer*.json")):
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:                   # whatever config and tokenizer classes make of a file
        raise ValueError(f"{folder} cannot be read by this version of transformers ({type(error).__name__}: {error}); "
                         "check the files, or the version in requirements.txt") from error
    text = whole.get_text_config()
    text.allow_global_per_layer_attribute_access = True      # where head sizes differ by layer: the common one
    return Target(folder, whole, text, tokenizer, tensor_headers(folder))


def tensor_headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """{name: (dtype, shape)} of the tensors outside numbered layers, from the headers of the files that are there."""
    def outside(names) -> list[str]:
        return [name for name in names if not any(part.isdigit() for part in name.split("."))]

    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    found = dict.fromkeys(outside(named), ("", []))
    for path in sorted({folder / named[name] for name in found} if named else folder.glob("*.safetensors")):
        if path.is_file():
            try:
                with safe_open(path, "pt") as file:
                    for name in outside(file.keys()):                                     # noqa: SIM118
                        part = file.get_slice(name)
                        found[name] = part.get_dtype(), list(part.get_shape())
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be read ({error}); fetch it again") from error
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The checks: each returns what it saw, or None when there was nothing to see, or raises ValueError with the mend


def agree(recipe: Recipe, field: str, theirs: float, says: str) -> None:
    """ValueError when the target says another number than the recipe."""
    if not math.isclose(ours := getattr(recipe, field), theirs, rel_tol=1e-6):
        raise ValueError(f"recipe {recipe.name!r} says {field} = {ours:.7g}, the target's {says} {theirs:.7g}; correct "
                         "the recipe")


def check_layers(recipe: Recipe, target: Target) -> str:
    from capture import check_layer_ids
    if recurrent := sorted(set(getattr(target.config, "layer_types", None) or ()) - ROLLED_BACK):
        raise ValueError(f"the target has layers of type {', '.join(recurrent)}, which keep no past to go back to when "
                         "a drafted token is refused; such targets are not supported")
    check_target(recipe, target.folder)
    ids = check_layer_ids(recipe.target_layer_ids, target.config.num_hidden_layers)
    return f"outputs of {', '.join(map(str, ids))} of {recipe.num_target_layers} layers, width {recipe.hidden_size}"


def check_draft(recipe: Recipe, target: Target) -> str:
    import torch

    from dflash2 import new_draft
    with torch.device("meta"):
        new_draft(recipe)
    if recipe.max_length > (most := getattr(target.config, "max_position_embeddings", None) or recipe.max_length):
        raise ValueError(f"max_length {recipe.max_length} of recipe {recipe.name!r} exceeds the {most} positions of "
                         "the target; lower it")
    return (f"{recipe.draft}, {recipe.num_draft_layers} layers, {recipe.num_attention_heads} query and "
            f"{recipe.num_key_value_heads} key/value heads of {recipe.head_dim}, MLP {recipe.intermediate_size}")


def embedding_scale(target: Target) -> float:
    """What the target's embedding module multiplies by, from a copy of the text model without memory."""
    import torch
    from transformers import AutoModel
    with torch.device("meta"):
        module = AutoModel.from_config(target.config).get_input_embeddings()
    return float(getattr(module, "scalar_embed_scale", 1.0))


def check_embedding(recipe: Recipe, target: Target) -> str:
    """The two tensors that the draft borrows: there, plain, of the recipe's shape."""
    agree(recipe, "embed_scale", embedding_scale(target), "embedding module multiplies by")
    if not target.tensors:
        agree(recipe, "vocab_size", target.config.vocab_size, "config says")
        if target.tied != (recipe.head_key == recipe.embed_key):
            raise ValueError(f"the target {'ties' if target.tied else 'does not tie'} its head to its embedding; set "
                             f"head_key of recipe {recipe.name!r} accordingly (embed_key is {recipe.embed_key!r})")
        return f"{recipe.vocab_size} rows; no weights here to look up {recipe.embed_key} and {recipe.head_key}"
    for field in ("embed_key", "head_key"):
        key = getattr(recipe, field)
        if key not in target.tensors:
            raise ValueError(f"the target has no tensor {key!r}; set {field} of recipe {recipe.name!r} to one of "
                             f"{[n for n in target.tensors if 'embed' in n or 'head' in n] or list(target.tensors)}")
        dtype, shape = target.tensors[key]
        if dtype and dtype not in PLAIN_DTYPES:
            raise ValueError(f"{key} of the target is {dtype}, expected one of {', '.join(PLAIN_DTYPES)}: a quantised "
                             "checkpoint must keep embedding and head plain; use one that does")
        if shape and (shape[1] != recipe.hidden_size or shape[0] not in (recipe.vocab_size, recipe.output_vocab_size)):
            raise ValueError(f"{key} of the target is {shape}, recipe {recipe.name!r} says vocab_size = "
                             f"{recipe.vocab_size}, hidden_size = {recipe.hidden_size}; correct the recipe")
    return f"{recipe.embed_key} and {'tied' if target.tied else recipe.head_key}, {recipe.vocab_size} rows"


def head_scale(config) -> float:
    """What the target multiplies its logits by, from its config."""
    scale = 1.0
    for key, divides in HEAD_SCALES.items():
        if value := getattr(config, key, None):
            scale = scale / value if divides else scale * value
    return scale


def check_logits(recipe: Recipe, target: Target) -> str:
    """softmax(lm_head(final)) must be the target's own distribution."""
    if cap := getattr(target.config, "final_logit_softcapping", None):
        raise ValueError(f"the target caps its logits (final_logit_softcapping = {cap}), which a linear head cannot; "
                         "targets with capped logits are not supported")
    agree(recipe, "head_scale", head_scale(target.config), "config says")
    end = getattr(target.config, "unpadded_vocab_size", None) or 0
    if end < recipe.vocab_size:
        agree(recipe, "output_vocab_size", end, "config says")
    return f"scale {recipe.head_scale:g}" + (f", ids from {end} on never come out" if end else "")


def check_mask(recipe: Recipe, target: Target) -> str | None:
    if recipe.mask_token_id in recipe.stop_token_ids:
        raise ValueError(f"mask_token_id {recipe.mask_token_id} of recipe {recipe.name!r} is one of its "
                         "stop_token_ids; choose an id that the tokenizer does not use")
    if target.tokenizer is None:
        return None
    check_mask_id(recipe, target.tokenizer)
    return f"{recipe.mask_token_id}: no text yields it, the tokenizer ends at {tokenizer_end(target.tokenizer)}"


def check_stops(recipe: Recipe, target: Target) -> str:
    """Every id that ends an answer must be in the recipe, or found by itself, and be one that the tokenizer knows."""
    stops = list(recipe.stop_token_ids)
    try:
        known = stop_token_ids(target.folder, target.tokenizer, None)
    except ValueError:
        if not stops:
            raise
        known = []
    stops = stops or known
    if missing := sorted(set(known) - set(stops)):
        raise ValueError(f"stop_token_ids {stops} of recipe {recipe.name!r} lack {missing}, with which the target ends "
                         "its answers (generation_config.json, tokenizer); add them")
    tokens = {i: target.tokenizer.convert_ids_to_tokens(i) if target.tokenizer else "" for i in stops}
    if odd := [i for i, token in tokens.items() if token is None]:
        raise ValueError(f"stop_token_ids {stops} of recipe {recipe.name!r} hold {odd}, which the tokenizer does not "
                         "know; correct the recipe")
    return ", ".join(f"{i} {token}".rstrip() for i, token in tokens.items())


def check_chat(recipe: Recipe, target: Target) -> str | None:
    """The family's rule finds the answers in what the tokenizer's own template renders."""
    mode = family_rule(recipe.chat_family)["thinking"]
    if mode != recipe.thinking:
        raise ValueError(f"recipe {recipe.name!r} says thinking = {recipe.thinking!r}, its chat family "
                         f"{recipe.chat_family!r} renders with {mode!r}; correct the one that is wrong")
    if target.tokenizer is None:
        return None
    try:
        ids, mask = encode(SAMPLE, target.tokenizer, recipe.chat_family)
    except (TemplateError, TypeError) as error:  # the template was handed what it cannot render
        raise ValueError(f"the tokenizer's template does not render chat family {recipe.chat_family!r} of recipe "
                         f"{recipe.name!r} ({error}); choose another one") from error
    answer = target.tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    if not all(m["content"] in answer for m in SAMPLE if m["role"] == "assistant"):
        raise ValueError(f"chat family {recipe.chat_family!r} of recipe {recipe.name!r} supervises {answer!r} of a "
                         f"talk with the answers {[m['content'] for m in SAMPLE[1::2]]}; choose another one")
    return f"{recipe.chat_family}, thinking {mode}: {sum(mask)} of {len(ids)} tokens of a sample are supervised"


CHECKS = {"layers": check_layers, "draft": check_draft, "embedding, head": check_embedding, "logits": check_logits,
          "mask id": check_mask, "stop ids": check_stops, "chat": check_chat}


def findings(recipe: Recipe, target: Target) -> list[tuple[str, str, str]]:
    """(check, "ok" or "WRONG" or "-", what was seen or what to mend)."""
    rows = []
    for name, check in CHECKS.items():
        try:
            seen = check(recipe, target)
            rows.append((name, "-", "no tokenizer here") if seen is None else (name, "ok", seen))
        except ValueError as error:
            rows.append((name, "WRONG", str(error)))
    return rows


def require_fit(recipe: Recipe, folder: Path, tokenizer=None) -> None:
    """ValueError with every complaint that `check` would make; data preparation and training begin with it."""
    if wrong := [text for _, state, text in findings(recipe, read_target(folder, tokenizer)) if state == "WRONG"]:
        raise ValueError(f"recipe {recipe.name!r} does not fit its target {folder}:\n" + "\n".join(wrong))


# ---------------------------------------------------------------------------------------------------------------------
# A recipe for a target that has none


def tokenizer_end(tokenizer) -> int:
    """One past the largest id of the tokenizer (which may have holes)."""
    return max(tokenizer.get_vocab().values()) + 1


def mask_candidates(target: Target, rows: int):
    """(id, what it is), the best first: a row that no token has, else a token that no text yields."""
    tokens = {i: token for token, i in target.tokenizer.get_vocab().items()}
    yield from ((i, "the first row past the tokenizer") for i in range(tokenizer_end(target.tokenizer), rows))
    yield from ((i, "an id without a token") for i in range(rows) if i not in tokens)
    spare = [i for i, token in tokens.items() if any(word in token for word in ("unused", "reserved", "extra"))]
    yield from ((i, f"{tokens[i]}, which no text yields") for i in sorted(spare))
    never = {chr(b) for b in range(0xF5, 0x100)} | {f"<0x{b:02X}>" for b in range(0xF5, 0x100)}
    yield from ((i, f"{tokens[i]}: a byte that UTF-8 never has") for i in sorted(tokens) if tokens[i] in never)
    named = [i for i, token in tokens.items() if len(token) > 4 and token[0] == "<" and token[-1] == ">"]
    yield from ((i, f"unsure: {tokens[i]}, which its own text does not yield") for i in sorted(named)
                if i not in target.tokenizer(f"a{tokens[i]}b {tokens[i]}", add_special_tokens=False)["input_ids"])


def propose(path: Path) -> tuple[Recipe, dict[str, str]]:
    """(a recipe for the target in a folder, {field: a remark about the choice}). ValueError when none is possible."""
    target = read_target(path)
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    missing = [key for key in needed if not isinstance(getattr(target.config, key, None), int)]
    if missing or target.whole.is_encoder_decoder:
        raise ValueError(f"{path} holds a {target.whole.model_type}, whose config states no "
                         f"{', '.join(missing) or 'decoder alone'}; a draft needs a decoder-only transformer")
    c, name, (tables, notes) = target.config, path.resolve().name.lower(), propose_tables(target)
    L, H, taps = c.num_hidden_layers, c.hidden_size, min(5, c.num_hidden_layers - 3)
    if L < 4:
        raise ValueError(f"{path} has {L} layers; a draft needs a target of at least 4")
    heads = c.num_attention_heads
    kv = getattr(c, "num_key_value_heads", None) or heads
    rope = getattr(c, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    mlp = getattr(c, "intermediate_size", None)
    if rope.get("rope_type", "default") != "default":
        notes["rope_theta"] = f"the target's {rope['rope_type']} scaling is left out: the draft has plain RoPE"
    if "rope_theta" not in rope:
        notes["rope_theta"] = "unsure: the target's config states none"
    if not isinstance(mlp, int) or mlp < 2 * H:
        notes["intermediate_size"] = f"unsure: the target's {mlp} is too narrow for a dense layer, so 3 x hidden_size"
        mlp = 3 * H
    if getattr(c, "kv_lora_rank", None):
        notes["num_key_value_heads"] = "the target compresses its keys; these are its head counts"
    values = dict(
        name=name, target=str(path), num_target_layers=L, target_layer_ids=spread_layers(L, taps),
        hidden_size=H, num_attention_heads=heads, num_key_value_heads=kv if heads % kv == 0 else heads,
        head_dim=getattr(c, "head_dim", None) or H // heads, intermediate_size=mlp, **tables,
        mask_token_id=tables["vocab_size"] - 1, rope_theta=float(rope.get("rope_theta", 1e6)),
        rms_norm_eps=getattr(c, "rms_norm_eps", None) or getattr(c, "layer_norm_eps", 1e-6),
        max_position_embeddings=c.max_position_embeddings,
        max_length=min(Recipe.max_length, c.max_position_embeddings), head_scale=head_scale(c),
        output_vocab_size=getattr(c, "unpadded_vocab_size", None) or 0, embed_scale=embedding_scale(target),
        corpus="own:gsm_symbolic", corpus_size=8192, eval_tasks=("gsm_symbolic", "humaneval"))
    notes |= {"target_layer_ids": f"evenly spread from 1 to {L - 3}" if taps > 1 else "the middle one",
              "corpus": "or a .jsonl file, or the name of a data set",
              "global_batch": "at most the samples of the corpus: lower it with corpus_size (32 for 1,000)",
              "max_position_embeddings": "the longest evaluation; less saves nothing"}
    try:
        values["stop_token_ids"] = tuple(stop_token_ids(target.folder, target.tokenizer, None))
    except ValueError as error:
        notes["stop_token_ids"] = f"UNKNOWN, fill in: {error}"
    recipe = Recipe(**values)
    if target.tokenizer is None:
        notes["mask_token_id"] = "unsure: no tokenizer here; the last row"
        notes["chat_family"] = f"unsure: no tokenizer here; there are {', '.join(FAMILIES)}"
        return recipe, notes
    possible = ((i, what) for i, what in mask_candidates(target, recipe.vocab_size)
                if passes(check_mask, replace(recipe, mask_token_id=i), target))
    mask, notes["mask_token_id"] = next(possible, (recipe.mask_token_id, "UNKNOWN, fill in: text yields every id"))
    family, mode, notes["chat_family"] = propose_chat(recipe, target)
    return replace(recipe, mask_token_id=mask, chat_family=family, thinking=mode), notes


def propose_tables(target: Target) -> tuple[dict, dict[str, str]]:
    """({vocab_size, embed_key, head_key, embed_norm_key}, remarks) from the names and shapes of the tensors."""
    H, names = target.config.hidden_size, target.tensors
    tables = [n for n, (_, shape) in names.items() if not shape or len(shape) == 2 and shape[1] == H]
    heads = [n for n in tables if any(part in n for part in ("head", "unembed", "embed_out"))]
    embeddings = [n for n in tables if n not in heads and any(part in n for part in ("emb", "wte"))]
    embeddings.sort(key=lambda n: len(names[n][1]) == 2 and abs(names[n][1][0] - target.config.vocab_size))
    embed = (embeddings or ["model.embed_tokens.weight"])[0]
    norms = [n for n, (_, shape) in names.items()
             if "norm" in n and n.startswith(embed.removesuffix(".weight")) and shape == [H]]
    rows = (names.get(embed, ("", []))[1] or [target.config.vocab_size])[0]
    head = embed if target.tied else (heads or ["lm_head.weight"])[0]
    unsure = [f for f, key in (("embed_key", embed), ("head_key", head)) if key not in names]
    return ({"vocab_size": rows, "embed_key": embed, "head_key": head, "embed_norm_key": (norms or [""])[0]},
            dict.fromkeys(unsure, "unsure: nothing here to look it up in"))


def passes(check, recipe: Recipe, target: Target) -> bool:
    try:
        return check(recipe, target) is not None
    except ValueError:
        return False


def propose_chat(recipe: Recipe, target: Target) -> tuple[str, str, str]:
    """(family, thinking mode, remark): of the families that fit the template, one that thinks if the template can."""
    modes = {family: family_rule(family)["thinking"] for family in FAMILIES}
    fitting = [family for family, mode in modes.items()
               if passes(check_chat, replace(recipe, chat_family=family, thinking=mode), target)]
    if not fitting:
        return "chatml", "none", f"UNKNOWN, fill in: none of {', '.join(FAMILIES)} fits the template (chat.py)"
    thinks = "think" in (target.tokenizer.chat_template or "")
    fitting.sort(key=lambda family: (modes[family] != "none") != thinks)
    also = f"; unsure: {', '.join(fitting[1:])} would fit as well" if fitting[1:] else ""
    return fitting[0], modes[fitting[0]], "fits the tokenizer's template" + also


def as_constants(recipe: Recipe, notes: dict[str, str]) -> str:
    """The recipe as a person pastes it: one line a value that is no default, remarks behind them."""
    def shown(value) -> str:
        if isinstance(value, tuple):
            return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
        return f"{value:_}" if isinstance(value, int) and value >= 10_000 else (
            json.dumps(value) if isinstance(value, str) else repr(value))

    lines = []
    for f in fields(recipe):
        value, note = getattr(recipe, f.name), notes.get(f.name, "")
        if value != f.default and value != {} or note:
            text = f"    {f.name}={shown(value)},"
            if note and len(note) > 68:
                lines += textwrap.wrap(note, 114, initial_indent="    # ", subsequent_indent="    # ")
                note = ""
            lines.append(f"{text:<48} # {note}" if note else text)
    constant = "".join(ch if ch.isalnum() else "_" for ch in recipe.name).upper()
    constant = constant if constant[:1].isalpha() else f"TARGET_{constant}"
    return "\n".join([f"{constant} = Recipe(", *lines, ")"])


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def plan_lines(recipe: Recipe, gpus: int, tp: int) -> list[str]:
    """What a run costs: parameters, memory per GPU, disk."""
    trained, frozen = count_parameters(recipe)
    plan = memory_plan(recipe, gpus, tp)
    objective = ", ".join(f"{memory_plan(replace(recipe, num_anchors=n), gpus, tp)['objective'] / 2**30:.2f} GiB at {n}"
                          for n in (512, 1024))
    count = lambda n: f"{n / 1e9:.1f} B" if n > 1e9 else f"{n / 1e6:.1f} M"                    # noqa: E731
    share = recipe.engine_args.get("mem_fraction_static")
    engine = [f"the engine takes {share:.0%} of a GPU: that leaves enough on one of "
              f"{sum(plan.values()) / (1 - share) / 2**30:.0f} GiB"] if share else []
    return [f"parameters: {count(trained + frozen)} in all, {count(trained)} trained; the others are the target's "
            "embedding and head",
            f"memory per GPU for {gpus} GPU{'s' * (gpus > 1)}, {recipe.num_anchors} anchors"
            + (f", the target over {tp} of them" if tp > 1 else "") + " (the engine's own comes on top):",
            *(f"  {bytes_ / 2**30:6.2f} GiB  {what}" for what, bytes_ in plan.items()),
            f"  {sum(plan.values()) / 2**30:6.2f} GiB  together", *engine,
            f"objective's peak: {objective} anchors",
            f"a checkpoint: {2 * trained / 1e9:.2f} GB of weights, {12 * trained / 1e9:.2f} GB of masters and moments"]


def config_folder(recipe: Recipe) -> Path:
    """A folder with the target's config and tokenizer; of a Hugging Face name no weights are fetched."""
    if Path(recipe.target).is_dir() or recipe.target in ("tiny", "toy", SMOLLM2):
        return target_path(recipe)
    return download(recipe.target, only=["*.json", "*.jinja", "*.model"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="recipe.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="does a recipe fit its target, and what does a run cost?")
    check.add_argument("name", nargs="?", help="a name in recipe.py; the default one when nothing is named")
    check.add_argument("--target", type=Path, help="folder of the target, or its config.json")
    check.add_argument("--gpus", type=int, default=16)
    check.add_argument("--tp", type=int, help="GPUs that share a target; 4 behind an engine, else 1")
    new = commands.add_parser("new", help="propose a recipe for a target")
    new.add_argument("path", type=Path, help="folder of the target")
    args = parser.parse_args()
    with plain_errors(ValueError):
        if args.command == "new":
            recipe, notes = propose(args.path)
            wrong = [row for row in findings(recipe, read_target(args.path)) if row[1] == "WRONG"]
            print("\n".join([as_constants(recipe, notes), *(f"# {name}: {text}" for name, _, text in wrong)]))
            raise SystemExit(int(bool(wrong)))
        recipe = get_recipe(args.name)
        target = read_target(args.target or config_folder(recipe))
        rows = findings(recipe, target)
    print(f"{recipe.name}: {target.folder}, {target.whole.model_type}")
    print("\n".join(f"{name:<16} {state:<5}  {text}" for name, state, text in rows))
    print("\n".join(["", *plan_lines(recipe, args.gpus, args.tp or (1 if recipe.engine == "transformers" else 4))]))
    raise SystemExit(int(any(state == "WRONG" for _, state, _ in rows)))
