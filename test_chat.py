"""Chat formats at token level: every family against literals written by hand, and against a slow oracle.

The tokenizer in testdata/chat is a small byte-level BPE with the special tokens of all families; it merges newlines, as
the large ones do. The templates beside it follow the published formats. In the literals [[ ]] stands around every
supervised token. Read next: chat.py.
"""
import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from chat import FAMILIES, encode, encode_prompt, inlined, render_spans
from data_glm import encode as stable_name

FOLDER = Path(__file__).parent / "testdata" / "chat"


def family_tokenizer(family):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = (FOLDER / f"{family.removesuffix('-thinking')}.jinja").read_text()
    return tokenizer


TOKENIZERS = {family: family_tokenizer(family) for family in FAMILIES}


def talk(*turns, **fields):
    """("user", "Hi"), ... as messages; `fields` go onto the last one."""
    rows = [{"role": role, "content": content} for role, content in turns]
    rows[-1] |= fields
    return rows


def typed(*texts):
    """An assistant message of thinking and text parts in turn."""
    return "assistant", [{"type": kind, kind: text} for kind, text in zip(itertools.cycle(["thinking", "text"]), texts,
                                                                         strict=False)]


def marked(messages, family, tools=None):
    """The text with [[ ]] around every run of supervised tokens, made of the single tokens' bytes."""
    tokenizer = TOKENIZERS[family]
    ids, mask = encode(messages, tokenizer, family, tools=tools)
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    texts = [(on, tokenizer.decode([i for i, _ in run])) for on, run in runs]
    return "".join(f"[[{text}]]" if on else text for on, text in texts)


SYSTEM, HI, HELLO, MORE = ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "More?")
THOUGHT = ("assistant", "<think>hm, 2</think>Two.")
GLM = "[gMASK]<sop><|system|>Reasoning Effort: Max"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS_JSON = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'

LITERALS = {
    # GLM-5.2, thinking on: reasoning, </think> and answer of the turns after the last user message; else the answer.
    "glm one turn": ("glm-5.2", talk(HI, THOUGHT),
                     GLM + "<|user|>Hi<|assistant|><think>[[hm, 2</think>Two.]]"),
    "glm without the opening tag, as a server answers": (
        "glm-5.2", talk(HI, ("assistant", "hm, 2</think>Two.")),
        GLM + "<|user|>Hi<|assistant|><think>[[hm, 2</think>Two.]]"),
    "glm reasoning in a field": (
        "glm-5.2", talk(HI, ("assistant", "Two."), reasoning_content="hm, 2"),
        GLM + "<|user|>Hi<|assistant|><think>[[hm, 2</think>Two.]]"),
    "glm history, system": (
        "glm-5.2", talk(SYSTEM, HI, THOUGHT, MORE, ("assistant", "<think>again\n</think>\nThree.")),
        GLM + "<|system|>Be brief.<|user|>Hi<|assistant|><think></think>[[Two.]]<|user|>More?<|assistant|><think>"
        "[[again\n</think>\nThree.]]"),
    "glm no reasoning": ("glm-5.2", talk(HI, HELLO, MORE, ("assistant", "Bye.")),
                         GLM + "<|user|>Hi<|assistant|><think></think>[[Hello.]]<|user|>More?<|assistant|><think>"
                         "</think>[[Bye.]]"),
    "glm empty block": ("glm-5.2", talk(HI, ("assistant", "<think></think>Two.")),
                        GLM + "<|user|>Hi<|assistant|><think></think>[[Two.]]"),
    "glm several closes": (
        "glm-5.2", talk(HI, ("assistant", "<think>a</think>b</think>c")),
        GLM + "<|user|>Hi<|assistant|><think>[[a</think>b</think>c]]"),
    "glm several closes in the history": (
        "glm-5.2", talk(HI, ("assistant", "a</think>b</think>c"), MORE, THOUGHT),
        GLM + "<|user|>Hi<|assistant|><think></think>[[c]]<|user|>More?<|assistant|><think>[[hm, 2</think>Two.]]"),
    "glm truncated": ("glm-5.2", talk(HI, ("assistant", "<think>hm, 2")),
                      GLM + "<|user|>Hi<|assistant|><think>[[hm, 2]]"),
    "glm truncated, the reason says so": (
        "glm-5.2", talk(HI, ("assistant", "hm, 2"), finish_reason="length"),
        GLM + "<|user|>Hi<|assistant|><think>[[hm, 2]]"),
    "glm truncated in a field": (
        "glm-5.2", talk(HI, ("assistant", None), reasoning_content="hm", finish_reason="length"),
        GLM + "<|user|>Hi<|assistant|><think>[[hm]]"),
    "glm truncated in the history": (
        "glm-5.2", talk(HI, ("assistant", "<think>hm, 2"), MORE, THOUGHT),
        GLM + "<|user|>Hi<|assistant|><think></think><|user|>More?<|assistant|><think>[[hm, 2</think>Two.]]"),
    "glm empty answer": ("glm-5.2", talk(HI, ("assistant", "<think>hm</think>")),
                         GLM + "<|user|>Hi<|assistant|><think>[[hm</think>]]"),
    "glm unicode": ("glm-5.2", talk(("user", "naïve 🙂?"), ("assistant", "<think>日本\n\n</think>\n\n🙂 é")),
                    GLM + "<|user|>naïve 🙂?<|assistant|><think>[[日本\n\n</think>\n\n🙂 é]]"),
    "glm tools": (
        "glm-5.2", talk(HI, ("assistant", "<think>look</think>Wait.")) + [
            {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "<think>so</think>Sun."}],
        GLM + "<|user|>Hi<|assistant|><think>[[look</think>Wait.]]<|observation|><tool_response>sunny</tool_response>"
        "<|assistant|><think>[[so</think>Sun.]]"),
    "glm tool calls": (
        "glm-5.2", talk(HI, ("assistant", "<think>look</think>"), tool_calls=[CALL]) + [
            {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sun."}],
        GLM + "<|system|>Tools:\n" + TOOLS_JSON + "<|user|>Hi<|assistant|><think>[[look</think><tool_call>weather\n"
        '{"city": "Rome"}</tool_call>]]<|observation|><tool_response>sunny</tool_response><|assistant|><think></think>'
        "[[Sun.]]"),
    "glm names of tokens in the text": (
        "glm-5.2", talk(("user", "say <|assistant|><think>no</think>x"), THOUGHT),
        GLM + "<|user|>say <|assistant|><think>no</think>x<|assistant|><think>[[hm, 2</think>Two.]]"),
    "glm the same question twice": (
        "glm-5.2", talk(HI, THOUGHT, HI, THOUGHT),
        GLM + "<|user|>Hi<|assistant|><think></think>[[Two.]]<|user|>Hi<|assistant|><think>[[hm, 2</think>Two.]]"),

    # Qwen3: the newline after <|im_end|> is supervised, as DeepSpec does.
    "qwen3 off": (
        "qwen3", talk(SYSTEM, HI, HELLO, MORE, ("assistant", "Bye.")),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello."
        "<|im_end|>\n]]<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[Bye."
        "<|im_end|>\n]]"),
    "qwen3 off, empty answer": (
        "qwen3", talk(HI, ("assistant", "")),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[<|im_end|>\n]]"),
    "qwen3 off, truncated": (
        "qwen3", talk(HI, HELLO, finish_reason="length"),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[Hello.]]"),
    "qwen3 on": (
        "qwen3-thinking", talk(HI, ("assistant", "<think>\na\n</think>\n\nb"), MORE,
                               ("assistant", "<think>\nhm, 2\n</think>\n\nTwo.")),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>\n]]<|im_start|>user\nMore?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nhm, 2\n</think>\n\nTwo.<|im_end|>\n]]"),
    "qwen3 on, reasoning in a field": (
        "qwen3-thinking", talk(HI, ("assistant", "Two."), reasoning_content="hm, 2"),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[<think>\nhm, 2\n</think>\n\nTwo.<|im_end|>\n]]"),
    "qwen3 on, no reasoning": (
        "qwen3-thinking", talk(HI, HELLO),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[Hello.<|im_end|>\n]]"),
    "qwen3 on, truncated": (
        "qwen3-thinking", talk(HI, ("assistant", "<think>\nhm"), finish_reason="length"),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[<think>\nhm]]"),
    "qwen3 on, several closes": (
        "qwen3-thinking", talk(HI, ("assistant", "<think>\na\n</think>\n\nb</think>c")),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[<think>\na\n</think>\n\nb</think>c<|im_end|>\n]]"),
    "qwen3 tool calls": (
        "qwen3", talk(HI, ("assistant", ""), tool_calls=[CALL]) + [
            {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sun."}], None),

    # SmolLM2 and its like: <|im_end|> alone.
    "chatml": ("chatml", talk(SYSTEM, HI, HELLO, MORE, ("assistant", "\n\nBye.\n")),
               "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
               "<|im_start|>assistant\n[[Hello.<|im_end|>]]\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n\n[[\nBye.\n<|im_end|>]]\n"),
    "chatml truncated": ("chatml", talk(HI, HELLO, finish_reason="length"),
                         "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello.]]"),
    "chatml names of tokens in the text": (
        "chatml", talk(("user", "<|im_start|>assistant\nno<|im_end|>"), ("assistant", "I see.")),
        "<|im_start|>user\n<|im_start|>assistant\nno<|im_end|><|im_end|>\n<|im_start|>assistant\n[[I see."
        "<|im_end|>]]\n"),

    # Gemma: the system message joins the first user turn, contents are trimmed, the prefix is not supervised.
    "gemma": ("gemma", talk(SYSTEM, HI, ("assistant", " Hello.\n"), MORE, ("assistant", "é 🙂")),
              "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n[[Hello.<end_of_turn>]]\n"
              "<start_of_turn>user\nMore?<end_of_turn>\n<start_of_turn>model\n[[é 🙂<end_of_turn>]]\n"),
    "gemma empty answer": ("gemma", talk(HI, ("assistant", "")),
                           "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[[<end_of_turn>]]\n"),

    # Inkling: one message is a sequence of typed parts; the target writes the types, the parts and the end.
    "inkling": (
        "inkling", talk(SYSTEM, HI, typed("a", "b"),
                        MORE, typed("hm", "One.", "no", "Two.")),
        "<|start|>system<|text|>Be brief.<|end|><|start|>user<|text|>Hi<|end|><|start|>assistant[[<|thinking|>a"
        "<|text|>b<|end|>]]<|start|>user<|text|>More?<|end|><|start|>assistant[[<|thinking|>hm<|text|>One."
        "<|thinking|>no<|text|>Two.<|end|>]]"),
    "inkling from a text and a field": (
        "inkling", talk(HI, ("assistant", "Two."), reasoning_content="hm"),
        "<|start|>user<|text|>Hi<|end|><|start|>assistant[[<|thinking|>hm<|text|>Two.<|end|>]]"),
    "inkling truncated": (
        "inkling", talk(HI, ("assistant", None), reasoning_content="hm", finish_reason="length"),
        "<|start|>user<|text|>Hi<|end|><|start|>assistant[[<|thinking|>hm]]"),

    # Plain ones.
    "llama3": ("llama3", talk(SYSTEM, HI, HELLO),
               "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
               "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]"),
    "mistral": ("mistral", talk(HI, HELLO, MORE, ("assistant", "Bye.")),
                "<s>[INST] Hi [/INST][[ Hello.</s>]][INST] More? [/INST][[ Bye.</s>]]"),
}
LITERALS["qwen3 tool calls"] = ("qwen3", LITERALS["qwen3 tool calls"][1], (
    "<|im_start|>system\n# Tools\n" + TOOLS_JSON + "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    '[[<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n]]<|im_start|>user\n'
    "<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[Sun."
    "<|im_end|>\n]]"))


@pytest.mark.parametrize("name", LITERALS)
def test_literal(name):
    family, messages, expected = LITERALS[name]
    tools = [WEATHER] if any("tool_calls" in m for m in messages) else None
    assert marked(messages, family, tools) == expected


# ---- the slow oracle -----------------------------------------------------------------------------------------------

# GPT-2's visible characters back to bytes; a token's own bytes, whatever it merges with.
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [i for i in range(256) if i not in SHOWN]
BYTES = {chr(i): i for i in SHOWN} | {chr(256 + n): i for n, i in enumerate(HIDDEN)}


def token_bytes(tokenizer, token):
    text = tokenizer.convert_ids_to_tokens(token)
    return text.encode() if token in tokenizer.added_tokens_decoder else bytes(BYTES[c] for c in text)


def oracle(messages, tokenizer, family):
    """Every token decoded on its own: supervised when each of its bytes lies in a generated span."""
    text, spans = render_spans(messages, tokenizer, family)
    generated = bytearray(len(text.encode()))
    for start, end in spans:
        first, last = (len(text[:n].encode()) for n in (start, end))
        generated[first:last] = b"\1" * (last - first)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    mask, place = [], 0
    for token in ids:
        length = len(token_bytes(tokenizer, token))
        mask.append(int(all(generated[place:place + length])))
        place += length
    assert place == len(generated)
    return ids, mask


PIECES = ["Hello", " world", "\n", "\n\n", " ", "é", "日本", "🙂", "a</b>", "1,234", "assistant", "user", "<|im_end|>",
          "<|assistant|>", "<think>", "</think>", "[[", "x\r\n", "\t"]


def random_talk(rng, family):
    """Turns of random pieces; some answers have reasoning, several closes, or nothing."""
    def text():
        return "".join(rng.choices(PIECES, k=rng.randint(0, 6)))
    rows = [{"role": "system", "content": text()}] if rng.random() < 0.3 and family != "mistral" else []
    for _ in range(rng.randint(1, 3)):
        rows += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        if rng.random() < 0.5 and FAMILIES[family].get("thinking") == "on":
            rows[-1]["reasoning_content"] = text()
    if rng.random() < 0.2:
        rows[-1]["finish_reason"] = "length"
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_mask_equals_the_slow_oracle(family):
    rng, tokenizer, refused = random.Random(family), TOKENIZERS[family], 0
    for _ in range(150):
        rows = random_talk(rng, family)
        try:
            found = encode(rows, tokenizer, family)
        except ValueError:                       # Qwen3 with thinking off and a reasoning: no prompt leads there
            refused += 1
            continue
        assert found == oracle(rows, tokenizer, family), rows
        prompt = tokenizer(render_prompt(rows, tokenizer, family), add_special_tokens=False)["input_ids"]
        assert found[0][:len(prompt) - 1] == prompt[:-1]         # the last one may merge with the answer
    assert refused < 30 and (family == "qwen3" or not refused)


def render_prompt(rows, tokenizer, family):
    """What deployment sends for the last answer, straight from the template."""
    thinking = FAMILIES[family].get("thinking", "none")
    options = {} if thinking == "none" else {"enable_thinking": thinking == "on"}
    rule = {"think": ("<think>", "</think>"), "typed": False} | FAMILIES[family]
    before = [inlined(m, rule) for m in rows[:-1]]
    for m in before:
        content = m["content"]
        if m["role"] == "assistant" and thinking == "on" and content[:7] == "<think>" and "</think>" not in content:
            m["content"] = ""
    return tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_well_formed_answer_is_kept_whole(family):
    """Retention: the supervised text of the last turn is the answer, of each row; nothing else is in it."""
    rng, tokenizer = random.Random(family), TOKENIZERS[family]
    for n in range(100):
        words = " ".join(rng.choices(["one", "naïve", "🙂", "two\n\nlines", "x = 1;"], k=rng.randint(1, 9)))
        fields = {"reasoning_content": f"thought {n}"} if FAMILIES[family].get("thinking") == "on" and n % 2 else {}
        ids, mask = encode(talk(HI, HELLO, MORE, ("assistant", words), **fields), tokenizer, family)
        text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
        text = re.sub(r"<\|(end|thinking|text|im_end|eot_id)\|>|</?think>|</s>|<end_of_turn>", "", text)
        assert "".join(text.split()) == "".join(("Hello." + fields.get("reasoning_content", "") + words).split())


def test_prompts_are_what_deployment_sends():
    expected = {
        "glm-5.2": GLM + "<|user|>Hi<|assistant|><think>",
        "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "qwen3-thinking": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "gemma": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        "inkling": "<|start|>user<|text|>Hi<|end|><|start|>assistant",
        "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                  "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "mistral": "<s>[INST] Hi [/INST]"}
    assert set(expected) == set(FAMILIES)
    for family, text in expected.items():
        prompt = encode_prompt("Hi", TOKENIZERS[family], family)
        assert prompt.dtype == torch.long and prompt.shape[0] == 1
        assert TOKENIZERS[family].decode(prompt[0]) == text


def test_a_family_that_does_not_fit_is_refused():
    for family, other in (("chatml", "gemma"), ("gemma", "chatml"), ("qwen3", "llama3"), ("llama3", "mistral")):
        with pytest.raises(ValueError, match=f"is '{family}' this tokenizer's chat family"):
            encode(talk(HI, HELLO), TOKENIZERS[other], family)
    with pytest.raises(ValueError, match=r"starts with '<\|im_start\|>user.*expected '\[gMASK\]<sop><\|system"):
        encode(talk(HI, HELLO), TOKENIZERS["chatml"], "glm-5.2")
    with pytest.raises(ValueError, match="no chat family named 'chatlm'; there are: chatml, "):
        encode_prompt("Hi", TOKENIZERS["chatml"], "chatlm")
    with pytest.raises(ValueError, match="message 1: the template does not render"):      # reasoning, thinking off
        encode(talk(HI, THOUGHT), TOKENIZERS["qwen3"], "qwen3")
    assert stable_name is encode
