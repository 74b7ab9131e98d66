"""The numbers that shape loops, one table for each kind of machine: value, unit and reason.

    from flambeau.ir.tuning import CPU
    CPU.long_row          # 8192
    explain(CPU)          # every field with its unit and reason

Passes get the table of the machine they work for with its `Capabilities`; the writers of a language use the table of
the machines that the language is for. A number that both depend on (what is a long row, how high is a tile) is one
field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


def number(value: int, unit: str, reason: str) -> Any:
    return field(default=value, metadata={"unit": unit, "reason": reason})


@dataclass(frozen=True)
class Tuning:
    """The numbers that passes need for any machine."""

    cheap: int = number(4, "operations", "worth computing twice")
    cheap_beside_memory: int = number(0, "operations", "the same where memory alone counts; 0 where it does not")
    neighbour_rows: int = number(0, "rows", "read for one row of results, rather than kept sums of some of them")
    recompute: int = number(6, "operations", "cheaper again in a later stage than a row of fast memory")
    enough_points: int = number(32, "outer points", "keep all threads busy without dividing a row")
    long_row: int = number(8192, "elements", "a row from which on threads may share it; it has no fast memory then")
    vector_least: int = number(8, "elements", "a variable shorter than this is a poor vector")
    table_reads: int = number(64, "reads", "of each element of a table: where it lies hardly matters")
    reads_again: bool = False  # each stage of a reduction reads its rows from memory
    flat_tiles: bool = False  # short lines are transposed, and walked as one
    flat_maps: bool = False  # short lines of a map's results are walked as one, whatever is read
    line_bytes: int = number(64, "bytes", "that memory moves at once")
    row_lines: int = number(0, "bytes", "of lines that a row leaves to the next: a cache still holds them then; 0: "
                                        "loops are ordered by what they write")
    transpose_least: int = number(16, "elements", "contiguous on one side: below it a tile brings nothing")
    split_piece: int = number(4096, "elements", "a shorter piece of a reduction is not worth a result of its own")
    split_row: int = number(4096, "elements", "the same of a row, of which a program has only one")
    split_even: int = number(64, "elements", "pieces are multiples of it, so that each begins where wide reads can")
    product_even: int = number(64, "elements", "pieces of a sum of products are multiples of it")
    split_more: int = number(4, "pieces", "fewer of one more variable are not worth cutting it")
    split_columns: int = number(64, "columns", "one program computes so many results side by side")
    asked: int = number(40, "questions", "whether a value is one's own: they take as long as to add one to memory")
    factor_again: int = number(0, "rows or columns", "of a product for which a factor is computed, not stored")
    table_launches: int = number(4, "launches", "fewer of one form are not worth a table")
    worker_side: int = number(64, "rows or columns", "the part of a matrix product that is worth a worker")
    worker_depth: int = number(512, "elements", "a shorter piece of a long product is not worth a result of its own")
    # The cost of a matrix product, in units of 16 multiplications: decides which side vectors run along.
    tile_high: int = number(6, "rows", "of a tile of sums in registers: 6 x 2 vectors leave 4 of 16 for the factors")
    tile_wide: int = number(16, "columns of float32", "two vectors of a tile")
    block_rows: int = number(192, "rows", "of a block whose factors and sums fit a second-level cache together; after "
                                          "so many the right factor is read again")
    transposed_factor: int = number(24, "times 16 products", "to bring one element of a factor into a tile crosswise")
    scattered_result: int = number(16, "times 16 products", "to write one result that is not beside the last")
    expensive_combine: int = number(16, "operations", "of a scan: a cheaper step waits for memory, not for itself")
    scan_side_by_side: int = number(8, "rows", "that a scan takes together, so that no step waits for the one before")
    # Library products. The times are those of an H200, in bfloat16, with a vocabulary of 50257.
    product_line: int = number(0, "bytes", "of which the lines of all matrices are multiples, or another kernel takes "
                                           "the product; 0: no matter")
    product_rate: int = number(600_000, "operations of 16 bits a nanosecond", "of a product whose lines are multiples")
    product_rate_else: int = number(90_000, "operations of 16 bits a nanosecond", "of one with a line that is none")
    memory_rate: int = number(4_000, "bytes a nanosecond", "read and written")
    launch: int = number(4_000, "nanoseconds", "of a kernel that has next to nothing to do")
    # Steps on several streams.
    launch_recorded: int = number(2_000, "nanoseconds", "the same in a CUDA graph")
    stream_wait: int = number(1_500, "nanoseconds", "of a step that waits for one on another stream, in a CUDA graph")
    filled: int = number(1 << 18, "elements", "of a result that keep all of the machine's threads busy")
    filled_product: int = number(1 << 21, "elements", "of a product's result that do: a tile for each core")
    overlap_gain: int = number(3, "percent", "of the time that several streams must save, as modelled")
    convolved_channels: int = number(64, "channels", "with no more of them a library convolves images as they lie")

    def even(self, length: int) -> int:
        """Rounds the length of a row's piece up to an even one."""
        return -(-length // self.split_even) * self.split_even

    def pieces(self, rows: int, columns: int, depth: int, batch: int, itemsize: int, programs: int) -> int:
        """The number of pieces into which the sum of a product is cut, one for each worker; `programs` run at once."""
        tiles = -(-rows // self.worker_side) * -(-columns // self.worker_side) * batch
        return min(programs // max(tiles, 1), depth // self.worker_depth)


@dataclass(frozen=True)
class CpuTuning(Tuning):
    """C++ and OpenCL on CPUs: threads, vectors and caches."""

    reads_again: bool = True
    flat_tiles: bool = True
    shares_rows: bool = True  # threads can divide a row among themselves and join what they found
    neighbour_rows: int = number(8, "rows", "those of trilinear resizing, where channels lie side by side")
    # ---- threads
    serial: int = number(24576, "element operations", "below it to wake threads takes longer than the work")
    serial_shared: int = number(65536, "element operations", "the same for a row that threads share: they join, too")
    chunks: int = number(64, "parts", "of a shared row: fixed, so that results do not depend on the threads")
    chunk: int = number(4096, "elements", "of a contiguous variable that one thread takes at a time")
    chunk_even: int = number(64, "elements", "chunks are multiples of it, so that all begin on a cache line")
    column_chunk: int = number(32, "rows", "of a chunk of columns, at least")
    table_blocks: int = number(4, "blocks", "of a table that one thread does faster than several")
    # ---- vectors
    unroll: int = number(36, "steps", "constant windows up to it (3x3x3 and a bit) are written out")
    lane_bytes: int = number(128, "bytes", "of the states of one reduction: two vectors of 64 bytes")
    bodies: int = number(4, "bodies", "that a compiler may write side by side to have their vectors under way at once")
    row_steps: int = number(4, "steps", "of all lanes in a row, at least: with fewer, joining the lanes dominates")
    columns: int = number(512, "columns", "reduced side by side: their states stay in the first-level cache")
    few_columns: int = number(32, "columns", "that with those of other rows are as many as fill vectors")
    wide_columns: int = number(256, "columns", "that rows of few come to, summed side by side: states of 1 KB")
    turn_rows: int = number(16, "rows", "of each of those that are summed side by side, at least")
    register_bytes: int = number(512, "bytes", "of the states of a segment's columns that stay in registers")
    held_bytes: int = number(1024, "bytes", "of states that compilers keep in registers while rows go past")
    stack_bytes: int = number(1 << 20, "bytes", "that the states of columns may take in all chunks: stacks end at 8 MB")
    window_lanes: int = number(64, "points", "of a block whose windows go in step: one running value in registers")
    shortest_part: int = number(8, "elements", "of a split loop that are worth a body of their own")
    copied: int = number(500, "expressions", "that may be written out when a loop is split: more compile too slowly")
    # ---- rounding
    additions: int = number(16, "values", "added one after the other before their sum rises by a level, as in eager")
    joins: int = number(8, "sums", "of one level before they rise to the next")
    levels: int = number(3, "levels", "above the first; the highest takes what comes")
    joined_rows: int = number(4, "rows", "of columns joined first: their states are accessed a quarter as often")
    # ---- caches
    transpose_side: int = number(64, "elements", "of a tile along the vector")
    transpose_bytes: int = number(256, "bytes", "of a tile the other way: whole lines of the cache")
    flat_work: int = number(6, "operations", "at a point, from which on lines that are no whole vectors go as one")
    transpose_gap: int = number(8, "elements", "between rows of a tile, which would meet in the cache")
    shared_work: int = number(16, "operations", "at a point that are worth keeping for all rows")
    shared_bytes: int = number(16384, "bytes", "of the arrays that keep them: half of a first-level cache")
    shared_least: int = number(64, "points", "of such a block, at least: its loops are vectors")
    shared_most: int = number(512, "points", "of such a block, at most")
    cache_line: int = number(64, "bytes", "that come at once, and that two threads should not both write to")
    prefetch_bytes: int = number(4096, "bytes", "of rows that are on their way at a time")
    prefetch_nearest: int = number(4, "steps", "to ask ahead at least: memory takes as long")
    prefetch_farthest: int = number(24, "steps", "to ask ahead at most: processors hold so many requests")
    prefetch_longest: int = number(2048, "bytes", "of a row: a longer one the processor fetches by itself")
    prefetch_cost: int = number(12, "operations", "to find a place, at most: it is found twice")
    cached_bytes: int = number(1 << 20, "bytes", "of a table that the caches hold anyway")
    # ---- scans
    scan_columns: int = number(256, "columns", "scanned side by side")
    scan_lanes: int = number(4, "columns", "fewer are no vector: a compiler writes them out, with states in registers")
    scan_strip: int = number(16, "elements", "of a row before the next one has its turn: a line of the cache")
    scan_parts: int = number(64, "parts", "of a long row")
    scan_few: int = number(16, "rows", "with fewer of them threads must divide a row")
    scan_long: int = number(1 << 15, "elements", "of a row that is worth dividing: it is gone over twice")
    # ---- scatters
    scatter_parts: int = number(16, "parts", "that do not meet keep threads busy")
    scatter_start: int = number(4096, "elements", "of the start that one thread fills at a time")
    scatter_work: int = number(12, "operations", "from which on places and values are found in vectors, before writes")
    scatter_taps: int = number(64, "elements", "that a point writes, at most, if they are")
    scatter_points: int = number(64, "points", "of such a block, at least")
    scatter_most: int = number(256, "points", "of such a block, at most")
    # ---- matrix products of our own
    vector_bytes: int = number(32, "bytes", "of a vector that every CPU since 2013 has")
    tile_vectors: int = number(3, "vectors", "of a tile at most: its width")
    tile_highest: int = number(14, "rows", "of a tile at most: with two vectors each, 32 registers hold it")
    tile_sums: int = number(8, "vectors", "of sums, or two multiplications a cycle wait for those four cycles before")
    panel_bytes: int = number(512 << 10, "bytes", "of a factor that stays in the second-level cache while rows go past")
    masks: int = number(64, "places of a window", "for which it is found once where a factor is zero")
    panel_depth: int = number(1024, "elements", "of the depth of one")
    block_columns: int = number(256, "columns of float32", "of a block in the second-level cache")
    block_units: int = number(4, "cores", "that blocks are made for, where kernels go to machines that nobody knows")
    block_depth: int = number(256, "elements", "of the depth of a block")
    block_gap: int = number(64, "bytes", "between rows of an array: a power of two apart they share few cache lines")
    dot_rows: int = number(12, "rows", "of a product that reads a factor along the depth where it is: with more "
                           "of them it pays to bring it into the order of vectors")
    dot_steps: int = number(10, "elements", "of the depth for each row of such a product at least, as the lanes of "
                            "every sum are added up at the end")
    dot_side: int = number(8, "rows or columns", "of a tile of such sums at most")
    dot_reads: int = number(3, "products", "that take as long as to read one vector of a tile's row or column")
    dot_join: int = number(6, "products", "that take as long as to add up the lanes of a vector")
    dot_depth: int = number(1024, "elements", "of the depth at once: a tile's rows and columns stay in the first cache")
    dot_block: int = number(48, "rows", "of a block, whose left factor stays in the second-level cache")
    dot_columns: int = number(64, "columns", "of a block at most")
    small_product: int = number(1 << 16, "products", "below which there is nothing to divide")


    def is_ragged(self, length: int, itemsize: int) -> bool:
        """Whether much of a line is left after whole vectors, which a compiler computes by halves and one by one."""
        lanes = self.line_bytes // itemsize
        rest, half = length % lanes, lanes // 2
        return 4 * lanes * (length // lanes + rest // half + rest % half) > 5 * length

    def turns(self, rows: int, columns: int) -> int:
        """How many rows of few columns are summed side by side: they fill vectors, and no row is left over."""
        most = min(self.wide_columns // columns, rows // self.turn_rows)
        fitting = [k for k in range(2, most + 1) if rows % k == 0 and k * columns >= self.wide_columns // 4]
        return fitting[-1] if fitting and columns <= self.few_columns else 1


@dataclass(frozen=True)
class PointTuning(Tuning):
    """GPUs in their C languages: work-items, groups and local memory."""

    row_lines: int = number(512 << 10, "bytes", "of lines that a row leaves to the next: a cache still holds them then")
    cascade: int = number(128, "elements", "that a work-item reduces on their own: errors of their sum do not pile up")
    short_row: int = number(64, "elements", "a row up to it is one work-item's: a group would mostly wait")
    smallest_group: int = number(32, "work-items", "run in step on every GPU")
    lines: int = number(4, "accesses", "of a work-item under way at once; with more work-items there is more to join")
    step: int = number(16, "elements", "of a work-item in each part of a row that does not fit into registers")
    access_bytes: int = number(16, "bytes", "of the widest access")
    registers: int = number(64, "registers of 32 bits", "that hold what a work-item has read")
    part: int = number(8, "elements", "for which a work-item reads what it does not keep")
    streamed_points: int = number(1 << 14, "points", "of a map from which on bandwidth counts, and not latency")
    streamed_work: int = number(96, "operations", "at a point, at most: with more, memory does not have to hurry")
    transpose_side: int = number(64, "elements", "of a tile in local memory")
    group: int = number(256, "work-items", "of a group: enough for every GPU, and few enough for each")
    groups: int = number(32, "groups", "that run at once, at least: four on each of eight cores")
    band_rows: int = number(16, "rows", "walked side by side where they read the same: less than a tenth is read again")
    band_share: int = number(8, "times less", "than all that is read: what is read again is not worth another order")
    columns: int = number(32, "columns", "of a group that reduces them: a line of memory")
    segment_step: int = number(2, "elements", "of a segment that a work-item has under way: most segments are short")
    few_rows: int = number(4096, "rows", "leave a GPU idle if each is one work-item's")
    scan_run: int = number(4, "elements", "of a work-item side by side in a row")
    scan_columns: int = number(32, "columns", "of a group that scans them")
    scan_few_columns: int = number(8, "columns", "of a group where there are few")
    product_each: int = number(4, "rows and columns", "of a work-item's sums: 16 registers")
    product_depth: int = number(16, "elements", "of the depth that are in local memory at once")


@dataclass(frozen=True)
class BlockTuning(Tuning):
    """GPUs in Triton: programs over tiles."""

    flat_maps: bool = True
    cheap_beside_memory: int = number(16, "operations", "a root and a quotient: less than a trip through memory")
    unroll: int = number(36, "steps", "constant windows up to it (3x3x3 and a bit) are written out")
    warp: int = number(32, "threads", "that run in step")
    most_warps: int = number(16, "warps", "of a program: more leave too few registers for each thread")
    split_row: int = number(1024, "elements", "of a piece of a row: with longer ones few programs are under way")
    thread: int = number(16, "elements", "of a thread that reduces: what it joins itself, it need not send to others")
    thread_few: int = number(8, "elements", "of one where there are few programs: more threads have more under way")
    held_values: int = number(48, "values", "that a thread reads and writes where it reduces: with more, its registers "
                                            "leave too few threads to a processor")
    access: int = number(4, "elements", "of an access of 16 bytes, of the widest dtype that is common")
    access_most: int = number(16, "elements", "of an access of 16 bytes, of the narrowest dtype")
    # ---- maps
    threads: int = number(128, "threads", "of a program that maps: four warps")
    map_warp: int = number(64, "elements", "of a warp, at least: two of each thread")
    held_reads: int = number(20, "reads", "of a thread at once: with more, fewer threads fit on a processor")
    held_rows: int = number(64, "reads", "of a thread that joins rows, each of which it needs once")
    thread_draws: int = number(32, "elements", "of a thread that draws numbers: what prepares a draw is shared")
    shared_lanes: int = number(16, "lanes", "that share what is the same for all of them")
    window_threads: int = number(128, "threads", "of one that gives each point a thread")
    neighbour_threads: int = number(64, "threads", "of one whose points compute several windows")
    tile: int = number(1024, "elements", "of a program: two accesses of 16 bytes for each thread")
    transpose_side: int = number(64, "elements", "of the tile of a transposition")
    transpose_few: int = number(32, "elements", "of one where there are few tiles")
    enough_tiles: int = number(1024, "programs", "of a map that keep a GPU busy: eight of 128 threads on a processor")
    phases: int = number(16, "elements", "that one point computes together, at most: its registers")
    phase_values: int = number(4, "values", "of one variable that are written out")
    phase_reads: int = number(4, "reads", "of a point that are cheaper than to write results one by one")
    neighbours: int = number(4, "windows", "next to each other that one point computes")
    warp_line: int = number(32, "elements", "of a row in a compact tile: one access of a warp")
    # ---- rows that are gathered
    channel_piece: int = number(32, "channels", "that eight threads read at once, 16 bytes each: a line of memory")
    channels: int = number(32, "channels", "of one program: what all programs read at a time shall stay in the cache")
    gathered_points: int = number(32, "points", "next to each other")
    gathered_lines: int = number(1, "lines of points", "where places are smooth, neighbours share what they read")
    gathered_thread: int = number(8, "elements", "of one thread")
    # ---- reductions
    row: int = number(16384, "elements", "of a row that a program holds whole")
    piece: int = number(2048, "elements", "of a row that goes by in pieces")
    columns: int = number(64, "columns", "side by side where they are what is contiguous")
    lanes: int = number(120, "hundredths", "of the columns, or of a map's points: with more lanes than that, those of "
                                           "several axes are one")
    lanes_at_run: int = number(150, "hundredths", "of a map's points, where sizes of the run are to be divided by")
    written_out: int = number(1200, "expressions", "of a reduction whose rows are written out: more compile too slowly")
    column_rows: int = number(64, "elements", "of a reduced axis that is held whole above columns")
    column_tile: int = number(4096, "elements", "of columns that are held, where these are as wide as others")
    sector: int = number(32, "bytes", "side by side, of the narrowest columns: what a cache asks memory for; twice "
                                      "that is better, if there is room")
    few_programs: int = number(66, "programs", "too few to fill a GPU: one for each second processor")
    few_columns: int = number(16, "columns", "of a program then")
    segment_items: int = number(8, "items", "of a segment read at once")
    segment_elements: int = number(256, "elements", "of the segments that one program reduces side by side")
    segment_warp: int = number(128, "elements", "of a warp: 512 bytes, which it reduces without the others")
    segment_warps: int = number(4, "warps", "of a program that reduces segments")
    enough_programs: int = number(264, "programs", "two on each of the processors of an H200")
    resident: int = number(8, "programs", "of a processor, of 256 threads each, at most")
    under_way: int = number(32 << 10, "bytes", "on their way to a processor that keep memory busy: its share of the "
                                               "bandwidth takes as long as a read")
    stages: int = number(4, "pieces", "of a row on their way at once")
    shared_bytes: int = number(96 << 10, "bytes", "of shared memory that they may take: two programs on a processor")
    # ---- scans
    scan_piece: int = number(2048, "elements", "of a tile of columns")
    scan_alone: int = number(8192, "elements", "of a piece of a single row")
    scan_row: int = number(16384, "elements", "of a row that is scanned in one piece")
    scan_columns: int = number(32, "columns", "side by side where they are what is contiguous")
    scan_programs: int = number(200, "programs", "fill a GPU where each has several pieces on their way")
    scan_expensive: int = number(8, "times as many programs", "are worth a look-back where a combine takes the time")
    scan_thread: int = number(64, "elements of 32 bits", "of a thread")
    scan_thread_apart: int = number(16, "elements", "of a thread where each is an access of its own")
    scan_thread_column: int = number(8, "elements", "of one whose accesses go down columns: its states take registers")
    scan_combine: int = number(10, "operations", "of a combine above which it, and not memory, takes the time")
    scan_window: int = number(128, "pieces", "before its own that a piece looks at at once")
    scan_longest: int = number(256, "rows", "of a piece of columns")
    scan_in_a_row: int = number(32, "pieces", "that wait for one another, as far as the longest allows")
    scan_group: int = number(64, "pieces", "of columns between two prefixes, where the order is fixed")
    product_line: int = number(16, "bytes", "the widest access, by which tensor cores are fed")
    # ---- matrix products of our own (`TILES`)
    processors: int = number(132, "processors", "of an H200, each of which holds a program or a few")
    shared_most: int = number(227 << 10, "bytes", "of shared memory that one processor has for its programs")
    threads_most: int = number(512, "threads", "of one processor that all have registers for sums")
    tile_reads: int = number(44, "bytes", "that a processor reads of the cache in a cycle")
    loose_reads: int = number(24, "elements", "of factors that it reads one by one in a cycle")
    tile_registers: int = number(64, "registers", "of a thread beside its sums")
    registers_most: int = number(65536, "registers", "of a processor")
    operations: int = number(128, "operations", "of a processor in a cycle, that are none of tensor cores")
    cycle_bytes: int = number(2000, "bytes", "that all processors together read and write in a cycle")
    near: int = number(125, "hundredths", "of the least cost of a product: what the model does not tell apart")
    tile_start: int = number(2600, "cycles", "until the first step of a tile has its factors, and to write results")
    step_start: int = number(60, "cycles", "of a step in which nothing is multiplied")
    share_start: int = number(10_000, "cycles", "to tell another program of a sum, and to hear of it: 1024 x 768 x "
                                                "2048 took 30,000 in shares, and 14,000 in tiles")
    sum_bytes: int = number(20, "bytes", "of sums that a processor leaves to others, or reads, in a cycle")
    total_start: int = number(3000, "cycles", "of the launch that adds up what programs left")
    total_threads: int = number(128, "threads", "of a program of it")
    total_thread: int = number(4, "elements", "of one thread: an access of 16 bytes")
    total_points: int = number(1 << 16, "results", "that are enough for these; with fewer, programs are warps")
    total_across: int = number(16, "rows", "of a program that writes results in lines of rows: 32 bytes of halves")
    factor_again: int = number(128, "rows or columns", "of a product for which a factor is computed, not written and "
                                                       "read: one tile or two have it")
    # ---- scatters
    tap_values: int = number(4, "values", "of one variable that is written out")
    taps: int = number(16, "values", "of all variables that are written out")
    tapped: int = number(2048, "elements", "of rows that are added in several places")
    tapped_warp: int = number(512, "elements", "of a warp that adds rows")
    scattered: int = number(256, "elements", "of a program that writes them one by one")

    def even(self, length: int) -> int:
        """Rounds to a power of two, or to whole tiles, so that no lanes are idle."""
        if length > self.row:
            return -(-length // self.piece) * self.piece
        high = 1 << (length - 1).bit_length()
        return high if length * 4 > high * 3 else high // 2


def explain(table: Tuning) -> Iterator[tuple[str, int, str, str]]:
    """Yields name, value, unit and reason of every number."""
    for f in fields(table):
        if f.metadata:
            yield f.name, getattr(table, f.name), f.metadata["unit"], f.metadata["reason"]


@dataclass(frozen=True)
class ProductTile:
    """The part of a product that one program sums: rows and columns, bytes of the depth per step, the number of
    pipeline stages, and warps. Programs go through `group` rows of tiles together, which share columns."""

    high: int
    wides: tuple[int, ...]  # columns, in parts with accumulators of their own
    deep: int
    stages: int
    warps: int
    group: int = 8
    least_steps: int = 4  # the fewest steps of a program, if all steps are divided among as many programs as possible
    tail: int = 0  # operations that follow each sum
    loose: bool = False  # factors are loaded element by element, through registers

    @property
    def wide(self) -> int:
        return sum(self.wides)

    def cut(self, depth: int, itemsize: int) -> ProductTile:
        """Returns a tile no deeper than the sum is, as far as tensor cores allow, and with no more stages than the sum
        has steps."""
        least = max(16 * itemsize, 32)
        deep = min(self.deep, max(least, itemsize << max(depth - 1, 0).bit_length()))
        return replace(self, deep=deep, stages=max(1, min(self.stages, -(-depth * itemsize // deep))))

    def registers(self, itemsize: int) -> int:
        """Registers of a thread for sums, and for loose elements of factors with their addresses."""
        elements = (self.high + self.wide) * self.deep // itemsize if self.loose else 0
        return (2 * self.high * self.wide + 3 * elements) // (2 * BLOCKS.warp * self.warps)

    def side_by_side(self, itemsize: int) -> int:
        """Programs that one processor holds at once, where some begin as others end."""
        registers = BLOCKS.warp * self.warps * (self.registers(itemsize) + BLOCKS.tile_registers)
        return max(1, min(BLOCKS.shared_most // self.shared(itemsize), BLOCKS.registers_most // registers))

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory."""
        return self.stages * (self.high + self.wide) * max(self.deep, 16 * itemsize)

    def resident(self, itemsize: int) -> int:
        """Programs that one processor holds at once."""
        return max(1, min(BLOCKS.shared_most // self.shared(itemsize),
                          BLOCKS.threads_most // (BLOCKS.warp * self.warps)))


WAYS = ("once", "turns", "shares", "pieces")
PIECES = range(2, 33)  # pieces of the depth: a second launch reads so many at once


@dataclass(frozen=True)
class Way:
    """A tile, and how the work is divided among programs: see codegen/triton/tensor_cores/contractions.py."""

    tile: ProductTile
    how: str = "once"
    pieces: int = 1
    turned: bool = False  # rows and columns are swapped

    @property
    def halves(self) -> bool:
        """Whether the last tile of a part of the rows may have half of the height: 64 rows are what tensor cores take
        together. The loop over a program's tiles has one height, as the compiler merges it with the one over the
        depth."""
        return self.how == "once" and self.tile.high >= 128

    def cost(self, sizes: Sequence[int], itemsize: int) -> float:
        """The modelled cost of a product, in cycles."""
        rows, columns, depth, batch = sizes
        t, units = self.tile, BLOCKS.processors
        tiles, resident = -(-rows // t.high) * -(-columns // t.wide) * batch, t.resident(itemsize)
        deep = max(t.deep // itemsize, 16)
        steps = -(-depth // deep)
        read = min(t.high, rows) + min(t.wide, columns)
        reads = read * t.deep / (BLOCKS.loose_reads * itemsize if t.loose else BLOCKS.tile_reads)
        step = max(t.high * t.wide * t.deep / 4096, reads) + BLOCKS.step_start
        once = BLOCKS.tile_start + t.high * t.wide * 2 / BLOCKS.tile_reads
        each, after = -(-tiles // units), t.high * t.wide * t.tail / BLOCKS.operations
        if self.how == "once":
            return each * (steps * step + after) + -(-each // t.side_by_side(itemsize)) * once
        if self.how == "turns":
            return each * (steps * step + after + once / 4) + once + BLOCKS.step_start
        if self.how == "pieces":
            programs, points = tiles * min(self.pieces, steps), rows * columns * batch
            each = -(-programs // units)
            left = 4 * points * (1 + self.pieces) / (units * BLOCKS.sum_bytes)
            return each * -(-steps // self.pieces) * step + -(-each // resident) * once + BLOCKS.total_start + left
        programs = max(min(resident * units, tiles * steps // t.least_steps), min(resident * units, tiles), 1)
        each = -(-tiles * steps // programs) * -(-programs // units)
        left = t.high * t.wide * 4 / BLOCKS.sum_bytes
        others = max(1, programs // max(tiles, 1) - 1)
        between = BLOCKS.share_start + left * (1 + others) if tiles % programs else 0
        begun = max(2, 1 + each / steps / resident)
        return each * (step + after / steps) + begun * once + between


CPU = CpuTuning()
CPU_WORK_ITEMS = CpuTuning(shares_rows=False)  # OpenCL on CPUs: work-items do not wait for each other
POINTS = PointTuning()
BLOCKS = BlockTuning()


# Each was the fastest somewhere among 24 forms on an H200 (12 shapes, bfloat16); the first is as fast as cuBLAS from
# 4096 rows, columns and depth on.
TILES = (ProductTile(128, (128, 128), 128, 4, 8), ProductTile(128, (256,), 128, 4, 8),
         ProductTile(128, (256,), 128, 3, 8), ProductTile(128, (128,), 128, 4, 4), ProductTile(128, (128,), 128, 4, 8),
         ProductTile(256, (128,), 128, 3, 8),
         ProductTile(128, (128, 64), 128, 4, 8), ProductTile(64, (128,), 128, 4, 4), ProductTile(64, (64,), 128, 5, 4),
         ProductTile(64, (64,), 256, 3, 4), ProductTile(64, (32,), 256, 4, 4), ProductTile(64, (16,), 256, 4, 4),
         ProductTile(128, (64,), 128, 4, 4), ProductTile(128, (64,), 128, 6, 4), ProductTile(128, (32,), 256, 4, 4),
         ProductTile(128, (128,), 128, 3, 4), ProductTile(128, (64, 16), 128, 5, 4),
         ProductTile(128, (64, 32), 128, 5, 4), ProductTile(128, (32,), 128, 4, 4), ProductTile(128, (16,), 128, 4, 4))


@dataclass(frozen=True)
class AttentionTile:
    """The part of attention that one program has at a time: rows and columns of scores, the number of pipeline stages,
    and warps."""

    high: int
    wide: int
    stages: int
    warps: int
    listed: int = 3  # blocks of a side from which on a launch pays that lists the blocks that a mask leaves


# By bytes of a factor, role and size of a head. The tiles for 16 bits and up to 128 elements are the fastest of 350
# forms on an H200 (4 x 16 heads, length 4096). A single kernel for both gradients takes longer, although it has five
# products for a block where two kernels have seven: it waits for its additions to memory. The copy engine reads no
# faster than pointers. After the first tile of each entry comes one that is faster for other masks or lengths.
ATTENTION: dict[tuple[int, str], dict[int, tuple[AttentionTile, ...]]] = {
    (2, "out"): {64: (AttentionTile(64, 64, 3, 4), AttentionTile(64, 128, 2, 4)),
                 128: (AttentionTile(64, 64, 3, 4), AttentionTile(128, 64, 3, 8)),
                 256: (AttentionTile(64, 64, 2, 4), AttentionTile(64, 32, 3, 4))},
    (2, "queries"): {64: (AttentionTile(128, 64, 3, 4), AttentionTile(64, 64, 3, 4)),
                     128: (AttentionTile(128, 64, 3, 8), AttentionTile(64, 64, 2, 4)),
                     256: (AttentionTile(64, 32, 2, 4), AttentionTile(128, 32, 2, 8))},
    (2, "keys"): {64: (AttentionTile(32, 64, 2, 4), AttentionTile(64, 64, 2, 4)),
                  128: (AttentionTile(64, 64, 2, 4), AttentionTile(32, 64, 2, 4)),
                  256: (AttentionTile(32, 64, 2, 8),)},
    (4, "out"): {128: (AttentionTile(64, 32, 2, 4),), 256: (AttentionTile(32, 32, 1, 4),)},
    (4, "queries"): {64: (AttentionTile(64, 32, 2, 4),), 256: (AttentionTile(32, 32, 1, 4),)},
    (4, "keys"): {256: (AttentionTile(32, 32, 1, 4),)},
    **dict.fromkeys([(8, role) for role in ("out", "queries", "keys")],
                    {128: (AttentionTile(32, 32, 1, 4),), 256: (AttentionTile(16, 16, 1, 4),)}),
}


def attention_tile(role: str, head: int, itemsize: int, draws: bool, number: int = 0) -> AttentionTile:
    """Returns the tile with this number, or the last one. `draws`: a random number for each score takes more registers
    than the score."""
    found = next(tiles for size, tiles in ATTENTION[itemsize, role].items() if head <= size)
    tile = found[min(number, len(found) - 1)]
    return replace(tile, high=64) if draws and tile.high > 64 else tile


# ---- block shapes around those of the table ----------------------------------------------------------------

MOST_WARPS = 32


@dataclass(frozen=True)
class Scale:
    """The difference of a kernel's blocks from the table's: elements of a program and its warps as powers of two,
    pipeline stages as a number to add."""

    elements: int = 0
    warps: int = 0
    stages: int = 0
    tile: int = 0  # of a matrix product, or of attention: the index among its tiles, the best by the table first

    def sized(self, elements: int) -> int:
        return max(1, shifted(elements, self.elements))

    def warped(self, warps: int) -> int:
        return max(1, min(MOST_WARPS, shifted(warps, self.warps)))

    def staged(self, stages: int) -> int:
        return max(1, stages + self.stages)


def shifted(n: int, by: int) -> int:
    return n << by if by >= 0 else n >> -by


UNSCALED = Scale()
# The variants worth a try: twice and half of the elements, with as many warps or as many elements for each thread; the
# same elements on twice and half of the threads; fewer stages.
AROUND = (Scale(elements=1), Scale(elements=-1), Scale(elements=1, warps=1), Scale(elements=-1, warps=-1),
          Scale(warps=1), Scale(warps=-1), Scale(stages=-2))
OTHER_TILES = tuple(Scale(tile=k) for k in range(1, 9))  # of a product: the tiles that may be as good
OTHER_BLOCKS = (Scale(tile=1),)  # of attention
