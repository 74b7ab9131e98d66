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

    cheap: int = number(4, "operations", "up to this cost, readers compute an expression again instead of storing it")
    cheap_beside_memory: int = number(0, "operations", "the same limit where memory takes the time; 0: it never does")
    neighbour_rows: int = number(0, "rows", "a weighted sum of up to so many rows is computed again, not stored")
    recompute: int = number(6, "operations", "up to this cost, a later stage computes a value again")
    enough_points: int = number(32, "outer points", "with fewer, some threads would be idle unless they share a row")
    long_row: int = number(8192, "elements", "the shortest row that threads may share; it is then not in fast memory")
    vector_least: int = number(8, "elements", "the shortest variable that is worth vectorizing")
    tile_least: int = number(8, "elements", "the fewest that a tile reads across its lines")
    table_reads: int = number(64, "reads", "from so many per element on, a table stays in the caches")
    reads_again: bool = False  # each stage of a reduction reads its rows from memory
    flat_tiles: bool = False  # short lines are transposed, and walked as one
    flat_maps: bool = False  # short lines of a map's results are walked as one, whatever is read
    line_bytes: int = number(64, "bytes", "the size of a cache line")
    row_lines: int = number(0, "bytes", "neighbouring rows share cache lines as long as one row touches no more than "
                                        "this; 0: loops are ordered by what they write")
    transpose_least: int = number(16, "elements", "the shortest contiguous line for which transposing in tiles pays")
    split_piece: int = number(4096, "elements", "the shortest piece of a reduction that is worth a partial result")
    split_row: int = number(4096, "elements", "the same limit for a contiguous row, since a program reduces only one")
    split_even: int = number(64, "elements", "pieces are multiples of this long, so that each starts with wide loads")
    product_even: int = number(64, "elements", "lengths of the pieces of a product's depth are multiples of this")
    split_more: int = number(4, "pieces", "a further variable is only cut if that gives at least this many pieces")
    split_columns: int = number(64, "columns", "the number of results that one program computes side by side")
    split_across: int = number(1, "rows", "of one program where some data is contiguous across rows")
    asked: int = number(40, "checks", "of windows for each position; with more, atomic additions are faster")
    factor_again: int = number(0, "rows or columns", "the largest product for which a factor is computed again")
    table_launches: int = number(4, "launches", "the fewest launches of one kernel that are worth joining into a table")
    worker_side: int = number(64, "rows or columns", "the side of the part of a product that is worth a worker")
    worker_depth: int = number(512, "elements", "the shortest piece of a product's depth worth a partial result")
    # The cost of a matrix product, in units of 16 multiplications: decides which side vectors run along.
    tile_high: int = number(6, "rows", "the height of a tile of sums: 6 x 2 vectors leave 4 registers of 16")
    tile_wide: int = number(16, "columns of float32", "the width of such a tile: two vectors")
    block_rows: int = number(192, "rows", "of a block, whose factors and sums fit into a second-level cache; the right "
                                          "factor is read again for each block")
    transposed_factor: int = number(24, "times 16 products", "to transpose one element of a factor")
    scattered_result: int = number(16, "times 16 products", "to store one result that is not adjacent to the last")
    expensive_combine: int = number(16, "operations", "above this cost of a combine, scans are limited by computation")
    scan_side_by_side: int = number(8, "rows", "with so many at once, steps of a scan need not wait for the one before")
    # Library products. The times are those of an H200, in bfloat16, with a vocabulary of 50257.
    product_line: int = number(0, "bytes", "the library's fast kernels need lines that are multiples of this; 0: any")
    product_rate: int = number(600_000, "16-bit operations per nanosecond", "a product whose lines are such multiples")
    product_rate_else: int = number(90_000, "16-bit operations per nanosecond", "a product with other lines")
    memory_rate: int = number(4_000, "bytes per nanosecond", "the bandwidth of memory, reads and writes together")
    launch: int = number(4_000, "nanoseconds", "the time of a kernel that does next to nothing")
    # Steps on several streams.
    launch_recorded: int = number(2_000, "nanoseconds", "the time of such a kernel in a CUDA graph")
    stream_wait: int = number(1_500, "nanoseconds", "the wait of a step for one on another stream, in a CUDA graph")
    filled: int = number(1 << 18, "elements", "a result of this size keeps all threads of the machine busy")
    filled_product: int = number(1 << 21, "elements", "a product's result of this size does so: a tile for each core")
    overlap_gain: int = number(3, "percent", "several streams are only used if the model says that they save this")
    convolved_channels: int = number(64, "channels", "up to so many, the library convolves in any memory order")

    def even(self, length: int) -> int:
        """Rounds the length of a row's piece up to an even one."""
        return -(-length // self.split_even) * self.split_even

    def longest_column(self, itemsize: int) -> int | None:
        """The longest column that is held together with others beside it; None: as long as a row."""
        return None

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
    neighbour_rows: int = number(8, "rows", "enough for trilinear resizing of channels-last images")
    # ---- threads
    serial: int = number(24576, "element operations", "with less work, waking other threads takes longer than that")
    serial_shared: int = number(65536, "element operations", "the same limit for a shared row, which is also joined")
    chunks: int = number(64, "parts", "of a shared row: always as many, so that the number of threads does not matter")
    chunk: int = number(4096, "elements", "the part of a contiguous variable that one thread takes at a time")
    chunk_even: int = number(64, "elements", "chunks are multiples of this long, so that each starts on a cache line")
    column_chunk: int = number(32, "rows", "the fewest rows of a chunk when columns are reduced")
    table_blocks: int = number(4, "blocks", "up to this many blocks of a table, one thread is faster than several")
    # ---- vectors
    unroll: int = number(36, "steps", "constant windows up to this size are unrolled: 3 x 3 x 3 and a bit")
    lane_bytes: int = number(128, "bytes", "the size of the partial results of one reduction: two vectors of 64 bytes")
    bodies: int = number(4, "copies", "loop bodies that compilers may interleave to keep several vectors in flight")
    row_steps: int = number(4, "steps", "the fewest of all lanes in a row; with fewer, joining lanes dominates")
    columns: int = number(512, "columns", "reduced side by side: their partial results stay in the first-level cache")
    columns_kept: int = number(16, "columns", "the fewest that one kernel reads in one order and writes in another")
    row_kept: int = number(16384, "bytes", "the longest row for which one kernel does so: half of a first-level cache")
    few_columns: int = number(32, "columns", "with so few, several rows are summed side by side to fill vectors")
    wide_columns: int = number(256, "columns", "the most columns that such rows make together: 1 KB of partial sums")
    turn_rows: int = number(16, "rows", "the fewest rows of each of the sums that run side by side")
    register_bytes: int = number(512, "bytes", "the partial results of a segment's columns that fit into registers")
    held_bytes: int = number(1024, "bytes", "partial results that compilers keep in registers in a loop over rows")
    stack_bytes: int = number(1 << 20, "bytes", "partial results of columns in all chunks; a thread's stack has 8 MB")
    window_lanes: int = number(64, "points", "their windows are computed in step, with partial results in registers")
    shortest_part: int = number(8, "elements", "the shortest part of a split loop that is worth a body of its own")
    copied: int = number(500, "expressions", "the most that a split loop may duplicate; compile time grows with them")
    # ---- rounding
    additions: int = number(16, "values", "added one after the other before their sum moves up a level, as in eager")
    joins: int = number(8, "sums", "so many of one level are added before their sum moves up to the next level")
    levels: int = number(3, "levels", "the number of levels above the first; the highest takes any number of sums")
    joined_rows: int = number(4, "rows", "of columns, added first, so that sums in memory are updated less often")
    # ---- caches
    transpose_side: int = number(64, "elements", "the side of a transposed tile along the vector variable")
    transpose_bytes: int = number(256, "bytes", "the other side of a transposed tile: whole cache lines")
    flat_work: int = number(6, "operations", "from this cost on, lines that do not fill vectors are walked as one line")
    transpose_gap: int = number(8, "elements", "padding between rows of a tile, against conflicts in the cache")
    shared_work: int = number(16, "operations", "the least cost of a value that is computed once for all rows and kept")
    shared_bytes: int = number(16384, "bytes", "the largest arrays of such values: half of a first-level cache")
    shared_least: int = number(64, "points", "the fewest points of a block that keeps such values, for vectors")
    shared_most: int = number(512, "points", "the most points of such a block")
    cache_line: int = number(64, "bytes", "the size of a cache line, which two threads should not both write to")
    prefetch_bytes: int = number(4096, "bytes", "the amount of memory to prefetch at a time")
    prefetch_nearest: int = number(4, "steps", "the shortest distance to prefetch ahead: memory takes that long")
    prefetch_farthest: int = number(24, "steps", "the longest distance to prefetch ahead: processors queue that many")
    prefetch_longest: int = number(2048, "bytes", "rows longer than this are prefetched by the processor itself")
    prefetch_cost: int = number(12, "operations", "the most for computing an address to prefetch, which is done twice")
    cached_bytes: int = number(1 << 20, "bytes", "a table up to this size stays in the caches, so it is not prefetched")
    # ---- scans
    scan_columns: int = number(256, "columns", "the number of columns scanned side by side")
    scan_lanes: int = number(4, "columns", "fewer are not vectorized, but unrolled, with states in registers")
    scan_strip: int = number(16, "elements", "of a row that are scanned before the next row continues: a cache line")
    scan_parts: int = number(64, "parts", "the number of parts into which a long row is cut")
    scan_few: int = number(16, "rows", "with fewer rows than this, threads must share a row")
    scan_long: int = number(1 << 15, "elements", "the shortest row that is worth sharing, as it is then read twice")
    # ---- scatters
    scatter_parts: int = number(16, "parts", "so many parts that write to different places keep all threads busy")
    scatter_start: int = number(4096, "elements", "the part of the initial target that one thread fills at a time")
    scatter_work: int = number(12, "operations", "from this cost on, all is computed in vectors before it is stored")
    scatter_taps: int = number(64, "elements", "the most elements that one point may write in that form")
    scatter_points: int = number(64, "points", "the fewest points of such a block")
    scatter_most: int = number(256, "points", "the most points of such a block")
    # ---- matrix products of our own
    vector_bytes: int = number(32, "bytes", "the size of a vector that every CPU since 2013 has")
    tile_vectors: int = number(3, "vectors", "the largest width of a tile of sums")
    tile_highest: int = number(14, "rows", "the largest height of a tile: with two vectors a row, it fits 32 registers")
    tile_sums: int = number(8, "vectors", "the fewest independent sums: two products a cycle take four cycles each")
    panel_bytes: int = number(512 << 10, "bytes", "the part of a factor that stays in the second-level cache")
    masks: int = number(64, "window positions", "up to so many, the positions with a zero factor are computed once")
    panel_depth: int = number(1024, "elements", "the largest depth of a factor that is kept as a whole")
    block_columns: int = number(256, "columns of float32", "the columns of a block in the second-level cache")
    block_units: int = number(4, "cores", "the number assumed where kernels are compiled for unknown machines")
    block_depth: int = number(256, "elements", "the depth of a block")
    block_gap: int = number(64, "bytes", "padding between rows of an array, against conflicts in the cache")
    dot_rows: int = number(12, "rows", "the most rows of a product that reads a factor in its own order, along the "
                                       "depth; with more rows it pays to rearrange the factor for vectors")
    dot_steps: int = number(10, "elements", "the least depth of such a product for each of its rows, since the lanes "
                                            "of every sum are added at the end")
    dot_side: int = number(8, "rows or columns", "the largest side of a tile of such sums")
    dot_reads: int = number(3, "products", "the cost of loading one vector of a row or column of such a tile")
    dot_join: int = number(6, "products", "the cost of adding the lanes of one vector")
    dot_depth: int = number(1024, "elements", "the part taken at once: a tile's rows and columns stay in the cache")
    dot_block: int = number(48, "rows", "the most rows of a block, whose left factor stays in the second-level cache")
    dot_columns: int = number(64, "columns", "the most columns of such a block")
    small_product: int = number(1 << 16, "products", "with fewer than this, the work is not divided among threads")


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

    row_lines: int = number(512 << 10, "bytes", "neighbouring rows share cache lines if one row touches no more")
    cascade: int = number(128, "elements", "a work-item adds so many to a sum of their own first, for smaller errors")
    short_row: int = number(64, "elements", "the longest row that one work-item reduces: a group would be mostly idle")
    smallest_group: int = number(32, "work-items", "the number that runs in step on every GPU")
    lines: int = number(4, "accesses", "in flight for a work-item; with more work-items there is more to join")
    step: int = number(16, "elements", "of a row that does not fit into registers, for each work-item at a time")
    access_bytes: int = number(16, "bytes", "the size of the widest load or store")
    registers: int = number(64, "registers of 32 bits", "those of a work-item that may hold loaded elements")
    part: int = number(8, "elements", "the number that a work-item loads at a time if it does not keep them")
    streamed_points: int = number(1 << 14, "points", "from this size on, bandwidth limits a map, and not latency")
    streamed_work: int = number(96, "operations", "up to this cost per point, memory limits a map, and not computation")
    transpose_side: int = number(64, "elements", "the side of a transposed tile in local memory")
    group: int = number(256, "work-items", "the size of a group: enough to fill a GPU, and allowed on all of them")
    groups: int = number(32, "groups", "the fewest that run at once on any GPU: four on each of eight cores")
    band_rows: int = number(16, "rows", "rows that read the same data are walked side by side in bands of this size: "
                                        "less than a tenth is read twice")
    band_share: int = number(8, "times", "bands are used if repeated reads are more than the total divided by this")
    columns: int = number(32, "columns", "the number that a group reduces side by side: one cache line")
    segment_step: int = number(2, "elements", "of a segment, in flight for each work-item: most segments are short")
    few_rows: int = number(4096, "rows", "with fewer, one work-item per row leaves most of a GPU idle")
    scan_run: int = number(4, "elements", "the number of adjacent elements of a row that one work-item scans")
    scan_columns: int = number(32, "columns", "the number that a group scans side by side")
    scan_few_columns: int = number(8, "columns", "the same number if there are few columns")
    product_each: int = number(4, "rows and columns", "the sums of one work-item: 4 x 4, in 16 registers")
    product_depth: int = number(16, "elements", "the part of the depth that is in local memory at once")


@dataclass(frozen=True)
class BlockTuning(Tuning):
    """GPUs in Triton: programs over tiles."""

    flat_maps: bool = True
    cheap_beside_memory: int = number(16, "operations", "a square root and a division: less than a store and a load")
    unroll: int = number(36, "steps", "constant windows up to this size are unrolled: 3 x 3 x 3 and a bit")
    warp: int = number(32, "threads", "the number that runs in step")
    most_warps: int = number(16, "warps", "the most of one program; with more, each thread has too few registers")
    split_row: int = number(1024, "elements", "the shortest piece of a split row: longer ones leave too few programs")
    split_across: int = number(16, "rows", "of one program where some data is contiguous across rows: two sectors")
    thread: int = number(16, "elements", "that each thread of a reduction combines without exchanging data")
    thread_few: int = number(8, "elements", "the same number with few programs: more threads have more in flight")
    held_values: int = number(48, "values", "the most that a thread of a reduction loads and stores; with more, its "
                                            "registers leave room for too few threads")
    access: int = number(4, "elements", "of the widest common dtype, in one access of 16 bytes")
    access_most: int = number(16, "elements", "of the narrowest dtype, in one access of 16 bytes")
    # ---- maps
    threads: int = number(128, "threads", "the size of a program that computes a map: four warps")
    map_warp: int = number(64, "elements", "the fewest for each warp: two per thread")
    held_reads: int = number(20, "loads", "the most in flight per thread; with more, fewer threads fit on a processor")
    held_rows: int = number(64, "loads", "the same limit for combining rows, where each element is used once")
    thread_draws: int = number(32, "elements", "random numbers that a thread draws, since preparing a draw is shared")
    shared_lanes: int = number(16, "lanes", "the most that share a value that is the same for all of them")
    window_threads: int = number(128, "threads", "the size of a program that computes one window per thread")
    neighbour_threads: int = number(128, "threads", "the same size if a point computes several windows")
    tile: int = number(1024, "elements", "the number for each program of a map: two accesses of 16 bytes per thread")
    transpose_side: int = number(64, "elements", "the side of a transposed tile")
    layers: int = number(4, "tiles", "transposed together if some of what they read is the same")
    tile_least: int = number(4, "elements", "the fewest that a tile reads across its lines")
    transposed_bytes: int = number(192, "bytes", "of a transposed tile, the most that each thread reads at once")
    transpose_few: int = number(32, "elements", "the same side if there are few tiles")
    enough_tiles: int = number(1024, "programs", "so many keep a GPU busy: eight of 128 threads on a processor")
    phases: int = number(16, "elements", "the most that one point computes together: they are in registers")
    phase_values: int = number(4, "values", "the most values of one variable that are unrolled")
    phase_reads: int = number(4, "loads", "up to this many per point cost less than stores of single elements")
    neighbours: int = number(4, "windows", "the number of adjacent windows that one point computes")
    warp_line: int = number(32, "elements", "the length of a line in a compact tile: one access of a warp")
    # ---- rows that are gathered
    channel_piece: int = number(32, "channels", "loaded by eight threads at once, 16 bytes each: a cache line")
    channels: int = number(32, "channels", "for each program: what all programs read at a time stays in the cache")
    gathered_points: int = number(32, "points", "the number of adjacent points for each program")
    gathered_lines: int = number(1, "lines of points", "for each program; with smooth indices, neighbours share loads")
    gathered_thread: int = number(8, "elements", "the number for each thread")
    # ---- reductions
    row: int = number(16384, "elements", "the longest row that one program holds as a whole")
    piece: int = number(2048, "elements", "the size of the pieces in which longer rows are read")
    columns: int = number(64, "columns", "the number reduced side by side if columns are contiguous")
    lanes: int = number(120, "hundredths", "above this share of the columns or points, axes of a tile are joined")
    short_line: int = number(64, "elements", "lines up to it are joined if they do not begin at wide accesses")
    lanes_at_run: int = number(150, "hundredths", "the same limit for run-time sizes, where joined axes cost divisions")
    written_out: int = number(1200, "expressions", "the most in unrolled rows; compile time grows with them")
    column_rows: int = number(64, "elements", "the longest reduced axis that is held as a whole beside columns")
    column_tile: int = number(4096, "elements", "the largest tile of columns that is held at the usual width")
    column_read: int = number(32, "bytes", "the most that a thread reads of columns at once")
    column_thread: int = number(64, "elements", "the most of held columns for each thread")
    column_bytes: int = number(192, "bytes", "the most that a thread loads and stores of held columns")
    sector: int = number(32, "bytes", "the narrowest columns: what a cache requests from memory; twice that is better")
    across_least: int = number(4, "elements", "between results of a row: from then on a map transposes them")
    few_columns: int = number(16, "columns", "the fewest for each program if there would be too few programs")
    segment_items: int = number(8, "items", "the number of a segment's items that are loaded at once")
    segment_elements: int = number(256, "elements", "of segments, reduced side by side by one program")
    segment_warp: int = number(128, "elements", "the number for each warp, 512 bytes, which it reduces alone")
    segment_warps: int = number(4, "warps", "the most of a program that reduces segments")
    enough_programs: int = number(264, "programs", "two for each processor of an H200")
    resident: int = number(8, "programs", "the most of 256 threads that one processor holds at once")
    under_way: int = number(32 << 10, "bytes", "in flight for each processor to use its share of the bandwidth")
    stages: int = number(4, "pieces", "the number of a row's pieces that are loaded ahead")
    shared_bytes: int = number(96 << 10, "bytes", "of shared memory for these pieces: two programs fit on a processor")
    # ---- scans
    scan_piece: int = number(2048, "elements", "the size of a tile of columns")
    scan_alone: int = number(8192, "elements", "the size of the pieces of a single row")
    scan_row: int = number(16384, "elements", "the longest row that is scanned in one piece")
    scan_columns: int = number(32, "columns", "the number scanned side by side if columns are contiguous")
    scan_programs: int = number(200, "programs", "so many fill a GPU if each has several pieces in flight")
    scan_expensive: int = number(8, "times", "as many programs are worth a look-back if the combine is expensive")
    scan_thread: int = number(64, "elements of 32 bits", "the number for each thread")
    scan_thread_apart: int = number(16, "elements", "for each thread if every element is an access of its own")
    scan_thread_column: int = number(8, "elements", "for each thread if accesses go down columns: sums take registers")
    scan_combine: int = number(10, "operations", "a combine that costs more than this takes longer than memory")
    scan_window: int = number(128, "pieces", "the number of earlier pieces that a piece looks back at in one load")
    scan_longest: int = number(256, "rows", "the most rows in a piece of columns")
    scan_in_a_row: int = number(32, "pieces", "the most that wait for one another, as far as `scan_longest` allows")
    scan_group: int = number(64, "pieces", "of columns between two prefixes, if the order of additions is fixed")
    product_line: int = number(16, "bytes", "the size of the widest access, which tensor cores need")
    # ---- matrix products of our own (`TILES`)
    processors: int = number(132, "processors", "the number on an H200; each holds one or more programs")
    shared_most: int = number(227 << 10, "bytes", "the shared memory of one processor")
    threads_most: int = number(512, "threads", "the most of one processor that have enough registers for sums")
    tile_reads: int = number(44, "bytes", "the amount that a processor reads from the cache in a cycle")
    loose_reads: int = number(24, "elements", "the number of a factor's elements that it loads one by one in a cycle")
    tile_registers: int = number(64, "registers", "those that a thread needs in addition to its sums")
    registers_most: int = number(65536, "registers", "the number on one processor")
    operations: int = number(128, "operations", "the number per cycle on one processor, outside of tensor cores")
    cycle_bytes: int = number(2000, "bytes", "the amount that all processors together read and write in a cycle")
    near: int = number(125, "hundredths", "of the least cost: products up to it count as equal in the model")
    tile_start: int = number(2600, "cycles", "for loading the factors of a tile's first step, and storing its results")
    step_start: int = number(60, "cycles", "the time in each step in which nothing is multiplied")
    share_start: int = number(10_000, "cycles", "the time for passing a sum to another program: 1024 x 768 x 2048 took "
                                                "30,000 in shares, and 14,000 in tiles")
    sum_bytes: int = number(20, "bytes", "the amount of partial sums that a processor passes on, or reads, in a cycle")
    total_start: int = number(3000, "cycles", "the time to launch the kernel that adds up partial sums")
    total_threads: int = number(128, "threads", "the size of a program of that kernel")
    total_thread: int = number(4, "elements", "the number for each of its threads: an access of 16 bytes")
    total_points: int = number(1 << 16, "results", "the fewest for programs of that size; else a program is a warp")
    total_across: int = number(16, "rows", "for each program if results are contiguous along rows: 32 bytes of halves")
    factor_again: int = number(128, "rows or columns", "a factor is computed again, and not stored, for a product with "
                                                       "at most this many: one or two tiles")
    # ---- scatters
    tap_values: int = number(4, "values", "the most values of one variable that are unrolled")
    taps: int = number(16, "values", "the most values of all variables that are unrolled")
    tapped: int = number(2048, "elements", "the size of a program that adds a row in several places")
    tapped_warp: int = number(512, "elements", "the number for each warp of such a program")
    scattered: int = number(256, "elements", "the size of a program that writes elements one by one")

    def longest_column(self, itemsize: int) -> int:
        """The longest column that is held with as many others as fill memory sectors."""
        return self.row * itemsize // self.sector

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
