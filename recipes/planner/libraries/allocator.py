"""torch's caching allocator without a GPU: what it reserves, and when it fails.

The rules of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13, for one
stream, without graphs, with its default settings and with expandable segments. Sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

MIB = 2**20

ROUNDING = 512  # kMinBlockSize: every request is rounded up to this
SMALL = 1 * MIB  # kSmallSize: up to here, a request comes from the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: the small pool's segments, and its pages if they are expandable
LARGE_SEGMENT = 20 * MIB  # large_segment_size_: segments for requests below MIN_LARGE; pages if expandable
MIN_LARGE = 10 * MIB  # kMinLargeAlloc: from here on, a request gets a segment of its own size
ROUND_LARGE = 2 * MIB  # kRoundLarge: which is rounded up to this

_ADDRESSES = LARGE_SEGMENT << 20  # of one expandable segment, in whole pages: more than any card has


def is_expandable(environment: Mapping[str, str]) -> bool:
    """Whether torch reads from these variables that segments expand: c10/core/AllocatorConfig.h."""
    settings = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:True" in "".join(settings.split())


class OutOfMemory(Exception):
    """A request does not fit under the limit, even without all that is cached."""


class Block:
    """A piece of a segment: allocated, cached, or (if that is expandable) without memory."""

    __slots__ = ("address", "after", "allocated", "before", "mapped", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.mapped = mapped
        self.allocated = False
        self.before: Block | None = None
        self.after: Block | None = None

    def insert_after(self, other: Block) -> None:
        """Become the piece that follows `other` in its segment."""
        self.before, self.after = other, other.after
        if other.after:
            other.after.before = self
        other.after = self


class Pool:
    """One size class: the cached blocks by size and then address, the unmapped ones by address."""

    __slots__ = ("blocks", "page", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.blocks: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        insort(self.blocks, (block.size, block.address, block))  # addresses differ: blocks are not compared

    def remove(self, block: Block) -> None:
        del self.blocks[bisect_left(self.blocks, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Allocator:
    """What torch.cuda.memory_allocated and memory_reserved count, and their peaks.

    `limit` is what may be reserved, None for any amount. `expandable`: as with
    PYTORCH_ALLOC_CONF=expandable_segments:True. `retries` counts how often everything that was
    cached had to be given back.
    """

    def __init__(self, limit: int | None = None, expandable: bool = False) -> None:
        self.limit = limit
        self.expandable = expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._next_address = 2 * _ADDRESSES
        if expandable:
            for number, pool in enumerate((self._small, self._large)):
                pool.add_unmapped(Block(number * _ADDRESSES, _ADDRESSES, pool, mapped=False))

    def allocate(self, size: int) -> Block:
        """A block for `size` bytes. Raises `OutOfMemory` if there is none under the limit."""
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        pool = self._small if size <= SMALL else self._large
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes beside {self.allocated} of {self.limit}")
        remaining = block.size - size
        if remaining > SMALL or (remaining and (pool.small or self.expandable)):
            rest = Block(block.address + size, remaining, pool)
            rest.insert_after(block)
            block.size = size
            pool.add(rest)
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Cache the block, as one with its neighbours if they are cached too."""
        self.allocated -= block.size
        block.allocated = False
        before, after = block.before, block.after
        if (before and not before.allocated) or (after and not after.allocated):
            _merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give back each segment, and each page of an expandable one, with nothing allocated."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.blocks):
                if self.expandable:
                    self._unmap(block)
                elif not (block.before or block.after):
                    pool.remove(block)
                    self.reserved -= block.size

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The smallest cached block that is large enough, of equal ones the lowest address."""
        at = bisect_left(pool.blocks, (size,))
        if at == len(pool.blocks):
            return None
        if self.expandable:  # a block that can grow counts as large as it can become
            while at + 1 < len(pool.blocks) and _can_become(pool.blocks[at + 1][2]) < _can_become(pool.blocks[at][2]):
                at += 1
        return pool.blocks.pop(at)[2]

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block of memory that was not reserved before, None if it is above the limit."""
        if self.expandable:
            return self._grown(pool, size)
        segment = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < MIN_LARGE else _up(size, ROUND_LARGE)
        if not self._reserve(segment):
            return None
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _reserve(self, size: int) -> bool:
        if self.limit is not None and self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    # --- Expandable segments: one for each pool, which grows and shrinks by pages -----------------

    def _grown(self, pool: Pool, size: int) -> Block | None:
        block: Block | None = _lowest_room(pool, size)
        if block and not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block and block.size < size:
            unmapped = block.after
            assert unmapped
            if not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped  # which has taken in the one before it
        if block:
            pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put pages behind the start of an unmapped block, and cache it. False above the limit."""
        pool = block.pool
        size = min(_up(size, pool.page), block.size)
        if not self._reserve(size):
            return False
        pool.remove_unmapped(block)
        block.mapped = True
        if size < block.size:
            rest = Block(block.address + size, block.size - size, pool, mapped=False)
            rest.insert_after(block)
            block.size = size
            pool.add_unmapped(rest)
        _merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a cached block."""
        pool = block.pool
        start = _up(block.address, pool.page)
        end = (block.address + block.size) // pool.page * pool.page
        if start >= end:
            return
        pool.remove(block)
        for address, size in ((block.address, start - block.address), (end, block.address + block.size - end)):
            if size:
                piece = Block(address, size, pool)
                if address < start:
                    _insert_before(piece, block)
                else:
                    piece.insert_after(block)
                pool.add(piece)
        block.address, block.size, block.mapped = start, end - start, False
        _merge(block)
        pool.add_unmapped(block)
        self.reserved -= end - start


def _merge(block: Block) -> None:
    """Take in the neighbours that are free, and mapped or unmapped as the block is."""
    for other in (block.before, block.after):
        if other is None or other.allocated or other.mapped != block.mapped:
            continue
        (block.pool.remove if other.mapped else block.pool.remove_unmapped)(other)
        if other is block.before:
            block.address, block.before = other.address, other.before
            if other.before:
                other.before.after = block
        else:
            block.after = other.after
            if other.after:
                other.after.before = block
        block.size += other.size


def _insert_before(block: Block, other: Block) -> None:
    block.before, block.after = other.before, other
    if other.before:
        other.before.after = block
    other.before = block


def _lowest_room(pool: Pool, size: int) -> Block | None:
    """The lowest address with room for `size`: an unmapped block, or the free one before it."""
    for _, block in pool.unmapped:
        before = block.before
        first = before if before and not before.allocated else block
        room = 0
        at: Block | None = first
        while room < size and at and not at.allocated:
            room, at = room + at.size, at.after
        if room >= size:
            return first
    return None


def _can_become(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after and not after.mapped else 0)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
