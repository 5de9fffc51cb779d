"""vLLM in this process as the rollout engine of cotrain.py: what must hold before it starts, weights in, answers out.

There is no engine class here. The engine is vLLM's own `LLM` object; the functions below either run before it exists
(`check_contract`), call it (`send`, `generate`), or run inside its worker, where its own loader puts weights in place
and its own modules are read back. Read next: cotrain.py.
"""
import contextlib
import hashlib
import importlib.util
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from layouts import FLASH2
from recipe import Cotrain
from serve_check import mend_cpu_operators

ALLOWED = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}         # architecture by the recipe's word
LOSSY = ("typical_acceptance_sampler", "rejection_sample_method", "posterior_threshold", "posterior_alpha")
BORROWED = ("embed_tokens.", "mask_embedding")   # in an engine's draft: the target's, and what drafts of ours lack
BUCKET = 256 << 20                               # bytes of weights per message to the engine


# ---------------------------------------------------------------------------------------------------------------------
# What must hold before an engine starts


def engine_has_dflash2() -> bool | None:
    """Whether the installed vLLM has the DFlash2 model; None without a vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    return importlib.util.find_spec("vllm.model_executor.models.qwen3_dflash2") is not None


def check_contract(c: Cotrain, folder: str | Path | None, has_dflash2: bool | None) -> dict:
    """The engine's speculative config for the drafter in `folder`, or ValueError/TypeError for what would serve badly
    in silence: every combination here was met in somebody's run."""
    r = c.recipe
    if r.draft not in ALLOWED:
        raise ValueError(f"{c.name}: draft {r.draft!r} cannot be co-trained, only dflash and dflash2")
    if c.engine != "vllm":
        raise ValueError(f"{c.name}: {r.draft} is not an engine-level speculative algorithm of {c.engine}; co-train "
                         "with engine = 'vllm'")
    if not folder:
        raise ValueError(f"{c.name}: drafter.model_path is required: name the drafter's checkpoint in the recipe "
                         "(drafter = ...), or start one with drafter = 'fresh'")
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no drafter in {folder}: train one (bash run.sh cotrain, or train.py {r.name}), or "
                                "correct `drafter` in the recipe")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the checkpoint is damaged") from error

    names = raw.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    if ALLOWED[r.draft] not in names:
        kind, hint = (("DFlash2", "; for a plain DFlash draft set draft = 'dflash'") if r.draft == "dflash2" else
                      ("DFlash", ""))
        raise ValueError(f"{folder} is no {kind} drafter checkpoint: architectures {names}, allowed "
                         f"{[ALLOWED[r.draft]]}{hint}")
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise TypeError(f"{path}: dflash_config must be a mapping, found {type(nested).__name__}")
    for key in (*FLASH2, "block_size", "mask_token_id", "target_layer_ids"):
        if None not in (raw.get(key), nested.get(key)) and raw[key] != nested[key]:
            raise ValueError(f"{path}: {key} conflicts with dflash_config.{key}: {raw[key]} and {nested[key]}")
    config = {key: value for part in (nested, raw) for key, value in part.items() if value is not None}
    if r.draft == "dflash2" and (missing := [key for key in FLASH2 if config.get(key) is None]):
        raise ValueError(f"{path}: missing {missing}, which the engine reads")
    ids, aux = config.get("target_layer_ids"), config.get("eagle_aux_hidden_state_layer_ids")
    if None not in (ids, aux) and aux != [i + 1 for i in ids]:
        raise ValueError(f"{path}: eagle_aux_hidden_state_layer_ids {aux} are not target_layer_ids {ids} plus one")
    for key in ("vocab_size", "hidden_size", "num_target_layers", "target_layer_ids"):
        ours = list(r.target_layer_ids) if key == "target_layer_ids" else getattr(r, key)
        if config.get(key, ours) != ours:
            raise ValueError(f"{folder} belongs to another target: {key} is {config[key]}, recipe {r.name} has {ours}")
    if config.get("draft_vocab_size", r.vocab_size) != r.vocab_size:
        raise ValueError(f"{path}: draft_vocab_size {config['draft_vocab_size']} of {r.vocab_size}: training needs the "
                         "full vocabulary (loss mode full_vocab)")

    block = config.get("block_size", r.block_size)
    if block != r.block_size:
        raise ValueError(f"{folder} was trained with block_size={block}, recipe {r.name} says {r.block_size}: labels "
                         "and convolutions would not be those of its training; correct the recipe")
    tokens = block - 1 if c.spec_verify_tokens is None else c.spec_verify_tokens
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"{c.name}: spec_verify_tokens must be a positive int, got {tokens!r}")
    if r.draft == "dflash2" and has_dflash2 is False:
        raise ValueError("the installed vLLM has no DFlash2 model; it came with vLLM 0.28.0: upgrade, or train offline")
    if tokens + 1 != block:
        raise ValueError(f"{c.name}: spec_verify_tokens={tokens} but block_size={block}: the engine sizes a block as 1 "
                         f"+ spec_verify_tokens, so it must be {block - 1}")
    spec = {"method": "dflash", "model": str(folder), "num_speculative_tokens": tokens,
            "draft_sample_method": "greedy"} | c.speculative_args
    if spec["num_speculative_tokens"] != tokens:
        raise ValueError(f"{c.name}: speculative_args say num_speculative_tokens={spec['num_speculative_tokens']}, but "
                         f"block_size={block} needs {tokens}; leave it out")
    lossy = [key for key in LOSSY if spec.get(key) not in (None, False, 0, "standard", "strict")]
    if lossy and not c.allow_lossy:
        raise ValueError(f"speculative_args {lossy} make verification lossy: rollouts would not be the target's own, "
                         "and another policy would be trained; remove them, or set allow_lossy = True in the recipe")
    return spec


# ---------------------------------------------------------------------------------------------------------------------
# The engine's side: functions that run in its worker. Its own loader puts weights in place, its own modules are read


@contextlib.contextmanager
def ipc_safe_allocator(ipc: bool):
    """CUDA memory shared with another process must not lie in expandable segments: the receiver would need the system
    call pidfd_getfd, which kernels before 5.6 lack, and every publish would fail. So they are off around the send.

    torch has a setter and no getter: they are on again afterwards only where the launcher's setting says so, because
    forcing them on changes runs that never had them. Shared memory of the CPU is not concerned.
    """
    switch = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if not ipc or switch is None:
        yield
        return
    launched = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    switch("expandable_segments:False")
    try:
        yield
    finally:
        if "expandable_segments:True" in launched:
            switch("expandable_segments:True")


def send(llm, kind: str, tensors: dict[str, Tensor], version: int = 0, ipc: bool = False) -> None:
    """Bring weights into the engine, in buckets, then install them at once. kind: "target" or "draft", which has a
    version.

    Nothing changes before the last bucket has arrived. ipc: the engine's workers are other processes on the same GPUs,
    and a bucket travels as handles of this process's memory.
    """
    from torch.multiprocessing.reductions import reduce_tensor
    buckets, size = [{}], 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > BUCKET and buckets[-1]:
            buckets, size = [*buckets, {}], 0
        buckets[-1][name], size = tensor.detach(), size + tensor.nbytes
    with ipc_safe_allocator(ipc):
        for i, bucket in enumerate(buckets):
            message = {name: reduce_tensor(t.contiguous()) for name, t in bucket.items()} if ipc else bucket
            llm.collective_rpc(receive, args=(message, i == 0, ipc))
    llm.collective_rpc(install, args=(kind, version))
    if kind == "target":
        llm.reset_prefix_cache()                 # cached keys and values are those of the old weights


def receive(worker, bucket: dict, first: bool, ipc: bool) -> None:
    if first:
        worker.inbox = {}
    worker.inbox |= {name: t[0](*t[1]).clone() for name, t in bucket.items()} if ipc else bucket


def install(worker, kind: str, version: int) -> None:
    """Load the inbox in place. A draft that does not load whole leaves the one before it, whole; RuntimeError says why.
    """
    from vllm.config import set_current_vllm_config
    inbox, worker.inbox = worker.inbox, {}
    with set_current_vllm_config(worker.vllm_config):
        if kind == "target":
            return worker.reload_weights(weights_iterator=iter(inbox.items()), is_checkpoint_format=True)
        before = read_draft_module(worker)
        wrong = sorted(set(before) ^ set(inbox)) or [n for n in before if before[n].shape != inbox[n].shape]
        if wrong:
            raise RuntimeError(f"draft version {version} does not fit the engine's draft: {wrong[:6]}")
        restore = remember(worker.get_draft_model())
        try:
            load_draft_module(worker, inbox)
        except BaseException as error:
            restore()
            if not isinstance(error, Exception):
                raise                            # Ctrl-C
            raise RuntimeError(f"draft version {version} could not be loaded ({error}); the one before serves on"
                               ) from error
    worker.draft_version = version


def remember(draft):
    """A function that makes the engine's draft again what it is now. Loading it once more would not: a load that broke
    off leaves layers on the meta device or with tensors of another shape, and its remains in the loader's books."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    registered = ("_parameters", "_buffers", "_non_persistent_buffers_set")
    modules = {m: m.__dict__ | {key: m.__dict__[key].copy() for key in registered} for m in draft.modules()}
    values = {p: p.data.to("cpu", copy=True)
              for name, p in draft.model.named_parameters() if not name.startswith(BORROWED)}

    def restore() -> None:
        for m, attributes in modules.items():
            m.__dict__.clear()
            m.__dict__.update(attributes)        # packed weights and fused buffers of a CPU engine among them
            get_layerwise_info(m).reset()
        for p, data in values.items():
            p.data.copy_(data)
    return restore


def load_draft_module(worker, tensors: dict[str, Tensor]) -> None:
    """The engine's draft loads its weights again: in place, kernels' packed copies and fused context buffers as well.
    """
    from vllm.model_executor.model_loader.reload import layerwise
    draft = worker.get_draft_model()
    layerwise.initialize_layerwise_reload(draft)
    draft.load_weights(iter(tensors.items()))
    layerwise.finalize_layerwise_reload(draft, worker.vllm_config.model_config)
    # The fused buffers are snapshots of the layers' key and value projections, made from weights that a CPU engine has
    # packed and dropped by now: they come back for the moment in which the engine builds its buffers anew.
    projections = [layer.self_attn.qkv_proj for layer in draft.model.layers]
    dropped = [p.weight.data for p in projections]
    try:
        for p in projections:
            p.weight.data = weight_of(p)
        draft.model._build_fused_kv_buffers()
    finally:
        for p, data in zip(projections, dropped, strict=True):
            p.weight.data = data


@torch.inference_mode()
def weight_of(linear) -> Tensor:
    """[out, in] of an engine's linear layer. Where the weight was packed and dropped, what the layer makes of the
    identity is its weight to the bit: every sum has one term."""
    if linear.weight.numel():
        return linear.weight.data.clone()
    identity = torch.eye(linear.input_size, dtype=linear.weight.dtype, device=linear.weight.device)
    out = linear(identity)
    return (out[0] if isinstance(out, tuple) else out).T.contiguous()


def read_draft_module(worker) -> dict[str, Tensor]:
    """What the engine's draft holds, under our names: fused projections cut up, embedding and head left out."""
    inner, tensors = worker.get_draft_model().model, {}
    for name, p in inner.named_parameters():
        if name.startswith(BORROWED):
            continue
        owner = name.rpartition(".")[0]
        module = inner.get_submodule(owner)
        weight = weight_of(module) if name.endswith(".weight") and hasattr(module, "input_size") else p.data.clone()
        if owner.endswith(".qkv_proj"):
            a = inner.get_submodule(owner.removesuffix(".qkv_proj"))
            parts = zip("qkv", weight.split([a.q_size, a.kv_size, a.kv_size]), strict=True)
            tensors |= {name.replace("qkv_proj", f"{x}_proj"): part.cpu() for x, part in parts}
        elif owner.endswith(".gate_up_proj"):
            parts = zip(("gate", "up"), weight.chunk(2), strict=True)
            tensors |= {name.replace("gate_up", x): part.cpu() for x, part in parts}
        else:
            tensors[name] = weight.cpu()
    return tensors


def serving_state(worker) -> dict:
    """Version and hash of the draft that this worker serves."""
    return {"draft": getattr(worker, "draft_version", 0), "hash": tensor_hash(read_draft_module(worker))}


def serves(llm, tensors: dict[str, Tensor]) -> bool:
    """Whether the engine's own draft module, read back, holds these tensors, rounded to the engine's dtype."""
    held = llm.collective_rpc(read_draft_module)[0]
    return held.keys() == tensors.keys() and all(torch.equal(h, tensors[n].cpu().to(h.dtype)) for n, h in held.items())


def tensor_hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def start_engine(c: Cotrain, target: Path, spec: dict):
    """vLLM in this process, with the drafter attached."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    cpu = {} if torch.cuda.is_available() else {"dtype": "float32", "enforce_eager": True,
                                                "kv_cache_memory_bytes": 256 << 20}
    if cpu:
        mend_cpu_operators()
    return LLM(model=str(target), skip_tokenizer_init=True, max_model_len=c.max_model_len, seed=c.seed,
               max_num_seqs=c.prompts * c.group, enable_prefix_caching=False, disable_log_stats=False,
               distributed_executor_backend="uni", speculative_config=spec, **cpu | c.engine_args)


def generate(llm, prompts: list[list[int]], c: Cotrain, step: int) -> tuple[list[list[int]], float | None]:
    """`group` answers to every prompt, and the mean accept length by the engine's own counters (None: no drafts)."""
    from vllm import SamplingParams

    def counters() -> tuple[int, int]:
        found = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num_")
                 and hasattr(m, "value")}
        return found.get("vllm:spec_decode_num_drafts", 0), found.get("vllm:spec_decode_num_accepted_tokens", 0)

    params = [SamplingParams(temperature=c.temperature, max_tokens=c.max_new_tokens, detokenize=False,
                             stop_token_ids=list(c.recipe.stop_token_ids), seed=(c.seed << 32) + (step << 16) + i)
              for i in range(len(prompts) * c.group)]
    before = counters()
    requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(c.group)]
    outputs = llm.generate(requests, params, use_tqdm=False)
    drafts, accepted = (b - a for a, b in zip(before, counters(), strict=True))
    return [list(o.outputs[0].token_ids) for o in outputs], 1 + accepted / drafts if drafts else None
