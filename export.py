"""Draft checkpoints for others: converted into any layout, and validated for what engines accept in silence.

    python export.py CHECKPOINT --to vllm --out DIR        also: sglang, speculators, deepspec
    python export.py SRC --to zlab --target T --out DIR    a DFlash2 draft of the speculators layout, for older vLLMs
    python export.py validate DIR [--target T] [--fix]     exit code 0 fine, 1 errors, 3 an engine would have to guess

An *error* is a draft that is not what its config says. A *serving warning* is something that an engine would guess, and
guess wrong without a word; `--fix` writes it. Read next: layouts.py (how others spell a draft), serve_check.py, which
asks the real engines.
"""
import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dspark import DSparkConfig
from layouts import (
    FLASH2,
    FROZEN,
    LAYERS,
    LAYOUTS,
    draft_kind,
    fields_of,
    full_vocabulary,
    load_draft_tensors,
    look,
    read_config,
    read_values,
    speculative_tokens,
    stamp,
    target_tables,
    tensor_problems,
    write_json,
    write_values,
)

SHARD = 5 << 30                                  # bytes per safetensors file, about


# ---------------------------------------------------------------------------------------------------------------------
# Conversion


def convert(src: str | Path, dst: str | Path, to: str, *, source: str | None = None, target: str | Path | None = None,
            dtype: torch.dtype | None = None, head: str | None = None) -> Path:
    """Write the draft of `src` to the new folder `dst` in layout `to`; nothing but spelling changes.

    source: the layout that src must have (default: whatever it is). head: "include" embedding and head, from src or
    else from the folder `target`, or "share" the target's by leaving them out; default: what src has, and for deepspec
    the target's too when it is named. Raises ValueError for a draft that `validate` finds wrong.
    """
    from huggingface_hub import save_torch_state_dict

    from targets import flush
    src, dst, layout = Path(src), Path(dst), LAYOUTS[to]
    values, _, name = read_values(src)
    if source not in (None, name) and (source, name) != ("vllm", "deepspec"):
        raise ValueError(f"{src} is in the {name} layout, not {source}")
    if (name == "zlab") != (to == "zlab"):
        raise ValueError(f"{src} is in the {name} layout, whose drafts the {to} layout cannot hold")
    tensors, kind = load_draft_tensors(src), draft_kind(name).config_class
    if errors := [f for f in findings(src, target) if f.level == "error"]:
        raise ValueError(f"{src} is not whole, nothing was written:\n" + table(errors))
    if "d2t" in tensors and to not in ("vllm", "speculators"):
        raise ValueError(f"the draft of {src} has a reduced vocabulary, which the {to} layout cannot hold; use vllm or "
                         "speculators")
    if head == "include" and not (layout.frozen and (target or FROZEN[0] in tensors)):
        raise ValueError(f"{src} has no embedding and head: name the target" if layout.frozen else
                         f"the {to} layout always shares the target's embedding and head")
    if not layout.frozen or head == "share":
        tensors = {k: v for k, v in tensors.items() if k not in FROZEN}
    elif (to == "deepspec" or head == "include") and target and FROZEN[0] not in tensors:
        tensors |= target_tables(target, src)
    cast = {k: (v.to(dtype) if dtype and v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    if lost := [k for k, v in cast.items() if not torch.isfinite(v).all()]:
        raise ValueError(f"{lost} overflow in {dtype}; export in bfloat16 or float32")
    if to == "speculators" and target:
        values["verifier"] = str(target)
    values["dtype"] = str(next(iter(cast.values())).dtype).removeprefix("torch.")
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ValueError(f"{dst} exists already; name a folder that does not")
    partial = dst.with_name(f".{dst.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)   # left by a conversion that was killed
    partial.mkdir(parents=True)
    save_torch_state_dict(cast, partial, max_shard_size=SHARD, metadata=stamp(kind(**fields_of(values, kind))))
    write_json(partial / "config.json", write_values(values, to))
    if (src / "recipe.json").is_file():
        shutil.copy(src / "recipe.json", partial)
    for path in partial.iterdir():
        shutil.copymode(partial / "config.json", path)       # safetensors makes its files private
    flush(*partial.iterdir(), partial)
    if dst.exists():
        dst.rmdir()
    partial.rename(dst)
    return dst


COPIED = ("attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size", "initializer_range",
          "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
          "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "rope_parameters", "vocab_size")
WINDOW = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


def zlab_config(raw: dict, target: dict) -> dict:
    """config.json of a speculators DFlash2 draft in z-lab's layout; target: the text config of its target.

    Both layouts name the tensors alike, so this is all that has to be rewritten. ValueError names what is missing.
    """
    if "dflash2" not in (raw.get("speculators_model_type"), (raw.get("speculators_config") or {}).get("algorithm")):
        raise ValueError("not a speculators DFlash2 config: neither speculators_model_type nor "
                         "speculators_config.algorithm is dflash2; --to zlab converts such drafts only")
    inner, depth = raw.get(LAYERS), target["num_hidden_layers"]
    if not inner:
        raise ValueError(f"no {LAYERS} in config.json: the draft's geometry is not there")
    ids = raw.get("target_layer_ids")
    if ids is None and (aux := raw.get("aux_hidden_state_layer_ids")) is not None:
        if min(aux, default=1) < 1:
            raise ValueError(f"aux_hidden_state_layer_ids {aux} must be >= 1: they count the embedding as 0")
        ids = [i - 1 for i in aux]
    if ids is None:
        raise ValueError("neither target_layer_ids nor aux_hidden_state_layer_ids in config.json")
    if max(ids, default=0) >= depth:
        raise ValueError(f"target_layer_ids {ids} exceed the target, which has {depth} layers")
    if raw.get("draft_vocab_size") not in (None, inner.get("vocab_size")):
        raise ValueError(f"draft_vocab_size {raw['draft_vocab_size']} is not {inner.get('vocab_size')}: a DFlash2 "
                         "draft must share the target vocabulary")
    if not isinstance(raw.get("mask_token_id"), int):
        raise ValueError(f"mask_token_id is {raw.get('mask_token_id')!r}, an integer is needed")
    nested = {key: raw.get(key) for key in ("block_size", *FLASH2)}
    if missing := [key for key, value in nested.items() if value is None]:
        raise ValueError(f"config.json lacks {missing}")
    config = {key: inner[key] for key in COPIED if inner.get(key) is not None}
    rope = config.get("rope_parameters")
    if "rope_theta" not in config and isinstance(rope, dict) and rope.get("rope_theta") is not None:
        config["rope_theta"] = rope["rope_theta"]            # transformers before 5 reads the top level
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = target.get(key) if inner.get(key) is None else inner[key]
    return config | {
        "architectures": ["DFlash2DraftModel"], "model_type": inner.get("model_type") or "qwen3", "is_causal": False,
        "tie_word_embeddings": False, "use_cache": True, "dtype": raw.get("dtype") or "bfloat16",
        "use_sliding_window": False, "sliding_window": None,
        "layer_types": ["full_attention"] * inner["num_hidden_layers"], "num_target_layers": depth,
        "dflash_config": nested | {"mask_token_id": raw["mask_token_id"], "target_layer_ids": ids}}


def from_speculators(src: Path, dst: Path, target: Path, keep_window: bool = False, link: bool = False) -> Path:
    """A speculators DFlash2 folder in z-lab's layout: config.json rewritten, weights copied, or linked with `link`.

    The trained backbone is fully attentive; keep_window copies sliding-window keys instead, which changes what the
    draft computes past the window. Files that are in the way at dst are replaced.
    """
    raw = read_config(src)
    config = zlab_config(raw, text_config(target))
    if keep_window:
        config |= {key: raw[LAYERS][key] for key in WINDOW if key in raw[LAYERS]}
    files = sorted(src.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {src}")
    dst.mkdir(parents=True, exist_ok=True)
    for file in [*files, *src.glob("*.safetensors.index.json")]:
        (dst / file.name).unlink(missing_ok=True)
        (dst / file.name).symlink_to(file.resolve()) if link else shutil.copy(file, dst / file.name)
    write_json(dst / "config.json", config)
    return dst


# ---------------------------------------------------------------------------------------------------------------------
# Validation


OTHER_TARGET = "this draft has another target"


class Finding(NamedTuple):
    level: str                                   # "error": the draft is not what its config says; "serving": a guess
    what: str
    mend: str


def findings(folder: str | Path, target: str | Path | None = None) -> list[Finding]:
    """What is wrong with a draft checkpoint, or left for an engine to guess. target: the target's folder."""
    folder, found = Path(folder), []

    def error(what: str, mend: str = "export or copy the checkpoint again from the one that was trained") -> None:
        found.append(Finding("error", what, mend))

    def serving(what: str, mend: str = "python export.py validate --fix writes it") -> None:
        found.append(Finding("serving", what, mend))

    try:
        values, raw, name = read_values(folder)
        kind = draft_kind(name)
        config = kind.config_class(**fields_of(values, kind.config_class))
    except (ValueError, TypeError) as problem:
        error(str(problem), "correct config.json by the recipe that trained the draft")
        return found
    layout = LAYOUTS[name]
    for problem in config.problems():
        error(problem, "correct config.json by the recipe that trained the draft")

    # The tensors: each one there, of its shape, finite.
    tensors = {}
    try:
        tensors = load_draft_tensors(folder)
        tensors, _ = full_vocabulary(tensors, config.vocab_size)
        with torch.device("meta"):
            own = kind(config).state_dict()
        table_shape = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        own |= {key: table_shape for key in FROZEN if key in tensors}
        for problem in tensor_problems(own, tensors):
            error(problem)
    except (OSError, ValueError, RuntimeError, ZeroDivisionError) as problem:
        error(str(problem))
    for key, tensor in tensors.items():
        if bad := int((~torch.isfinite(tensor)).sum()):
            error(f"{key} ({tensor.dtype}) holds {bad} values that are inf or NaN", "export again in another dtype")
    if FROZEN[1] in tensors and FROZEN[0] not in tensors:
        error("lm_head.weight without embed_tokens.weight", "leave both out, or add both")

    # Numbers that are written more than once.
    if (tokens := values.get("speculative_tokens")) not in (None, speculative_tokens(values)):
        error(f"speculative_tokens is {tokens}, block_size {config.block_size} makes {speculative_tokens(values)}")
    witnesses = {}
    for path in sorted(folder.glob("*.safetensors")) if tensors else ():
        with safe_open(path, "pt") as file:
            trained = json.loads((file.metadata() or {}).get("trained", "{}"))
        if trained not in witnesses.values():    # shards say the same
            witnesses[path.name] = trained
    if (folder / "recipe.json").is_file():       # knows what the others do
        from recipe import load_recipe
        ours = as_json(kind.config_class.from_recipe(load_recipe(folder / "recipe.json")))
        witnesses = {"recipe.json": {k: v for k, v in ours.items() if k != "layer_types"}}
    has = as_json(config)
    for file, trained in witnesses.items():
        for key, value in trained.items():
            if has[key] != value:
                error(f"{key} is {has[key]}, {file} says it was trained with {value}")

    # What an engine would guess.
    wanted = write_values(values, name)
    for key in ("rope_theta", "sample_from_anchor", "markov_head_type", "num_target_layers", "is_causal"):
        if key == "markov_head_type" and not config.markov_rank or key == "is_causal" and not config.sliding_window:
            continue
        where = layout.keys.get(key, (key,))
        if empty := [place for place in where[:2 if key == "rope_theta" else 1] if look(raw, place) is None]:
            can = any(look(wanted, place) is not None for place in empty)
            serving(f"{key} is absent from {', '.join(empty)}: engines take their own default",
                    *(() if can else ("name the target: validate --fix --target T",)))
    if config.eos_token_id and not all(0 <= i < config.vocab_size for i in config.eos_token_id):
        error(f"eos_token_id {list(config.eos_token_id)} reaches outside the vocabulary of {config.vocab_size}")
    if config.mask_token_id in config.eos_token_id:
        error(f"mask_token_id {config.mask_token_id} is a stop id", "train with a mask id that nothing produces")
    return found + (against_target(config, tensors, folder, Path(target)) if target else [])


def as_json(config: DSparkConfig) -> dict:
    """Its fields with lists for tuples, as files have them."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def against_target(config: DSparkConfig, tensors: dict[str, Tensor], folder: Path, target: Path) -> list[Finding]:
    """Findings about a pair of draft and target."""
    theirs, found = text_config(target), []
    for ours, key in (("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"),
                      ("num_target_layers", "num_hidden_layers")):
        have = getattr(config, ours) or theirs[key]          # num_target_layers may be unknown
        if have != theirs[key]:
            found.append(Finding("error", f"{ours} is {have}, {target} has {theirs[key]}", OTHER_TARGET))
    if (highest := max(config.target_layer_ids)) > (last := theirs["num_hidden_layers"] - 1) - 1:
        found.append(Finding("error", f"target_layer_ids reach {highest}, the target ends at {last}", OTHER_TARGET))
    for name, tensor in target_tables(target, folder).items() if FROZEN[0] in tensors else ():
        if name in tensors and not torch.equal(tensor.to(tensors[name].dtype), tensors[name]):
            found.append(Finding("error", f"{name} is not the one of {target}", OTHER_TARGET))
    if (longest := theirs.get("max_position_embeddings", 0)) > (own := config.max_position_embeddings):
        found.append(Finding("serving", f"max_position_embeddings is {own}, the target's {longest}: positions past "
                             f"{own} were never trained", f"serve with a length of at most {own}"))
    path = target / "generation_config.json"
    stops = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    stops = {stops} if isinstance(stops, int) else set(stops or ())
    if stops and config.eos_token_id and stops != set(config.eos_token_id):
        found.append(Finding("serving", f"stop ids are {sorted(config.eos_token_id)}, the target's {sorted(stops)}",
                             "engines stop at the target's: evaluate with those"))
    return found


def text_config(target: str | Path) -> dict:
    """config.json of a target, or the part about its text model."""
    if not (Path(target) / "config.json").is_file():
        raise ValueError(f"{target} has no config.json; name the target's folder (python targets.py prints it)")
    whole = json.loads((Path(target) / "config.json").read_text())
    return whole.get("text_config", whole)


def fix(folder: str | Path, target: str | Path | None = None) -> None:
    """Write what config.json leaves for engines to guess; what it says stays."""
    values, raw, name = read_values(folder)
    if target and not values.get("num_target_layers"):
        values["num_target_layers"] = text_config(target)["num_hidden_layers"]
    if values.get("markov_rank"):
        values.setdefault("markov_head_type", "vanilla")
    write_json(Path(folder) / "config.json", raw | write_values(values, name))


def validate(folder: str | Path, target: str | Path | None = None) -> list[Finding]:
    """Print the findings about a checkpoint, if there are any, and return them."""
    found = findings(folder, target)
    if found:
        print(f"{folder}:\n{table(found)}", file=sys.stderr, flush=True)
    return found


def refuse_errors(folder: str | Path, target: str | Path | None = None, quiet: bool = False) -> None:
    """`validate` at the end of training and before an evaluation: SystemExit when a finding is an error."""
    if any(f.level == "error" for f in (findings if quiet else validate)(folder, target)):
        raise SystemExit(1)


def table(found: list[Finding]) -> str:
    return "\n".join(f"{f.level:8} {f.what}\n{'mend:':>8} {f.mend}" for f in found)


def main() -> None:
    from targets import plain_errors
    checking = sys.argv[1:2] == ["validate"]
    parser = argparse.ArgumentParser(description="Convert a draft checkpoint, or: export.py validate DIR.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--target", type=Path, help="folder of the target")
    if checking:
        parser.add_argument("--fix", action="store_true", help="write into config.json what engines would guess")
    else:
        parser.add_argument("--to", choices=LAYOUTS, required=True)
        parser.add_argument("--from", dest="source", choices=LAYOUTS, help="default: whatever it is")
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it is")
        parser.add_argument("--head", choices=("include", "share"), help="the target's embedding and head")
        parser.add_argument("--keep-sliding-window", action="store_true", help="speculators to zlab: keep windows")
        parser.add_argument("--link-weights", action="store_true", help="speculators to zlab: link instead of copy")
    options = parser.parse_args(sys.argv[1 + checking:])
    folder = options.checkpoint if checking else options.out
    with plain_errors(ValueError):
        if checking:
            if options.fix:
                fix(folder, options.target)
        elif options.to == "zlab":
            if not options.target:
                raise ValueError("--to zlab needs --target: the target's depth and special tokens go into the config")
            print(from_speculators(options.checkpoint, folder, options.target, options.keep_sliding_window,
                                   options.link_weights))
            raise SystemExit(0)
        else:
            dtype = getattr(torch, options.dtype) if options.dtype else None
            print(convert(options.checkpoint, folder, options.to, source=options.source, target=options.target,
                          dtype=dtype, head=options.head))
            config = DSparkConfig.from_pretrained(folder)
            if options.to != "deepspec" and not config.markov_rank:
                print("note: vLLM 0.32 and SGLang 0.5.23 need a DSpark draft with a Markov head", file=sys.stderr)
            elif options.to in ("vllm", "speculators") and config.markov_head_type != "vanilla":
                print("note: vLLM 0.32 implements the vanilla Markov head only", file=sys.stderr)
        levels = {f.level for f in validate(folder, options.target)}
    if checking and not levels:
        print(f"{folder} is whole")
    raise SystemExit(1 if "error" in levels else 3 if levels else 0)


if __name__ == "__main__":
    main()
