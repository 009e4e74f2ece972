// Expand: y[row, columns of slice] += gain * y[row, columns of slice] + bias
//                                     + (sum over splits of partial[split][place][slice]) . B_slice
//
// An item is one tile and 256 columns of one slice; a warp takes 64 columns of it. A product is
// [16 columns, 8 rank rows] x [8 rank rows, 8 rows of y]. A thread loads 8 neighbouring columns of two rank rows
// and, as the columns are dealt to products, ends with the same 8 columns of two rows of y: one 16-byte load
// and store each.
// B is exact in TF32, which has the mantissa of float16 and the exponent of bfloat16. The shrunk float32 values
// are multiplied in two parts, so that 22 bits of their 24 count.
//
// Where adapters differ most tiles have one row, of whose products seven eighths would be zeros: there a warp takes
// all 256 columns of an item, without tensor cores and without waiting for another warp. It has 8 KB of B on their
// way at once, and a third of the instructions.
//
// A block walks from item to item, neighbours, and works out once what those of a tile share.

struct ExpandItem {
    Tile tile;
    int slice;
    int column;                     // its first one, in the slice
    Rows rows;
    int num_rows;                   // of B

    __device__ void enter_slice(const Launch& launch) {
        rows = rows_of(launch, tile.slot, slice);
        num_rows = rows.count();
    }

    // To the next item of the tile; there is one.
    __device__ void advance(const Launch& launch) {
        column += COLUMN_BLOCK;
        if (column < launch.width[slice]) return;
        column = 0;
        ++slice;
        enter_slice(launch);
    }
};

// index: among the items of the tile.
__device__ ExpandItem expand_item_at(const Launch& launch, const Tile& tile, int index) {
    ExpandItem item;
    item.tile = tile;
    item.slice = 0;
    item.column = index * COLUMN_BLOCK;
    while (item.column >= launch.width[item.slice]) {
        item.column -= ceil_div(launch.width[item.slice], COLUMN_BLOCK) * COLUMN_BLOCK;
        ++item.slice;
    }
    item.enter_slice(launch);
    return item;
}

// Neighbouring items.
struct Range {
    int begin, end;
};

__device__ Range items_of_block(const Launch& launch) {
    const int items = num_tiles(launch) * launch.column_blocks;
    const int run = ceil_div(items, static_cast<int>(gridDim.x));
    const int begin = static_cast<int>(blockIdx.x) * run;
    return {begin, min(begin + run, items)};
}

// What a row of the tile has at a rank row of B: the sum over the splits; one at the bias row; zero at the gain row
// and beyond B.
__device__ float shrunk_value(const Launch& launch, const ExpandItem& item, int place, int rank) {
    const bool is_bias = item.rows.has_bias() && rank == item.num_rows - 1;
    float sum = is_bias ? 1.0f : 0.0f;
    if (rank >= item.rows.rank()) return sum;
    const long long stride = static_cast<long long>(launch.num_rows) * launch.num_slices * MAX_RANK;
    const float* partial = partial_at(launch, 0, item.tile.first + place, item.slice) + rank;
    constexpr int LOADS = 4;        // in flight at once
#pragma unroll 1
    for (int left = launch.splits; left > 0; left -= LOADS) {
        float values[LOADS] = {};
#pragma unroll
        for (int index = 0; index < LOADS; ++index) {
            if (index < left) values[index] = load_partial(partial);
            partial += stride;
        }
#pragma unroll
        for (int index = 0; index < LOADS; ++index) sum += values[index];
    }
    return sum;
}

// Rank rows of the pages of an item.
__device__ int page_rows(const ExpandItem& item) { return ceil_div(item.num_rows, PAGE_ROWS) * PAGE_ROWS; }

using Shrunk = float[SUBTILE][MAX_ROWS + 4];  // the pad spreads a warp's reads over all banks

// Sums the splits of `count` rows from `first` of the tile on. All threads of the block call it. Zero where a
// product reads beyond the rows.
__device__ void sum_splits(const Launch& launch, const ExpandItem& item, int first, int count, Shrunk& shrunk) {
    const int ranks = page_rows(item);
    __syncthreads();                // the values before are read
#pragma unroll 1
    for (int element = threadIdx.x; element < ceil_div(count, GROUP) * GROUP * ranks; element += THREADS) {
        const int place = element / ranks, rank = element % ranks;
        shrunk[place][rank] = place < count ? shrunk_value(launch, item, first + place, rank) : 0.0f;
    }
    __syncthreads();
}

template <typename Element>
__device__ const Element* row_of_b(const Launch& launch, const int* pages, int row) {
    return static_cast<const Element*>(launch.b) + pages[row / PAGE_ROWS] * launch.page_stride
        + static_cast<long long>(row % PAGE_ROWS) * launch.b_pitch;
}

// A thread's first column in an item, in elements; 8 threads share a row of B or y, and a warp 64 columns.
__device__ int lane_column() { return threadIdx.x / 4 * VECTOR; }

__device__ bool is_inside(const Launch& launch, const ExpandItem& item) {
    return item.column + lane_column() < launch.width[item.slice];
}

// Rows t and t + 4 of B in one page, 8 columns of each.
struct PageRows {
    uint4 low, high;
};

// b: row t of the page, at the first column.
__device__ PageRows load_page(const Launch& launch, const ExpandItem& item, const ushort* b, int page,
                              bool inside) {
    const int row = page * PAGE_ROWS + threadIdx.x % 4;
    PageRows rows = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (inside && row < item.num_rows) rows.low = load_weights(b);
    if (inside && row + 4 < item.num_rows) rows.high = load_weights(b + 4LL * launch.b_pitch);
    return rows;
}

template <typename Type>
__device__ void multiply_page(float (&sum)[4][4], const PageRows& rows, float shrunk_low, float shrunk_high) {
    const float low = tf32_part(shrunk_low), high = tf32_part(shrunk_high);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const float2 first = Type::unpack(component(rows.low, pair));
        const float2 second = Type::unpack(component(rows.high, pair));
        mma_tf32(sum[pair], first, second, low, high);
        mma_tf32(sum[pair], first, second, shrunk_low - low, shrunk_high - high);
    }
}

// What the sums of 8 columns of two rows of y begin with.
template <typename Type>
__device__ void multiply_gain(float (&sum)[4][4], const uint4 (&y)[2], const uint4& gain) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float2 begin = product<Type>(component(gain, pair), component(y[row], pair));
            sum[pair][row] = begin.x;
            sum[pair][2 + row] = begin.y;
        }
    }
}

template <typename Type>
__device__ uint4 added(const uint4& y, const float (&sum)[4][4], int row) {
    uint result[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const float2 before = Type::unpack(component(y, pair));
        result[pair] = Type::pack({before.x + sum[pair][row], before.y + sum[pair][2 + row]});
    }
    return {result[0], result[1], result[2], result[3]};
}

// The first pages of an item: kept in registers for all its rows, and loaded before anything else of it.
constexpr int KEPT = 2;
struct KeptPages {
    PageRows page[KEPT];
};

// Adds the products of the pages that are not kept: each is loaded while the one before it is multiplied.
template <typename Type>
__device__ void multiply_other_pages(const Launch& launch, const ExpandItem& item, const float* values,
                                     float (&sum)[4][4]) {
    const int* pages = pages_of(launch, item.tile.slot);
    const int column = launch.b_column[item.slice] + item.column + lane_column(), t = threadIdx.x % 4;
    const bool inside = is_inside(launch, item);
    const ushort* b = row_of_b<ushort>(launch, pages, KEPT * PAGE_ROWS + t) + column;
    PageRows rows = load_page(launch, item, b, KEPT, inside);
    for (int page = KEPT; page * PAGE_ROWS < item.num_rows; ++page) {
        PageRows next = {};
        if ((page + 1) * PAGE_ROWS < item.num_rows) {
            b = row_of_b<ushort>(launch, pages, (page + 1) * PAGE_ROWS + t) + column;
            next = load_page(launch, item, b, page + 1, inside);
        }
        multiply_page<Type>(sum, rows, values[page * PAGE_ROWS], values[page * PAGE_ROWS + 4]);
        rows = next;
    }
}

// Where they lie, for all items of a tile: row t of each page at this thread's first column.
struct KeptRows {
    const ushort* page[KEPT];

    __device__ void enter(const Launch& launch, const ExpandItem& item) {
        const int* pages = pages_of(launch, item.tile.slot);
#pragma unroll
        for (int index = 0; index < KEPT; ++index) {
            page[index] = row_of_b<ushort>(launch, pages, index * PAGE_ROWS + threadIdx.x % 4) + lane_column();
        }
    }

    __device__ KeptPages load(const Launch& launch, const ExpandItem& item) const {
        const int column = launch.b_column[item.slice] + item.column;
        const bool inside = is_inside(launch, item);
        KeptPages kept;
#pragma unroll
        for (int index = 0; index < KEPT; ++index) {
            kept.page[index] = load_page(launch, item, page[index] + column, index, inside);
        }
        return kept;
    }
};

// Rows 2t and 2t + 1 of a group of y, at this thread's first column.
struct Target {
    int place;                      // in the row list, of the group's first row
    bool live[2];                   // whether the tile has them
    ushort* row[2];

    __device__ void enter(const Launch& launch, const Tile& tile, int first) {
        place = tile.first + first;
#pragma unroll
        for (int index = 0; index < 2; ++index) {
            const int own = first + threadIdx.x % 4 * 2 + index;
            live[index] = own < tile.count;
            const int number = live[index] ? row_number(launch, tile, own) : 0;
            row[index] = static_cast<ushort*>(launch.y) + number * launch.y_pitch + lane_column();
        }
    }
};

struct TwoRows {
    uint4 row[2];
};

__device__ TwoRows load_rows(const Target& target, int column, bool inside) {
    TwoRows y = {};
#pragma unroll
    for (int index = 0; index < 2; ++index) {
        if (inside && target.live[index]) y.row[index] = load_activations(target.row[index] + column);
    }
    return y;
}

// shrunk: this thread's row of the group, from rank t on. before: y of the group.
template <typename Type>
__device__ void expand_group(const Launch& launch, const ExpandItem& item, const KeptPages& kept, const float* shrunk,
                             const Target& target, const TwoRows& before, int column, bool inside) {
    float sum[4][4] = {};
    if (item.rows.has_gain() && inside) {
        const int* pages = pages_of(launch, item.tile.slot);
        const ushort* gain = row_of_b<ushort>(launch, pages, item.rows.rank()) + launch.b_column[item.slice];
        multiply_gain<Type>(sum, before.row, load_weights(gain + item.column + lane_column()));
    }
#pragma unroll
    for (int page = 0; page < KEPT; ++page) {
        if (page * PAGE_ROWS < item.num_rows) {
            multiply_page<Type>(sum, kept.page[page], shrunk[page * PAGE_ROWS], shrunk[page * PAGE_ROWS + 4]);
        }
    }
    if (item.num_rows > KEPT * PAGE_ROWS) multiply_other_pages<Type>(launch, item, shrunk, sum);
#pragma unroll
    for (int index = 0; index < 2; ++index) {
        if (inside && target.live[index]) {
            *reinterpret_cast<uint4*>(target.row[index] + column) = added<Type>(before.row[index], sum, index);
        }
    }
}

// The groups of a subtile, which begins at row `first` of the tile: y is loaded of all at once.
template <typename Type, int GROUPS>
__device__ void expand_subtile(const Launch& launch, const ExpandItem& item, const KeptPages& kept, int first,
                               Target (&targets)[GROUPS], Shrunk& shrunk, int& shrunk_key) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int column = launch.y_column[item.slice] + item.column;
    const bool inside = is_inside(launch, item);
    TwoRows before[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) before[group] = load_rows(targets[group], column, inside);
    const int key = (item.tile.first + first) * MAX_SLICES + item.slice;
    if (shrunk_key != key) {        // the same for all threads of the block
        sum_splits(launch, item, first, min(SUBTILE, item.tile.count - first), shrunk);
        shrunk_key = key;
    }
    expand_group<Type>(launch, item, kept, shrunk[g] + t, targets[0], before[0], column, inside);
    if constexpr (GROUPS == 2) {
        expand_group<Type>(launch, item, kept, shrunk[GROUP + g] + t, targets[1], before[1], column, inside);
    }
}

// items: of the tile, for all warps of the block.
template <typename Type>
__device__ void expand_tile(const Launch& launch, const Tile& tile, const Range& items, Shrunk& shrunk) {
    ExpandItem item = expand_item_at(launch, tile, items.begin);
    KeptRows rows;
    rows.enter(launch, item);
    KeptPages kept = rows.load(launch, item);
    wait_for_previous_kernel();
    Target alone[1];                // the rows of a tile that has one group, for all its items
    alone[0].place = -1;
    int shrunk_key = -1;            // which values are in shared memory
    for (int index = items.begin; index < items.end; ++index) {
        for (int first = 0; item.num_rows > 0 && first < tile.count; first += SUBTILE) {
            if (tile.count - first <= GROUP) {
                if (alone[0].place != tile.first + first) alone[0].enter(launch, tile, first);
                expand_subtile<Type, 1>(launch, item, kept, first, alone, shrunk, shrunk_key);
            } else {
                Target both[2];
                both[0].enter(launch, tile, first);
                both[1].enter(launch, tile, first + GROUP);
                expand_subtile<Type, 2>(launch, item, kept, first, both, shrunk, shrunk_key);
            }
        }
        if (index + 1 == items.end) break;
        item.advance(launch);
        kept = rows.load(launch, item);
    }
}

// What a warp has of one row of y and of B: a lane has 8 neighbouring columns.
template <typename Type>
struct RowWarp {
    float sum[VECTOR];

    __device__ static int column() { return threadIdx.x % 32 * VECTOR; }

    // Lanes beyond the slice read its last columns once more.
    __device__ static int column_within(const Launch& launch, const ExpandItem& item) {
        return min(item.column + column(), launch.width[item.slice] - VECTOR);
    }

    // The rows of a page; those beyond B's last one are it once more, and count for nothing.
    __device__ static void load(uint4 (&rows)[PAGE_ROWS], const Launch& launch, const ExpandItem& item,
                                const int* pages, int page) {
        const int last = item.num_rows - 1 - page * PAGE_ROWS;
        const bool is_known = pages[page] >= 0;  // always so: what `last` needs and this arrive at once
        if (!((last >= 0) & is_known)) return;
        const ushort* b = row_of_b<ushort>(launch, pages, page * PAGE_ROWS) + launch.b_column[item.slice]
            + column_within(launch, item);
#pragma unroll
        for (int row = 0; row < PAGE_ROWS; ++row) rows[row] = load_weights(b + min(row, last) * launch.b_pitch);
    }

    // shrunk: of the page's rows, zero where there is none.
    __device__ void multiply(const uint4 (&rows)[PAGE_ROWS], const float* shrunk) {
#pragma unroll
        for (int row = 0; row < PAGE_ROWS; ++row) {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 weights = Type::unpack(component(rows[row], pair));
                sum[2 * pair] = fmaf(shrunk[row], weights.x, sum[2 * pair]);
                sum[2 * pair + 1] = fmaf(shrunk[row], weights.y, sum[2 * pair + 1]);
            }
        }
    }

    // What the sums begin with.
    __device__ void begin(const Launch& launch, const ExpandItem& item, const int* pages, const uint4& y) {
#pragma unroll
        for (float& element : sum) element = 0.0f;
        if (!item.rows.has_gain()) return;
        const uint4 gain = load_weights(row_of_b<ushort>(launch, pages, item.rows.rank())
                                        + launch.b_column[item.slice] + column_within(launch, item));
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 begin = product<Type>(component(gain, pair), component(y, pair));
            sum[2 * pair] = begin.x;
            sum[2 * pair + 1] = begin.y;
        }
    }

    __device__ uint4 added_to(const uint4& y) const {
        uint result[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 before = Type::unpack(component(y, pair));
            result[pair] = Type::pack({before.x + sum[2 * pair], before.y + sum[2 * pair + 1]});
        }
        return {result[0], result[1], result[2], result[3]};
    }

    // y and its delta. rows: the first pages, loaded; others are loaded over them.
    __device__ static uint4 with_delta(const uint4& y, uint4 (&rows)[KEPT][PAGE_ROWS], const Launch& launch,
                                       const ExpandItem& item, const int* pages, const float* shrunk) {
        RowWarp product;
        product.begin(launch, item, pages, y);
#pragma unroll
        for (int page = 0; page < KEPT; ++page) {
            if (page * PAGE_ROWS < item.num_rows) product.multiply(rows[page], shrunk + page * PAGE_ROWS);
        }
        for (int page = KEPT; page * PAGE_ROWS < item.num_rows; ++page) {
            load(rows[0], launch, item, pages, page);
            product.multiply(rows[0], shrunk + page * PAGE_ROWS);
        }
        return product.added_to(y);
    }
};

using RowOfShrunk = float[MAX_ROWS];

// The one row of a tile; items: of the tile, for this warp alone.
template <typename Type>
__device__ void expand_row(const Launch& launch, const Tile& tile, const Range& items, RowOfShrunk& shrunk) {
    if (items.begin >= items.end) return;
    const int* pages = pages_of(launch, tile.slot);
    const int number = row_number(launch, tile, 0);
    ushort* y_row = static_cast<ushort*>(launch.y) + number * launch.y_pitch;
    ExpandItem item = expand_item_at(launch, tile, items.begin);
    int shrunk_slice = -1;          // whose values are in shared memory
    for (int index = items.begin; index < items.end; ++index) {
        if (index > items.begin) item.advance(launch);
        if (item.num_rows == 0) continue;
        uint4 rows[KEPT][PAGE_ROWS];
#pragma unroll
        for (int page = 0; page < KEPT; ++page) RowWarp<Type>::load(rows[page], launch, item, pages, page);
        wait_for_previous_kernel();
        const int column = item.column + RowWarp<Type>::column();
        ushort* y = y_row + launch.y_column[item.slice] + column;
        const bool inside = column < launch.width[item.slice];
        uint4 before = {0, 0, 0, 0};
        if (inside) before = load_activations(y);
        if (shrunk_slice != item.slice) {
            __syncwarp();           // the values before are read
            for (int rank = threadIdx.x % 32; rank < page_rows(item); rank += 32) {
                shrunk[rank] = shrunk_value(launch, item, 0, rank);
            }
            __syncwarp();
            shrunk_slice = item.slice;
        }
        const uint4 after = RowWarp<Type>::with_delta(before, rows, launch, item, pages, shrunk);
        if (inside) *reinterpret_cast<uint4*>(y) = after;
    }
}

// A warp's part of a block's items.
__device__ Range part_of_warp(const Range& items) {
    const int run = ceil_div(items.end - items.begin, WARPS);
    const int begin = items.begin + static_cast<int>(threadIdx.x) / 32 * run;
    return {begin, min(begin + run, items.end)};
}

// Calls work(tile, items of the tile) for the tiles of a block's items.
template <typename Work>
__device__ void for_each_tile(const Launch& launch, const Range& items, Work work) {
    for (int begin = items.begin; begin < items.end;) {
        const int index = begin / launch.column_blocks, first = index * launch.column_blocks;
        const int end = min(items.end, first + launch.column_blocks);
        work(tile_at(launch, index), Range{begin - first, end - first});
        begin = end;
    }
}

// For the next base product. Shrink and the product have ended.
__device__ void take_back_announcement(const Launch& launch) {
    if (launch.x_is_there && blockIdx.x == 0 && threadIdx.x == 0) *launch.x_is_there = 0;
}

// Tiles of several rows, then those of one: in one loop both would want their registers at once. In shared memory they
// have the same place, or else no block would fit beside one of the base product (few_rows.cu).
template <typename Type>
__device__ void expand(const Launch& launch) {
    __shared__ Shrunk shrunk;
    RowOfShrunk* rows_of_shrunk = reinterpret_cast<RowOfShrunk*>(shrunk);
    static_assert(sizeof(Shrunk) >= WARPS * sizeof(RowOfShrunk), "a row for each warp");
    const Range items = items_of_block(launch);
    for_each_tile(launch, items, [&](const Tile& tile, const Range& own) {
        if (tile.count > 1) expand_tile<Type>(launch, tile, own, shrunk);
    });
    __syncthreads();
    for_each_tile(launch, items, [&](const Tile& tile, const Range& own) {
        if (tile.count > 1) return;
        expand_row<Type>(launch, tile, part_of_warp(own), rows_of_shrunk[threadIdx.x / 32]);
    });
    wait_for_previous_kernel();     // blocks without work wait too: this kernel must not end before that one
}

// A thread takes two columns, in float32 throughout.
__device__ void expand_in_float32(const Launch& launch) {
    __shared__ Shrunk shrunk;
    wait_for_previous_kernel();
    const Range items = items_of_block(launch);
    for (int index = items.begin; index < items.end; ++index) {
        const Tile tile = tile_at(launch, index / launch.column_blocks);
        const ExpandItem item = expand_item_at(launch, tile, index % launch.column_blocks);
        if (item.num_rows == 0) continue;
        const int* pages = pages_of(launch, item.tile.slot);
        const int column = item.column + 2 * threadIdx.x;
        const int b_column = launch.b_column[item.slice] + column, y_column = launch.y_column[item.slice] + column;
        for (int first = 0; first < item.tile.count; first += SUBTILE) {
            const int count = min(SUBTILE, item.tile.count - first);
            sum_splits(launch, item, first, count, shrunk);
            if (column >= launch.width[item.slice]) continue;
            for (int place = 0; place < count; ++place) {
                float* y = static_cast<float*>(launch.y)
                    + row_number(launch, item.tile, first + place) * launch.y_pitch + y_column;
                float2 sum = {0.0f, 0.0f};
                if (item.rows.has_gain()) {
                    const float* gain = row_of_b<float>(launch, pages, item.rows.rank()) + b_column;
                    sum = {gain[0] * y[0], gain[1] * y[1]};
                }
                for (int row = 0; row < item.num_rows; ++row) {
                    const float2 weights = *reinterpret_cast<const float2*>(
                        row_of_b<float>(launch, pages, row) + b_column);
                    sum.x = fmaf(shrunk[place][row], weights.x, sum.x);
                    sum.y = fmaf(shrunk[place][row], weights.y, sum.y);
                }
                y[0] += sum.x;
                y[1] += sum.y;
            }
        }
    }
}
