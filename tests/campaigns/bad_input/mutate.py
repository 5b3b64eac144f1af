"""Ways to make input wrong: bytes, text, values in JSON and YAML, words of a command line.

Each takes a random generator and what is valid, and returns something that may not be.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

NESTED = 3000  # deeper than any parser's recursion
DIGITS = 5000  # more than Python converts to an integer

# --- Values ---------------------------------------------------------------------------------------

_TEXTS = [
    "", " ", "x" * 300, "x" * 5000, "é", "漢字", "\udce9", "\u202e", "a\nb", "\t", "~",
    "~nobody_here/x",
    "/", ".", "..", "-", "--", "none", "null", "true", "nan", "inf", "-1", "0", "1e400", "1e-5", "2147483648",
    "9" * 30,
    "9" * DIGITS, "²", "٣", "0x10", "1_000", "a::b", "a[1]*", "http://x", "hf://x", "{", "{}", "[]", "[1", "$(x)",
    "%s", "{x}",
    "train[", "train[:0]", "mine.py", "mine.py:", "mine.yaml:x", "model", "data", "data/texts.jsonl",
    "deepspeed.json", "run",
    "/dev/null", "/proc/self/mem", "nothing.jsonl", "a" * 300 + ".jsonl", "2026-13-45", "!!int x", "auto", "fast",
    "no",
]  # fmt: skip
_NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    0.5,
    -0.0,
    1.5,
    1e-300,
    1e300,
    10**15,
    2**31,
    2**63,
    -(2**63),
    10**30,
    float("nan"),
    float("inf"),
]


def value(random: Random, was: Any = None) -> Any:
    """Something else in place of a value."""
    kinds = [
        lambda: None,
        lambda: random.choice([True, False]),
        lambda: random.choice(_NUMBERS),
        lambda: random.choice(_TEXTS),
        lambda: random.choice([[], {}, [[]], [{}], {"a": 1}, [1, "a", None], ["a"], {"": ""}]),
        lambda: [was],
        lambda: {"value": was},
        lambda: str(was),
        lambda: _nested(random.choice([20, 200])),
    ]
    return random.choice(kinds)()


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def content(random: Random, valid: Any) -> Any:
    """Parsed JSON or YAML with one thing in it changed."""
    if random.random() < 0.05:
        return value(random, valid)
    changed = copy.deepcopy(valid)
    places = list(_places(changed))
    if not places:
        return value(random, valid)
    holder, key = random.choice(places)
    ways: list[Callable[[], None]] = [lambda: _set(holder, key, value(random, holder[key]))] * 6
    ways += [lambda: _remove(holder, key), lambda: _rename(random, holder, key)]
    random.choice(ways)()
    return changed


def _places(holder: Any) -> list[tuple[Any, Any]]:
    if not isinstance(holder, (dict, list)):
        return []
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    return [place for key in keys for place in [(holder, key), *_places(holder[key])]]


def _set(holder: Any, key: Any, new: Any) -> None:
    holder[key] = new


def _remove(holder: Any, key: Any) -> None:
    del holder[key]


def _rename(random: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[random.choice([*_TEXTS[:20], f"{key}x", str(key).upper()])] = holder.pop(key)
    else:
        holder.insert(key, value(random, holder[key]))


# --- Files ----------------------------------------------------------------------------------------


def json_file(random: Random, valid: bytes) -> bytes:
    if random.random() < 0.25:
        return any_bytes(random, valid)
    if random.random() < 0.1:
        return random.choice(_HOSTILE_JSON)
    return json.dumps(content(random, json.loads(valid))).encode()


def json_lines(random: Random, valid: bytes) -> bytes:
    """One line, some lines or all of them."""
    if random.random() < 0.3:
        return any_bytes(random, valid)
    lines = valid.decode().splitlines()
    if random.random() < 0.1:
        lines.insert(random.randrange(len(lines) + 1), random.choice(_HOSTILE_JSON).decode("latin-1"))
        return "\n".join(lines).encode("latin-1", "replace")
    rows = [json.loads(line) for line in lines]
    if random.random() < 0.5:
        place = random.randrange(len(rows))
        rows[place] = content(random, rows[place])
    else:
        rows = _in_all(random, rows)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _in_all(random: Random, rows: list[dict]) -> list[Any]:
    """The same change in every row, or in those of one kind."""
    name, every = random.choice(list(rows[0])), random.choice([1, 1, 2, 7])
    new = value(random, rows[0][name])
    way = random.choice(["set", "set", "set", "drop", "rename", "inside"])
    changed = copy.deepcopy(rows)
    for row in changed[::every]:
        if way == "set":
            row[name] = new
        elif way == "inside":
            row[name] = content(Random(0), row.get(name))
        else:
            moved = row.pop(name, None)
            if way == "rename":
                row["other"] = moved
    return changed


def yaml_file(random: Random, valid: bytes) -> bytes:
    chance = random.random()
    if chance < 0.2:
        return any_bytes(random, valid)
    if chance < 0.6:
        return _other_scalar(random, valid)
    return yaml.safe_dump(content(random, yaml.safe_load(valid)), sort_keys=False, allow_unicode=True).encode(
        "utf-8", "replace"
    )


def _other_scalar(random: Random, valid: bytes) -> bytes:
    """A value in the text replaced by YAML that a dumper would never write."""
    lines = valid.decode().splitlines()
    place = random.choice(
        [number for number, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")]
    )
    name, _, _ = lines[place].partition(":")
    text = random.choice(_HOSTILE_YAML)
    indent = " " * (len(name) - len(name.lstrip()))
    if random.random() < 0.2:
        lines.insert(place, f"{indent}{text}: {text}")
    else:
        lines[place] = f"{name}: {text}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


_HOSTILE_YAML = [
    "2026-13-45", "2026-01-01", "2026-01-01T25:00:00Z", "9" * DIGITS, ".inf", "-.inf", ".nan",
    "~",
    "*nothing", "[" * NESTED, "[" * NESTED + "]" * NESTED, "{a: " * 300 + "}" * 300,
    "!!int abc", "!!float abc",
    "!!timestamp abc", "!!binary abc", "!!set {a, b}", "!!python/object:os.system x", "!x y", "<<: 3", "? [a, b]",
    "{[a]: b}", "{1: 2}",
    "{~: 2}", "{2026-01-01: 2}", "1:60:60", "0o9", "09", "1_000", "yes", "no", "'", '"', "{", "[", "|", ">-", "%",
    "@", "`", "- a", "a: b",
    "[" + "a, " * 2000 + "]", "é", "\u2028", "true", "1e3",
    "1e400", "-0", "''", "[]", "{}",
    "!!omap [a: 1]", "!!pairs [a: 1]", "=", "[1, [2, [3]]]", "!!str", "!!null x", "!!bool x", "~nobody_here/x",
    "a::b", "2147483648",
]  # fmt: skip
_HOSTILE_JSON = [
    b"null", b"true", b"3", b'"a"', b"[]", b"{}", b"[null]", b"[[1]]", b"[1, 2]", b"", b" ", b"\n\n", b"{", b"NaN",
    b"Infinity", b"\0", b"\xe9",
    b"\xef\xbb\xbf{}", b'{"a": 1}{"b": 2}', b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a": ' * 100_000,
    b'{"a": ' + b"9" * DIGITS + b"}",
    b'{"a": 1e400}', b"null\n" * 10, b'{"text": "a\nb"}', b"{'a': 1}", b'{"a": 1,}', b"// x\n{}",
]  # fmt: skip


def csv_file(random: Random, valid: bytes) -> bytes:
    if random.random() < 0.3:
        return any_bytes(random, valid)
    lines = [line.split(",") for line in valid.decode().splitlines()]
    row = random.randrange(len(lines)) if random.random() < 0.7 else 0
    column = random.randrange(len(lines[row]))
    way = random.randrange(5)
    if way == 0:
        lines[row].insert(column, random.choice(_CELLS))
    elif way == 1:
        del lines[row][column]
    elif way == 2:
        new = random.choice(_CELLS)
        for cells in lines[1:]:
            cells[min(column, len(cells) - 1)] = new
    else:
        lines[row][column] = random.choice(_CELLS)
    return "\n".join(",".join(cells) for cells in lines).encode("utf-8", "surrogatepass") + b"\n"


_CELLS = [
    *_TEXTS,
    '"',
    '""',
    '"a',
    'a"b',
    "x" * 140_000,
    "1;2",
    "1.5",
    "-1",
    "text",
    "label",
    "strong",
    "weak",
    "\r",
    "\udcff",
]


def any_bytes(random: Random, valid: bytes) -> bytes:
    """What a full disk, another encoding or an editor does to a file."""
    place = random.randrange(len(valid) + 1)
    other = random.randrange(len(valid) + 1)
    first, last = sorted((place, other))
    ways = [
        lambda: valid[:place],
        lambda: valid[place:],
        lambda: valid[:first] + valid[last:],
        lambda: valid[:last] + valid[first:],
        lambda: valid[:place] + random.choice(_PIECES) + valid[place:],
        lambda: valid[:place] + random.choice(_PIECES) + valid[place + 1 :],
        lambda: valid[:place] + random.randbytes(random.choice([1, 4, 64])) + valid[place + 1 :],
        lambda: valid[:first] + bytes(last - first) + valid[last:],
        lambda: valid.decode("utf-8", "replace").encode(random.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"])),
        lambda: "é".encode("latin-1").join(valid.split(b"e")),
        lambda: valid.replace(b"\n", random.choice([b"\r\n", b"\r", b"\n\n", b"", b" \n"])),
        lambda: valid * 2,
        lambda: b"",
        lambda: random.randbytes(200),
    ]
    return random.choice(ways)()


_PIECES = [
    b"\0", b"\xe9", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b"\t", b'"', b"'", b"{", b"}", b"[", b"]", b",",
    b":", b"#", b"- ", b"&a ",
    b"*a", b"null", b"\nnull\n", b"NaN", b"-", b"\xed\xa0\x80", b"\x1b[31m", b"%", b"\\", b"\\u0000", b"\x85",
    "\u2028".encode(),
]  # fmt: skip


# --- Command lines --------------------------------------------------------------------------------


def argv(random: Random, valid: list[str], flags: list[str]) -> list[str]:
    """A command line with one word or flag changed; `flags` are names that exist somewhere."""
    words = list(valid)
    place = random.randrange(1, len(words) + 1)
    ways: list[Callable[[], None]] = [
        lambda: words.insert(place, random.choice(_TEXTS)),
        lambda: words.insert(place, f"--{random.choice(flags)}"),
        lambda: words.extend([f"--{random.choice(flags)}", random.choice(_TEXTS)]),
        lambda: words.extend([f"--{random.choice(flags)}", random.choice(_TEXTS)]),
        lambda: words.append(f"--{random.choice(flags)}={random.choice(_TEXTS)}"),
        lambda: words.append(f"--no_{random.choice(flags)}"),
    ]
    if place < len(words):
        ways += [
            lambda: words.__setitem__(place, random.choice(_TEXTS)),
            lambda: words.__setitem__(place, random.choice(_TEXTS)),
            lambda: words.__setitem__(place, f"{words[place]}={random.choice(_TEXTS)}"),
            lambda: words.__setitem__(place, words[place][:-1]),
            lambda: words.__delitem__(place),
            lambda: words.insert(place, words[place]),
        ]
    random.choice(ways)()
    return words
