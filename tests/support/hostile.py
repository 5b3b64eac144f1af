"""Arguments that careless quoting breaks, and a stand-in for train.py that notes its arguments."""

from dataclasses import replace
from pathlib import Path

from launch.jobs.job import Job
from tests.support.jobs import job

_AWKWARD = [
    'a b', ' a', 'b ', 'a  b', '', "'", '"', "''", '"\'"', '\\', '\\\\', '\\n', 'a\nb', '\n', 'a\tb', '\r', '$HOME',
    '$', '$(touch broken)', '`touch broken`', '${PATH}', '${{inputs.x}}', '{inputs.x}', '${{ outputs.model }}',
    '$$', '!', '!!', '*', '?', '[a]', '{a,b}', '~', '#', '# no comment', ';', '; touch broken', '|', '||', '&',
    '&&', '>', '< broken', '(', ')', '%', '%j', '%x-%j', '^', '=', 'a=b', '-', '-x', '+', ',', ':', '@', '/', '//',
    '.', '..', 'é', '漢字', '😀', '\xa0', '\u202e', '\u2028', '\x01', '\x7f', '\x1b[31m', '<<EOF', 'EOF', 'yes', 'no',
    'null', '1e-5', '0x10', '- a', 'a: b', '{', '}', '[', ']', '|-', '>-', '&anchor', '*alias', '!tag', '%TAG',
    '@at', '`', "'a' 'b'", '"a" "b"', 'a\'b"c', "$'a'", "\\'", '\\$HOME', '$\\HOME', "x" * 2000, 'a\\\nb', '{{x}}',
    '{%x%}', '$[[x]]', '${x:-y}', '$((1+1))', '$1', '$@',
]  # fmt: skip
HOSTILE = (_AWKWARD + [f"{first} {second}" for first, second in zip(_AWKWARD, reversed(_AWKWARD), strict=True)])[:200]

_NOTE = """\
import json, sys
from pathlib import Path
Path({file!r}).write_text(json.dumps(sys.argv[1:]))
"""


def hostile_job(words: list[str], folder: Path) -> Job:
    """A job whose script writes its arguments to a file, those of the recipe first."""
    script = folder / "note the words.py"
    script.write_text(_NOTE.format(file=str(folder / "words.json")))
    return replace(job(gpu=False), argv=("--recipe", "standard", *words), script=str(script))
