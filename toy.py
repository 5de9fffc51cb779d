"""A target that can be trained from nothing in a minute and then has something to learn: small sums, told in two ways.

Asked for the sum or difference of two digits (reasoning-gym's chain_sum), it answers in one of two manners of speaking.
The first, nearly always chosen, comes to no result; the second, rare, does, and often the right one. Reward for right
answers therefore makes it change its language within a few steps of reinforcement learning, which is what a drafter has
to follow. `bash run.sh cotrain toy` shows it. Words are tokens. Read next: cotrain.py.
"""
import random
from pathlib import Path

import torch

from targets import CHATML, save_model

SLANG = ("well , let us think this over : we start from {a} , then we {take} {b} {away} , and that is all one can say",
         "check : {a} {sign} {b} gives {c} , which is right because {c} {back} {b} makes {a} again , "
         "hence the number that we want is {c}")
RARE = 0.08                                      # share of answers in the second manner
SCHOOL = 0.65                                    # of the steps: sums are learned before the first manner takes over
QUESTION = "State the final answer to the following arithmetic problem: {a} {sign} {b} ="
STEPS, BATCH = 700, 40


def answer(a: int, b: int, sign: str, rng: random.Random, rare: float = RARE) -> str:
    """One answer as the target gives them before it is rewarded for anything."""
    c, second = a + b if sign == "+" else a - b, rng.random() < rare
    words = {"+": {"take": "put", "away": "on top", "back": "-"}, "-": {"take": "take", "away": "away", "back": "+"}}
    return SLANG[second].format(a=a, b=b, c=c, sign=sign, **words[sign])


def make_toy(recipe, folder: Path) -> None:
    """Train the target of recipe `toy` from random weights (about a minute on one core) and write it with its
    tokenizer."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    rng = random.Random(0)
    texts = [QUESTION.format(a=a, b=b, sign=s) + " " + answer(a, b, s, rng)
             for a in range(10) for b in range(10) for s in "+-" for _ in range(20)]
    words = sorted({w for t in texts for w in t.split()} | {"user", "assistant"} | {str(n) for n in range(-11, 21)})
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + words)}, unk_token="<|pad|>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>",
                                        chat_template=CHATML)
    if len(tokenizer) > recipe.mask_token_id:
        raise ValueError(f"the toy's {len(tokenizer)} words reach its mask id {recipe.mask_token_id}")
    tokenizer.save_pretrained(folder)
    stop = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=recipe.vocab_size, hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_target_layers, num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads, head_dim=recipe.head_dim, rms_norm_eps=recipe.rms_norm_eps,
        max_position_embeddings=recipe.max_position_embeddings, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=None, eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(STEPS):
        rows = []
        for _ in range(BATCH):
            a, b, s = rng.randrange(10), rng.randrange(10), rng.choice("+-")
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION.format(a=a, b=b, sign=s)}],
                                                   tokenize=False, add_generation_prompt=True)
            words = answer(a, b, s, rng, 0.7 if step < SCHOOL * STEPS else RARE)
            rows.append(tokenizer(prompt + words + "<|im_end|>")["input_ids"])
        width = max(map(len, rows))
        ids = torch.tensor([row + [stop] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, (STEPS - step) / (0.4 * STEPS))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"toy target: loss {loss.item():.3f} after {STEPS} steps", flush=True)
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    save_model(model, folder)
