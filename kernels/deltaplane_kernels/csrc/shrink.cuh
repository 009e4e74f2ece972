// Shrink: partial[split][place][slice][rank] = x[row, columns of split] . A_slice[rank, columns of split]
//
// A block takes one tile, slice and split; its warps take every fourth run of 32 columns. A product is
// [16 rank rows, 16 columns] x [16 columns, 8 rows of x]. A thread loads 8 neighbouring columns of its rank rows
// and of its row of x, and feeds them to two products: which column is which k is free, as long as both
// operands agree.
//
// It is launched behind the base product of the same x and runs beside it, where that one announces that x is there, and
// ahead of a product that does not. Expand comes behind both: were they two branches of a graph, it could not start
// before both have ended.

// Until x is there; all threads of a block call it, and only the first call waits.
struct AwaitX {
    const Launch& launch;
    bool is_there = false;

    __device__ void operator()() {
        if (is_there) return;
        is_there = true;
        if (launch.x_is_there) {
            await_announcement(launch.x_is_there);
        } else {
            wait_for_previous_kernel();
        }
    }
};

template <typename Type, int GROUPS, int RUNS>
struct ShrinkWarp {
    float sum[GROUPS][4];           // ranks (g, g + 8) x rows (2t, 2t + 1) of each group

    // begin: the warp's first column, so that its lanes stay together; `lane_column` is added where they load.
    // The first weights are asked for before x is there.
    __device__ void run(const ushort* const (&a)[2], const ushort* const (&x)[GROUPS], int begin, int end,
                        int lane_column, AwaitX& await_x) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            for (float& element : sum[group]) element = 0.0f;
        }
        uint4 weights[RUNS][2];
        load_turn<load_weights>(weights, a, begin + lane_column, end);
        await_x();
        for (int column = begin; column < end;) {
            uint4 inputs[RUNS][GROUPS];
            load_turn<load_activations>(inputs, x, column + lane_column, end);
#pragma unroll
            for (int run = 0; run < RUNS; ++run) multiply(weights[run], inputs[run]);
            column += RUNS * WARPS * 32;
            if (column < end) load_turn<load_weights>(weights, a, column + lane_column, end);
        }
    }

    // 8 columns of each run, from `column` on, of some rows; zeros where a row is null and beyond the end.
    template <uint4 LOAD(const void*), int COUNT>
    __device__ static void load_turn(uint4 (&values)[RUNS][COUNT], const ushort* const (&rows)[COUNT], int column,
                                     int end) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int at = column + run * WARPS * 32;
#pragma unroll
            for (int index = 0; index < COUNT; ++index) {
                values[run][index] = {0, 0, 0, 0};
                if (at < end && rows[index]) values[run][index] = LOAD(rows[index] + at);
            }
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
__device__ void shrink_item(const Launch& launch, const Tile& tile, int slice, int split, AwaitX& await_x) {
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
        product.run(a, x, begin, end, t * VECTOR, await_x);
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
__device__ void shrink_item_float32(const Launch& launch, const Tile& tile, int slice, int split, AwaitX& await_x) {
    await_x();
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
    AwaitX await_x{launch};
    const int items = num_tiles(launch) * launch.num_slices * launch.splits;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
        const int part = index / launch.splits;
        item(tile_at(launch, part / launch.num_slices), part % launch.num_slices, index % launch.splits, await_x);
    }
    await_x();                      // blocks without work wait too
    if (blockIdx.x == 0) wait_for_previous_kernel();  // this kernel must not end before that one
}
