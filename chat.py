"""Chat formats: how a conversation is rendered, and which of its tokens the target generated.

A drafter learns what its target writes, in the very bytes that deployment sends. So the tokenizer's own chat template
renders the text, and `encode` marks what the target generates in it: what lies between the prompt that deployment sends
for a turn and the closing that the template adds. A family is data: a few strings that no template states. Read next:
data_glm.py, which turns corpora into tokens with it.
"""
import json
from pathlib import Path

# Of the rules below; part of the token cache's key.
MASK_VERSION = 2

# end       what closes an assistant turn and is supervised (DeepSpec: Qwen's newline too; GLM's next role token is not)
# after     what the template adds behind it, which is not
# thinking  on, off: passed to the template as enable_thinking; none: the template has no such switch
# think     what stands before and after the reasoning when it is written into one text with the answer
# empty     the template's block for "no reasoning": nobody generates it
# start     how every text begins
FAMILIES = {
    "chatml": {"end": "<|im_end|>", "after": "\n"},                                # SmolLM2 and its like
    "qwen3": {"end": "<|im_end|>\n", "thinking": "off", "think": ("<think>\n", "\n</think>\n\n")},
    "qwen3-thinking": {"end": "<|im_end|>\n", "thinking": "on", "think": ("<think>\n", "\n</think>\n\n"),
                       "empty": "<think>\n\n</think>\n\n"},
    "glm-5.2": {"start": "[gMASK]<sop><|system|>Reasoning Effort: Max", "thinking": "on", "empty": "</think>"},
    "gemma": {"end": "<end_of_turn>", "after": "\n"},
    "inkling": {"end": "<|end|>", "thinking": "on", "typed": True},                # contents are lists of typed parts
    "llama3": {"end": "<|eot_id|>"},
    "mistral": {"end": "</s>"},
}
OPEN, CLOSE = "<think>", "</think>"


def family_rule(family: str) -> dict:
    """The family's strings, the default where it states none; ValueError for a name that is not there."""
    if family not in FAMILIES:
        raise ValueError(f"no chat family named {family!r}; there are: {', '.join(FAMILIES)}")
    return {"start": "", "end": "", "after": "", "thinking": "none", "think": (OPEN, CLOSE), "empty": "",
            "typed": False} | FAMILIES[family]


def render(messages: list[dict], tokenizer, family: str, generation_prompt: bool = False,
           tools: list | None = None) -> str:
    """The conversation as the target's own chat template writes it; messages as `inlined` leaves them."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; put a chat_template.jinja "
                         "into its folder")
    thinking = family_rule(family)["thinking"]
    options = {} if thinking == "none" else {"enable_thinking": thinking == "on"}
    if tools:
        options["tools"] = tools
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt, **options)


def inlined(message: dict, rule: dict) -> dict:
    """The message with its reasoning in its content, in the family's form, whatever field or part it came in.

    A reasoning that ran out of length stays open. Families with typed contents get a list of parts, all others a text.
    """
    content, reasoning = message.get("content"), message.get("reasoning_content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    if reasoning:
        parts = [{"type": "thinking", "thinking": reasoning}, *parts]
    if rule["typed"] and message["role"] == "assistant":
        content = [p for p in parts if p[p["type"]]]
    else:
        thoughts = "".join(p["thinking"] for p in parts if p["type"] == "thinking")
        content = "".join(p["text"] for p in parts if p["type"] == "text")
        before, after = rule["think"]
        if thoughts:
            cut = not content and message.get("finish_reason") == "length"
            content = before + thoughts + ("" if cut else after) + content
    return {k: v for k, v in message.items() if k != "reasoning_content"} | {"content": content}


def squeeze(text: str) -> str:
    """The text without its white space, which templates add and take away."""
    return "".join(text.split())


def encode(messages: list[dict], tokenizer, family: str, max_length: int | None = None,
           tools: list | None = None) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and 1 for every token that the target generates.

    One tokenisation with character offsets: a token is supervised when all its characters lie in a generated span.
    ValueError when the family does not fit the template.
    """
    text, spans = render_spans(messages, tokenizer, family, tools)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, mask, waiting = encoded["input_ids"], [], list(spans)
    for start, end in encoded["offset_mapping"]:
        while waiting and waiting[0][1] <= start:
            waiting.pop(0)
        mask.append(int(bool(waiting) and waiting[0][0] <= start < end <= waiting[0][1]))
    return ids[:max_length], mask[:max_length]


def render_spans(messages: list[dict], tokenizer, family: str,
                 tools: list | None = None) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the character ranges that the target generates.

    The prompt that deployment sends for the last answer is a prefix of the text, byte for byte, or ValueError. Where a
    turn ends is found by rendering it once more with a mark for its content: what follows the mark is the closing and
    the rest of the conversation. Nothing is searched for, so contents may hold any token's name.

    The last answer stands as it was written, not as the template has it, in two cases: it ran out of length (then it
    ends the text: "finish_reason": "length", or a <think> that was never closed), or the template drops characters of
    it (many cut at the last of several </think>).
    """
    rule, closed = family_rule(family), lambda text: CLOSE in text or text[:len(OPEN)] != OPEN
    messages = [inlined(m, rule) for m in messages]
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        if m["role"] == "assistant" and i < last_user and rule["thinking"] == "on" and not closed(m["content"]):
            m["content"] = ""                    # a reasoning that never ended left no answer
    text, spans = render(messages, tokenizer, family, tools=tools), []
    if not text.startswith(rule["start"]):
        raise ValueError(f"the text starts with {text[:60]!r}, expected {rule['start']!r}; is {family!r} this "
                         "tokenizer's chat family?")
    mark = next(chr(c) for c in range(0xE000, 0xF900) if chr(c) not in text)
    closing = rule["end"] + rule["after"]
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:i], tokenizer, family, True, tools)
        stand_in = {"role": "assistant", "content": [{"type": "text", "text": mark}] if rule["typed"] else mark}
        before, _, rest = render([*messages[:i], stand_in, *messages[i + 1:]], tokenizer, family,
                                 tools=tools).partition(mark)
        start, end = len(prompt) if text.startswith(prompt) else len(before), len(text) - len(rest)
        earlier = i < len(messages) - 1 and text.startswith(before)                # of these the template says less
        if not (rest.startswith(closing) and text.endswith(rest) and (earlier or text.startswith(prompt))):
            raise ValueError(f"message {i}: the template does not render the training text as the prompt that "
                             f"deployment sends plus an answer ending in {closing!r}; is {family!r} this tokenizer's "
                             f"chat family?\nprompt {prompt[-80:]!r}\ntext   {text[max(0, len(before) - 80):][:160]!r}")
        if text.startswith(rule["empty"], start):
            start += len(rule["empty"])
        cut, content = message.get("finish_reason") == "length", message["content"]
        spans.append((start, end + (0 if cut else len(rule["end"]))))
        if i == len(messages) - 1:
            cut = cut or rule["thinking"] == "on" and not closed(content)
            opening = next((tag for tag in (rule["think"][0], OPEN) if prompt.endswith(tag)), "")
            written = content if rule["typed"] else content.removeprefix(opening)
            by_template = rule["typed"] or message.get("tool_calls")
            same = by_template or squeeze(text[start:end]) == squeeze(written.removeprefix(rule["empty"]))
            if cut and (by_template or rule["thinking"] != "on"):
                text = text[:end]
            elif cut or not same:
                text = (prompt if rule["thinking"] == "on" else before) + written + ("" if cut else closing)
                spans[-1] = (len(prompt), len(text) - (0 if cut else len(rule["after"])))
    return text, spans


def encode_prompt(text: str, tokenizer, family: str):
    """Ids [1, S] of one user message with the generation prompt, as the target is asked at deployment."""
    import torch
    prompt = render([{"role": "user", "content": text}], tokenizer, family, True)
    return torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])


def stop_token_ids(target, tokenizer, draft_config) -> list[int]:
    """What ends an answer: the target's generation config, else the tokenizer's eos, else the draft config's list.

    `target` is an object with a generation_config (capture.py, transformers models), a checkpoint folder, or None;
    `draft_config` an object or dict with stop_token_ids, or None. ValueError when nobody knows.
    """
    def listed(ids) -> list[int]:
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    if isinstance(target, str | Path):
        path = Path(target) / "generation_config.json"
        known = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    else:
        known = getattr(getattr(target, "generation_config", None), "eos_token_id", None)
    from_draft = draft_config.get("stop_token_ids") if isinstance(draft_config, dict) else getattr(
        draft_config, "stop_token_ids", None)
    found = listed(known) or listed(getattr(tokenizer, "eos_token_id", None)) or listed(from_draft)
    if not found:
        raise ValueError("no stop token: neither the target's generation_config.json, nor its tokenizer, nor the "
                         "draft's config names one; set stop_token_ids in the recipe")
    return found
