"""What the ranks tell each other while `--fit` searches, before a process group exists."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from launch.host.world import World
from recipes.errors import Problem, UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")


class Board:
    """Named values that every rank can post and read. A single process posts to itself."""

    def __init__(self, world: World, store: Any) -> None:
        self.world = world
        self.store = store

    def post(self, name: str, value: object) -> None:
        """Post a value that JSON can hold."""
        self.store.set(name, json.dumps(value))

    def read(self, name: str) -> Any:
        """The value of this name, None if no rank has posted it yet."""
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def wait(self, name: str) -> Any:
        """The value of this name, once it is posted.

        Polls, because no signal interrupts a wait inside the store.
        """
        while not self.store.check([name]):
            time.sleep(0.05)
        return json.loads(self.store.get(name))

    def all_ranks(self, name: str, value: T) -> list[T]:
        """Post this rank's value and return the values of all ranks, in their order."""
        self.post(f"{name}/{self.world.rank}", value)
        return [self.wait(f"{name}/{rank}") for rank in range(self.world.size)]

    def decide(self, name: str, decision: Callable[[], T]) -> T:
        """The result of `decision`, called on rank 0 only; a tuple comes as a list.

        Its `UserError` is raised on every rank.
        """
        if self.world.rank == 0:
            try:
                self.post(name, {"value": decision()})
            except UserError as error:
                self.post(name, {"problems": [vars(problem) for problem in error.problems]})
        answer = self.wait(name)
        if "problems" in answer:
            raise UserError(*(Problem(**problem) for problem in answer["problems"]))
        return answer["value"]


class _LocalStore(dict):
    """The store of a single process."""

    def set(self, name: str, value: str) -> None:
        self[name] = value

    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)


_open_stores: list[TCPStore] = []  # rank 0's store also serves the training that follows, at the same address


def open_board(world: World) -> Board:
    """The board of the launched world, at the address where its training will meet."""
    if world.size == 1:
        return Board(world, _LocalStore())
    from torch.distributed import PrefixStore, TCPStore

    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torch elastic already runs the store there
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=world.rank == 0 and not served,
        wait_for_workers=False,
        multi_tenant=True,
    )
    _open_stores.append(store)
    return Board(world, PrefixStore(f"fit-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store))
