"""What torch elastic, the launcher of several processes, is told of a rank's failure.

It ends with a box around the message of the rank that failed first, which it reads from a file
that it names to each rank: see torch/distributed/elastic/multiprocessing/errors. Our own launcher
reads the same files, and prints a message that no rank has printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from launch.host.signals import is_being_ended

if TYPE_CHECKING:
    from launch.host.world import World

PRINTED = "printed"
_FILE = "TORCHELASTIC_ERROR_FILE"
_PATIENCE_SECONDS = 10


def is_reporter(world: World, text: str) -> bool:
    """Whether this rank prints an error that all ranks of its node should meet.

    The first rank does. The others wait for the launcher, which ends them with the first one. If
    that takes too long, the first rank has not met the error, and this one prints it.
    """
    if world.is_local_main:
        return True
    if _FILE not in os.environ:
        return False
    write_error_file(text, printed=False)
    signal.signal(signal.SIGTERM, _end)
    time.sleep(_PATIENCE_SECONDS)
    return True


def is_last_to_know() -> bool:
    """Whether a rank that lost another one has to say so: the launcher does not end it in time.

    It ends the ranks of a world as soon as one has failed, which has told why.
    """
    if _FILE not in os.environ:
        return True
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until and not is_being_ended():
        time.sleep(0.1)
    return not is_being_ended()


def _end(number: int, frame: FrameType | None) -> None:
    """Leave no message beside the first rank's, whose file is in a folder beside this rank's."""
    own = Path(os.environ[_FILE])
    if (own.parent.with_name("0") / own.name).exists():
        own.unlink(missing_ok=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def write_error_file(text: str, printed: bool = True, since: float | None = None) -> None:
    """Have the launcher's box end with this text. Nothing happens without torch elastic.

    `since` is the time of the failure [now]. The earliest one, in whole seconds, is torch's root
    cause, and a rank without a file fails when torch looks. So one with a file is dated earlier,
    and one that was printed before the others.
    """
    file = os.environ.get(_FILE)
    if not file:
        return
    failed = int(since or time.time()) - (2 if printed else 1)
    message = {"message": text, "extraInfo": {"py_callstack": f"\n{text}", "timestamp": str(failed)}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": message, PRINTED: printed}), encoding="utf-8")
