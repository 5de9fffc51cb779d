"""Conversations from anywhere into one form: read, normalise, drop doubles, sample.

A source is a file or folder of jsonl, json or parquet, or the name of a Hugging Face dataset; a row is ShareGPT
(`from`/`value`) or OpenAI (`role`/`content`). What comes out is one jsonl of {"id", "messages", "tools"}: the same rows
in the same order on every node, whatever the order of the files. Nothing is fatal and nothing is silent: each row that
is left out is counted under a reason and listed with its place in rejected.jsonl. Rows stream; what stays in memory are
some 400 bytes for each. Read next: data_glm.py.
"""
import codecs
import hashlib
import json
import mmap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from targets import download, flush

ROLES = {"user": ("user", "human", "prompter"), "assistant": ("assistant", "gpt", "model", "bot", "chatgpt"),
         "system": ("system", "developer"), "tool": ("tool", "function", "observation", "function_response", "ipython")}
ROLE = {name: role for role, names in ROLES.items() for name in names}
FOLLOWS = {"": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool"),
           "tool": ("tool", "assistant")}
KINDS = (".jsonl", ".json", ".parquet")
MAX_LINE = 64 << 20                              # bytes: a longer line is no conversation
MAX_TURN = 400_000                               # characters: some 100,000 tokens


class Rejected(ValueError):
    """A row that cannot be used; the text is its reason."""


# ---- files ---------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, lines: Iterable[str]) -> None:
    """Write a text file under a temporary name, force it to the disk, rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.writelines(lines)
    flush(partial)
    partial.rename(path)
    flush(path.parent)


def drop_torn_line(path: Path) -> None:
    """Cut an append-only file back to its last whole line: a killed process may have left half a row."""
    if path.is_file() and path.stat().st_size:
        with open(path, "rb+") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                whole = content.rfind(b"\n") + 1
            file.truncate(whole)


def read_rows(path: Path) -> Iterator[dict]:
    """Rows of a jsonl file of ours; a line that is no JSON object is an error that names it."""
    with open(path, "rb") as lines:              # bytes: a wrong encoding is then an error of its line
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line.decode())
                if not isinstance(row, dict):
                    raise ValueError("it is no object {...}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not the JSON of a row: {error}; remove or mend that line, "
                                 "then run the same command again") from error
            yield row


def source_files(source: str) -> list[Path]:
    """The files of a source: a path here, or the name of a Hugging Face data set."""
    path = Path(source) if Path(source).exists() else download(source, [f"*{kind}" for kind in KINDS], "dataset")
    files = [p for p in ([path] if path.is_file() else sorted(path.rglob("*"))) if p.suffix in KINDS and p.is_file()]
    if not files:
        raise ValueError(f"{path} holds no corpus; expected {', '.join(KINDS)}")
    return files


def records(path: Path) -> Iterator[tuple[str, object]]:
    """(place, row or Rejected) of one file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet
        try:
            rows = (row for b in pyarrow.parquet.ParquetFile(path).iter_batches(256) for row in b.to_pylist())
            yield from ((f"{path.name}:{n}", row) for n, row in enumerate(rows, 1))
        except (OSError, ValueError) as error:   # pyarrow's own errors are of these kinds
            yield path.name, Rejected(f"not a parquet file that can be read ({str(error)[:40]})")
        return
    with open(path, "rb") as file:
        first = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        file.seek(0)
        rows = json_array(file) if path.suffix == ".json" and first == b"[" else json_lines(file)
        yield from ((f"{path.name}:{n}", row) for n, row in rows)


def json_lines(file) -> Iterator[tuple[int, object]]:
    """(number, row or Rejected) of every line that is not blank."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        whole = len(line) < MAX_LINE or line.endswith(b"\n")
        while not whole and (more := file.readline(MAX_LINE)):
            whole = more.endswith(b"\n")
            line = b""
        text = line.strip()
        if not text:
            yield number, Rejected("a blank line" if line else f"a line over {MAX_LINE >> 20} MB")
            continue
        try:
            yield number, json.loads(text.decode("utf-8-sig"))
        except UnicodeDecodeError:
            yield number, Rejected("not UTF-8")
        except RecursionError:
            yield number, Rejected("nested too deep")
        except ValueError:
            yield number, Rejected("HTML, not JSON" if text.startswith(b"<") else "broken JSON")


def json_array(file) -> Iterator[tuple[int, object]]:
    """(number, row or Rejected) of a JSON file that is one list of rows, read piece by piece."""
    read = codecs.getreader("utf-8-sig")(file, errors="replace").read
    decoder, buffer, number = json.JSONDecoder(), read(1 << 20).lstrip()[1:], 0
    while not (buffer := buffer.lstrip(" \t\r\n,")).startswith("]"):
        try:
            row, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError):     # half a row: read on
            piece = read(1 << 20) if len(buffer) < MAX_LINE else ""
            if not piece:
                yield number + 1, Rejected("broken JSON: the rest of the list is not read")
                return
            buffer += piece
            continue
        number, buffer = number + 1, buffer[end:]
        yield number, row


# ---- one form ------------------------------------------------------------------------------------------------------


def parsed(value):
    """JSON texts as what they say, everything else as it is: some data sets keep tools and arguments as strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def text_of(message: dict) -> str | list:
    """The content of a message: a text, or the list of typed parts when some of it is thinking."""
    content = message.get("content", message.get("value"))
    if content is None and any(message.get(k) for k in ("tool_calls", "reasoning_content", "reasoning")):
        return ""
    if content is None:
        raise Rejected("null content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected("content that is no text")
    parts = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type") if isinstance(part, dict) else None
        kind = "thinking" if kind == "reasoning" else kind
        text = kind and part.get(kind, part.get("text"))
        if kind not in ("text", "thinking") or not isinstance(text, str):
            raise Rejected("a part of the content is no text")
        parts.append({"type": kind, kind: text})
    if any(p["type"] == "thinking" for p in parts):
        return parts
    return "".join(p["text"] for p in parts)


def normalise(row, counts: Counter) -> dict:
    """{"messages", "tools" if there are any} of a row in any known form; Rejected with the reason otherwise.

    Roles get OpenAI's names, leading assistant turns go, a conversation ends before the first message that cannot
    follow the one before it, and behind its last answer; `counts` says how often. A message keeps role, content,
    reasoning_content, tool_calls (arguments parsed) and finish_reason.
    """
    if not isinstance(row, dict):
        raise Rejected("no object")
    turns = next((row[k] for k in ("messages", "conversations", "conversation") if row.get(k) is not None), None)
    if not isinstance(turns, list):
        raise Rejected("no list of messages")
    if not turns:
        raise Rejected("no messages")
    messages, before = [], ""
    for turn in turns:
        if not isinstance(turn, dict):
            raise Rejected("a message that is no object")
        name = turn.get("role", turn.get("from"))
        role = ROLE.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            raise Rejected("a role that is not known")
        message = {"role": role, "content": text_of(turn)}
        if reasoning := turn.get("reasoning_content") or turn.get("reasoning"):
            message["reasoning_content"] = str(reasoning)
        if role != "assistant" and not isinstance(message["content"], str):
            raise Rejected("thinking outside an answer")
        if calls := parsed(turn.get("tool_calls")):
            if not isinstance(calls, list):
                raise Rejected("tool calls that are no list")
            message["tool_calls"] = [
                {k: v for k, v in call.items() if v is not None}
                | {"function": call["function"] | {"arguments": parsed(call["function"].get("arguments"))}}
                if isinstance(call, dict) and isinstance(call.get("function"), dict) else call for call in calls]
        if turn.get("finish_reason"):
            message["finish_reason"] = turn["finish_reason"]
        if sum(len(str(value)) for value in message.values()) > MAX_TURN:
            raise Rejected(f"a turn of more than {MAX_TURN} characters")
        if not messages and role == "assistant":
            counts["leading assistant turns dropped"] += 1
            continue
        if role not in FOLLOWS[before]:
            counts["cut where the turns do not alternate"] += 1
            break
        if role == "user" and not message["content"].strip():
            raise Rejected("an empty question")
        messages.append(message)
        before = role
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not answers:
        raise Rejected("no answer")
    if not any(messages[i].get(k) for i in answers for k in ("content", "tool_calls", "reasoning_content")):
        raise Rejected("only empty answers")
    if answers[-1] < len(messages) - 1:
        counts["turns without an answer cut off"] += 1
    result = {"messages": messages[:answers[-1] + 1]}
    if tools := parsed(row.get("tools")):
        if not isinstance(tools, list):
            raise Rejected("tools that are no list")
        result["tools"] = [parsed(tool) for tool in tools]
    return result


def content_hash(row: dict) -> bytes:
    """16 bytes of a row's normalised text: rows that differ in white space, case or Unicode form only are doubles."""
    def plain(value) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    text = json.dumps([[plain(m.get(k, "")) for k in ("role", "content", "reasoning_content", "tool_calls")]
                       for m in row["messages"]], ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def collect(source: str, path: Path, size: int, seed: int) -> None:
    """Write the conversations of `source` to `path` (jsonl), at most `size` of them (0: all), and print the table.

    Of doubles the one whose text sorts first stays; an id is the content's hash. Rows are ordered by a hash of seed and
    content, and the first `size` of them are the sample.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    spool, listed = path.with_name("spool.partial"), path.with_name("rejected.jsonl.partial")
    counts, reasons, place_of, total = Counter(), Counter(), {}, 0
    kept = {}                                    # content -> (order, hash of the line, where it is, of the source's id)

    def short(*parts: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(b"\0".join(parts), digest_size=8).digest(), "little")

    with open(spool, "wb") as rows, open(listed, "w", encoding="utf-8") as bad:
        for place, record in tqdm((r for f in source_files(source) for r in records(f)), desc="read", unit="row"):
            total += 1
            try:
                if isinstance(record, Rejected):
                    raise record
                row = normalise(record, counts)
                content = content_hash(row)
                source_id = record.get("id")
                row = {"id": content.hex()} | ({} if source_id is None else {"source_id": source_id}) | row
                line = json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
            except (Rejected, UnicodeEncodeError, RecursionError) as error:
                reason = {UnicodeEncodeError: "half a surrogate pair",
                          RecursionError: "nested too deep"}.get(type(error), str(error))
                reasons[reason] += 1
                place_of.setdefault(reason, place)
                bad.write(json.dumps({"place": place, "reason": reason, "row": repr(record)[:200]}) + "\n")
                continue
            name = None if source_id is None else short(json.dumps(source_id, default=str).encode())
            found = short(b"%d" % seed, content), short(line), rows.tell(), name
            reasons["a double of another row"] += content in kept
            kept[content] = min(found, kept.get(content, found))
            rows.write(line)
    names = [name for *_, name in kept.values() if name is not None]
    counts["ids that name several contents"] = len(names) - len(set(names))
    sample = sorted(kept.values())[:size or None]
    reasons[f"not in the sample of {size}"] = len(kept) - len(sample)
    with open(spool, "rb") as rows:
        def lines():
            for _, _, start, _ in sample:
                rows.seek(start)
                yield rows.readline().decode()
        write_atomic(path, lines())
    spool.unlink()
    listed.rename(path.with_name("rejected.jsonl"))
    table = [("rows read", total, ""),
             *((f"left out: {r}", n, place_of.get(r, "")) for r, n in reasons.most_common() if n),
             *((f"kept, {r}", n, "") for r, n in counts.most_common() if n),
             (f"conversations in {path}", len(sample), "")]
    width = max(len(what) for what, *_ in table)
    for what, number, place in table:
        print(f"{what:<{width}}  {number:>10,}" + (f"   first: {place}" if place else ""), flush=True)
    if not sample:
        raise ValueError(f"no row of {source} can be used; {path.with_name('rejected.jsonl')} says why for each")
