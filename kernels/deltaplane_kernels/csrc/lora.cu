// The LoRA op on rank pages: shrink, then expand. The equation and shapes are in lora.py, costs in lora_cuda.py.
//
// Compiled by NVRTC. One launch serves any mix of adapters: what a step's rows belong to is read from device memory,
// and a grid of as many blocks as the GPU holds walks over the work that it finds there.
//
// The unit of work is a tile: up to TILE rows of one slot. A block reads a weight once for all rows of a tile.
// Each output element is summed by one thread in a fixed order, so equal steps give equal bits. Weight rows
// that a matrix does not have are never read: they may hold anything.
//
// A gain row g of B multiplies the y that expand reads anyway; a bias row is a rank row whose shrunk value is 1. A
// blend of adapters is a slot that has the pages of all its members; shrink multiplies by the factor of each page.

#include "elements.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int PAGE_ROWS = 8;        // rank rows of a matrix in a page
constexpr int RANK_BLOCK = 16;      // rank rows of one tensor-core product: two pages
constexpr int SUBTILE = 16;         // rows whose shrunk values lie in shared memory at a time
constexpr int COLUMN_BLOCK = 256;   // columns of y of one block: 64 of each warp
constexpr int MAX_RANK = 256;
constexpr int MAX_ROWS = MAX_RANK + PAGE_ROWS;  // with a gain row, a bias row and the rest of their page
constexpr int MAX_SLICES = 4;

// As in lora_slots.py.
constexpr int HAS_GAIN = 1 << 16;
constexpr int HAS_BIAS = 1 << 17;
constexpr int IS_BLEND = 1 << 18;

// Mirrored by lora_cuda.Launch. Pitches and strides are in elements.
struct Launch {
    const void* a;                  // A and B of this layer and linear in page 0
    const void* b;
    const void* x;
    void* y;
    float* partial;                 // [splits, num_rows, num_slices, MAX_RANK], by place in the step's row list
    const int* step;                // see lora_tiles.py
    const int* slots;               // [rows, slots_pitch], see lora_slots.py
    long long page_stride;
    long long x_pitch;
    long long y_pitch;
    int a_pitch;
    int b_pitch;
    int slots_pitch;
    int factors_at;                 // in a row of slots
    int slices_at;                  // this linear's first slice in a row of slots
    int num_rows;
    int in_features;
    int num_slices;
    int splits;                     // of in_features
    int split_width;
    int column_blocks;              // of all slices
    int y_column[MAX_SLICES];
    int b_column[MAX_SLICES];
    int width[MAX_SLICES];
};

struct Tile {
    int slot;
    int first;                      // its first row's place in the row list
    int count;
    int rows_at;                    // in the step's table: the numbers of its rows in x and y
};

__device__ int num_tiles(const Launch& launch) { return launch.step[0]; }

__device__ Tile tile_at(const Launch& launch, int index) {
    const int4 entry = reinterpret_cast<const int4*>(launch.step)[1 + index];
    return {entry.x, entry.y, entry.z, launch.step[1] + entry.y};
}

// The number in x and y of a tile's row.
__device__ int row_number(const Launch& launch, const Tile& tile, int place) {
    return launch.step[tile.rows_at + place];
}

// What a slot has of a slice: rank rows, then a gain row and a bias row in B.
struct Rows {
    int entry;                      // as in the slot table

    __device__ int rank() const { return entry & 0xffff; }
    __device__ bool has_gain() const { return entry & HAS_GAIN; }
    __device__ bool has_bias() const { return entry & HAS_BIAS; }
    __device__ bool is_blend() const { return entry & IS_BLEND; }  // of factors for its pages
    __device__ int count() const { return rank() + has_gain() + has_bias(); }
};

__device__ Rows rows_of(const Launch& launch, int slot, int slice) {
    return {launch.slots[static_cast<long long>(slot) * launch.slots_pitch + launch.slices_at + slice]};
}

__device__ const int* pages_of(const Launch& launch, int slot) {
    return launch.slots + static_cast<long long>(slot) * launch.slots_pitch;
}

__device__ float factor_of(const Launch& launch, const int* pages, int row) {
    return __int_as_float(pages[launch.factors_at + row / PAGE_ROWS]);
}

__device__ float* partial_at(const Launch& launch, int split, int place, int slice) {
    const long long row = static_cast<long long>(split) * launch.num_rows + place;
    return launch.partial + (row * launch.num_slices + slice) * MAX_RANK;
}

// Weights never change under a kernel. Volatile all the same: loads are issued where they are written, early.
__device__ uint4 load_weights(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

// Activations do, until the kernel before this one is done: not to be moved above the wait.
__device__ uint4 load_activations(const void* address) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ float load_partial(const float* address) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
    return v;
}

__device__ void mma_tf32(float (&d)[4], float2 low, float2 high, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(low.x)), "r"(__float_as_uint(low.y)), "r"(__float_as_uint(high.x)),
          "r"(__float_as_uint(high.y)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The part of a float that TF32 keeps.
__device__ float tf32_part(float v) { return __uint_as_float(__float_as_uint(v) & 0xffffe000u); }

__device__ uint component(const uint4& v, int index) {
    return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}

// ---------------------------------------------------------------------------------------------------------
// Shrink: partial[split][place][slice][rank] = x[row, columns of split] . A_slice[rank, columns of split]
//
// A block takes one tile, slice and split; its warps take every fourth run of 32 columns. A product is
// [16 rank rows, 16 columns] x [16 columns, 8 rows of x]. A thread loads 8 neighbouring columns of its rank rows
// and of its row of x, and feeds them to two products: which column is which k is free, as long as both
// operands agree.

template <typename Type, int GROUPS, int RUNS>
struct ShrinkWarp {
    float sum[GROUPS][4];           // ranks (g, g + 8) x rows (2t, 2t + 1) of each group

    // begin: the warp's first column, so that its lanes stay together; `lane_column` is added where they load.
    __device__ void run(const ushort* const (&a)[2], const ushort* const (&x)[GROUPS], int begin, int end,
                        int lane_column) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            for (float& element : sum[group]) element = 0.0f;
        }
        for (int column = begin; column < end; column += RUNS * WARPS * 32) {
            uint4 weights[RUNS][2], inputs[RUNS][GROUPS];
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
                const int at = column + run * WARPS * 32 + lane_column;
                load(weights[run], inputs[run], a, x, at, at < end);
            }
#pragma unroll
            for (int run = 0; run < RUNS; ++run) multiply(weights[run], inputs[run]);
        }
    }

    __device__ static void load(uint4 (&weights)[2], uint4 (&inputs)[GROUPS], const ushort* const (&a)[2],
                                const ushort* const (&x)[GROUPS], int column, bool inside) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            weights[half] = {0, 0, 0, 0};
            if (inside && a[half]) weights[half] = load_weights(a[half] + column);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            inputs[group] = {0, 0, 0, 0};
            if (inside && x[group]) inputs[group] = load_activations(x[group] + column);
        }
    }

    __device__ void multiply(const uint4 (&w)[2], const uint4 (&x)[GROUPS]) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            Type::mma(sum[group], w[0].x, w[1].x, w[0].y, w[1].y, x[group].x, x[group].y);
            Type::mma(sum[group], w[0].z, w[1].z, w[0].w, w[1].w, x[group].z, x[group].w);
        }
    }
};

template <typename Type, int TILE, int RUNS>
__device__ void shrink_item(const Launch& launch, const Tile& tile, int slice, int split) {
    constexpr int GROUPS = TILE / GROUP;
    __shared__ float sums[WARPS][TILE][RANK_BLOCK + 1];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Rows rows = rows_of(launch, tile.slot, slice);
    const int* pages = pages_of(launch, tile.slot);
    const int begin = split * launch.split_width + warp * 32;
    const int end = min((split + 1) * launch.split_width, launch.in_features);
    const ushort* x[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int place = group * GROUP + g;
        x[group] = place < tile.count
            ? static_cast<const ushort*>(launch.x) + row_number(launch, tile, place) * launch.x_pitch
            : nullptr;
    }
    for (int first = 0; first < rows.rank(); first += RANK_BLOCK) {
        const ushort* a[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            a[half] = first + half * PAGE_ROWS + g < rows.rank()
                ? static_cast<const ushort*>(launch.a) + pages[first / PAGE_ROWS + half] * launch.page_stride
                    + (slice * PAGE_ROWS + g) * static_cast<long long>(launch.a_pitch)
                : nullptr;
        }
        ShrinkWarp<Type, GROUPS, RUNS> product;
        product.run(a, x, begin, end, t * VECTOR);
        __syncthreads();            // the sums of the ranks before are read
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int place = group * GROUP + 2 * t;
            sums[warp][place][g] = product.sum[group][0];
            sums[warp][place + 1][g] = product.sum[group][1];
            sums[warp][place][g + 8] = product.sum[group][2];
            sums[warp][place + 1][g + 8] = product.sum[group][3];
        }
        __syncthreads();
        for (int element = threadIdx.x; element < tile.count * RANK_BLOCK; element += THREADS) {
            const int place = element / RANK_BLOCK, row = element % RANK_BLOCK;
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) sum += sums[other][place][row];
            if (rows.is_blend()) sum *= factor_of(launch, pages, first + row);
            partial_at(launch, split, tile.first + place, slice)[first + row] = sum;
        }
    }
}

// One warp for each element, in float32 throughout.
__device__ void shrink_item_float32(const Launch& launch, const Tile& tile, int slice, int split) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Rows rows = rows_of(launch, tile.slot, slice);
    const int* pages = pages_of(launch, tile.slot);
    const int end = min((split + 1) * launch.split_width, launch.in_features);
    for (int element = warp; element < tile.count * rows.rank(); element += WARPS) {
        const int place = element / rows.rank(), row = element % rows.rank();
        const float* x = static_cast<const float*>(launch.x) + row_number(launch, tile, place) * launch.x_pitch;
        const float* a = static_cast<const float*>(launch.a) + pages[row / PAGE_ROWS] * launch.page_stride
            + (slice * PAGE_ROWS + row % PAGE_ROWS) * static_cast<long long>(launch.a_pitch);
        float sum = 0.0f;
        for (int column = split * launch.split_width + 4 * lane; column < end; column += 128) {
            const uint4 u = load_activations(x + column), w = load_weights(a + column);
            sum = fmaf(__uint_as_float(u.x), __uint_as_float(w.x), sum);
            sum = fmaf(__uint_as_float(u.y), __uint_as_float(w.y), sum);
            sum = fmaf(__uint_as_float(u.z), __uint_as_float(w.z), sum);
            sum = fmaf(__uint_as_float(u.w), __uint_as_float(w.w), sum);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (rows.is_blend()) sum *= factor_of(launch, pages, row);
        if (lane == 0) partial_at(launch, split, tile.first + place, slice)[row] = sum;
    }
}

template <typename Item>
__device__ void for_each_shrink_item(const Launch& launch, Item item) {
    let_next_kernel_start();        // it waits for all that this one writes before it reads any of it
    wait_for_previous_kernel();
    const int items = num_tiles(launch) * launch.num_slices * launch.splits;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
        const int part = index / launch.splits;
        item(tile_at(launch, part / launch.num_slices), part % launch.num_slices, index % launch.splits);
    }
}

// ---------------------------------------------------------------------------------------------------------
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
        const float2 factor = Type::unpack(component(gain, pair));
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float2 before = Type::unpack(component(y[row], pair));
            sum[pair][row] = factor.x * before.x;
            sum[pair][2 + row] = factor.y * before.y;
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

    // Row r of the page and the first column; lanes beyond the slice read its last columns once more.
    __device__ static void load(uint4 (&rows)[PAGE_ROWS], const Launch& launch, const ExpandItem& item,
                                const int* pages, int page) {
        const int last = item.num_rows - 1 - page * PAGE_ROWS;
        if (last < 0) return;
        const int within = min(item.column + column(), launch.width[item.slice] - VECTOR);
        const ushort* b = row_of_b<ushort>(launch, pages, page * PAGE_ROWS) + launch.b_column[item.slice] + within;
#pragma unroll
        for (int row = 0; row < PAGE_ROWS; ++row) {
            rows[row] = load_weights(b + min(row, last) * launch.b_pitch);  // what is read twice counts once
        }
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
        const int row = item.rows.rank();
        const int within = min(item.column + column(), launch.width[item.slice] - VECTOR);
        const uint4 gain = load_weights(row_of_b<ushort>(launch, pages, row) + launch.b_column[item.slice] + within);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 factor = Type::unpack(component(gain, pair)), before = Type::unpack(component(y, pair));
            sum[2 * pair] = factor.x * before.x;
            sum[2 * pair + 1] = factor.y * before.y;
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
        RowWarp<Type> product;
        product.begin(launch, item, pages, before);
#pragma unroll
        for (int page = 0; page < KEPT; ++page) {
            if (page * PAGE_ROWS < item.num_rows) product.multiply(rows[page], shrunk + page * PAGE_ROWS);
        }
        for (int page = KEPT; page * PAGE_ROWS < item.num_rows; ++page) {
            RowWarp<Type>::load(rows[0], launch, item, pages, page);
            product.multiply(rows[0], shrunk + page * PAGE_ROWS);
        }
        if (inside) *reinterpret_cast<uint4*>(y) = product.added_to(before);
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

// Tiles of several rows, then those of one: in one loop both would want their registers at once.
template <typename Type>
__device__ void expand(const Launch& launch) {
    __shared__ Shrunk shrunk;
    __shared__ RowOfShrunk rows_of_shrunk[WARPS];
    const Range items = items_of_block(launch);
    for_each_tile(launch, items, [&](const Tile& tile, const Range& own) {
        if (tile.count > 1) expand_tile<Type>(launch, tile, own, shrunk);
    });
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

// ---------------------------------------------------------------------------------------------------------
// Entry points. The number in a name is the most rows of a tile. BLOCKS of a multiprocessor leave each thread the
// registers for all loads of a turn to be in flight at once: 128 with four, 168 with three. Left to itself the
// compiler takes fewer registers and waits for each load.

// A tile of one group of rows leaves registers for more loads of A.
#define SHRINK(NAME, TYPE, TILE, RUNS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Launch launch) {   \
        for_each_shrink_item(launch, [&](const Tile& tile, int slice, int split) {                                \
            if (tile.count <= GROUP) {                                                                            \
                shrink_item<TYPE, GROUP, 8>(launch, tile, slice, split);                                          \
            } else {                                                                                              \
                shrink_item<TYPE, TILE, RUNS>(launch, tile, slice, split);                                        \
            }                                                                                                     \
        });                                                                                                       \
    }

#define EXPAND(NAME, BODY)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) NAME(const __grid_constant__ Launch launch) {        \
        BODY(launch);                                                                                             \
    }

SHRINK(shrink_bfloat16_16, BFloat16, 16, 4, 4)
SHRINK(shrink_bfloat16_64, BFloat16, 64, 2, 3)
SHRINK(shrink_float16_16, Float16, 16, 4, 4)
SHRINK(shrink_float16_64, Float16, 64, 2, 3)
EXPAND(expand_bfloat16, expand<BFloat16>)
EXPAND(expand_float16, expand<Float16>)
EXPAND(expand_float32, expand_in_float32)

extern "C" __global__ void __launch_bounds__(THREADS, 4) shrink_float32(const __grid_constant__ Launch launch) {
    for_each_shrink_item(launch, [&](const Tile& tile, int slice, int split) {
        shrink_item_float32(launch, tile, slice, split);
    });
}
