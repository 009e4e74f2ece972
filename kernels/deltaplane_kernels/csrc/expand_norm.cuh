// Expand with what follows it in a layer, for a linear of one slice: of each row of the step
//
//     residual += y + delta                                 delta as in expand.cuh
//     out = weight * residual / sqrt(mean(residual^2) + eps)
//
// A cluster of blocks takes a row, a thread 8 neighbouring columns of it, as a warp of expand does for a tile of one
// row; so nothing but the mean is known later than there. Blocks send their sums of squares into each other's shared
// memory, which takes no fence and one barrier. Rounds where norm_triton.py rounds.

constexpr int MAX_CLUSTER = 8;      // blocks
constexpr int MAX_THREADS = 512;    // of a block
constexpr int MAX_SQUARES = MAX_CLUSTER * MAX_THREADS / 32;

// Mirrored by lora_launch.NormLaunch.
struct NormLaunch {
    Launch op;
    void* residual;                 // [rows, width]
    void* out;                      // [rows, width]
    const void* weight;             // [width]
    const int* weight_slots;        // of each row, below 0 without one; null where all rows have `weight`
    const long long* weight_offsets;  // of each slot, below 0 where it has `weight`
    const void* weight_pool;        // where the offsets begin
    long long weight_offset_stride;
    int cluster;                    // blocks of one
    int block_columns;
    float eps;
};

struct NormShared {
    RowOfShrunk shrunk;
    float squares[MAX_SQUARES];     // of each warp of the cluster
    Barrier squares_are_there;
};

// Makes sum_over_cluster() ready: no block sends before all can receive.
__device__ void expect_squares(NormShared& shared, int cluster) {
    if (threadIdx.x == 0) {
        make_barrier(&shared.squares_are_there, 1);
        publish_barriers();
        arrive_and_expect(&shared.squares_are_there, cluster * blockDim.x / 32 * sizeof(float));
    }
    announce_to_cluster();
}

// Over all threads of the cluster, in one order.
__device__ float sum_over_cluster(float sum, int cluster, NormShared& shared) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    wait_for_cluster();
    if (lane < cluster) {
        send_to_block(&shared.squares[blockIdx.x % cluster * warps + warp], &shared.squares_are_there, lane, sum);
    }
    await_blocks(&shared.squares_are_there);
    sum = 0.0f;
    for (int index = 0; index < cluster * warps; ++index) sum += shared.squares[index];
    return sum;
}

// A warp's columns of a row.
__device__ ExpandItem norm_item(const NormLaunch& launch, const Tile& row) {
    ExpandItem item;
    item.tile = row;
    item.slice = 0;
    item.column = blockIdx.x % launch.cluster * launch.block_columns + threadIdx.x / 32 * COLUMN_BLOCK;
    item.enter_slice(launch.op);
    return item;
}

__device__ float fast_quotient(float dividend, float divisor) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(dividend), "f"(divisor));
    return quotient;
}

// Of a row; below 0 where it has `weight`.
__device__ int weight_slot(const NormLaunch& launch, int number) {
    return launch.weight_slots ? launch.weight_slots[number] : -1;
}

__device__ const ushort* norm_weight(const NormLaunch& launch, int slot) {
    const long long offset = slot < 0 ? -1 : launch.weight_offsets[slot * launch.weight_offset_stride];
    return offset < 0 ? static_cast<const ushort*>(launch.weight)
                      : static_cast<const ushort*>(launch.weight_pool) + offset;
}

template <typename Type>
__device__ uint4 sum_of(const uint4& one, const uint4& other) {
    uint result[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const float2 a = Type::unpack(component(one, pair)), b = Type::unpack(component(other, pair));
        result[pair] = Type::pack({a.x + b.x, a.y + b.y});
    }
    return {result[0], result[1], result[2], result[3]};
}

template <typename Type>
__device__ float sum_of_squares(const uint4& values) {
    float sum = 0.0f;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const float2 wide = Type::unpack(component(values, pair));
        sum = fmaf(wide.x, wide.x, sum);
        sum = fmaf(wide.y, wide.y, sum);
    }
    return sum;
}

template <typename Type>
__device__ uint4 normed(const uint4& values, float inverse, const uint4& weight) {
    uint result[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const float2 wide = Type::unpack(component(values, pair));
        const uint quotient = Type::pack({wide.x * inverse, wide.y * inverse});
        result[pair] = Type::pack(product<Type>(quotient, component(weight, pair)));
    }
    return {result[0], result[1], result[2], result[3]};
}

template <typename Type>
__device__ void add_and_norm_row(const NormLaunch& launch, int number, const Tile& row) {
    using Warp = RowWarp<Type>;
    __shared__ NormShared shared;
    const Launch& op = launch.op;
    const ExpandItem item = norm_item(launch, row);
    const int* pages = pages_of(op, row.slot);
    const int own_weight = weight_slot(launch, number);
    uint4 rows[KEPT][PAGE_ROWS];
#pragma unroll
    for (int page = 0; page < KEPT; ++page) Warp::load(rows[page], op, item, pages, page);
    const int column = item.column + Warp::column();
    const bool inside = static_cast<int>(threadIdx.x) * VECTOR < launch.block_columns && column < op.width[0];
    const long long place = static_cast<long long>(number) * op.width[0] + column;
    ushort* residual = static_cast<ushort*>(launch.residual) + place;
    uint4 y = {0, 0, 0, 0}, before = {0, 0, 0, 0}, weight = {0, 0, 0, 0};
    expect_squares(shared, launch.cluster);
    wait_for_previous_kernel();
    if (inside) {
        y = load_activations(static_cast<const ushort*>(op.y) + number * op.y_pitch + column);
        before = load_activations(residual);
    }
    for (int rank = threadIdx.x; rank < page_rows(item); rank += blockDim.x) {
        shared.shrunk[rank] = shrunk_value(op, item, 0, rank);
    }
    __syncthreads();
    if (inside) weight = load_weights(norm_weight(launch, own_weight) + column);
    if (item.num_rows > 0) y = Warp::with_delta(y, rows, op, item, pages, shared.shrunk);
    const uint4 after = sum_of<Type>(y, before);
    const float squares = sum_over_cluster(inside ? sum_of_squares<Type>(after) : 0.0f, launch.cluster, shared);
    const float inverse = rsqrtf(fast_quotient(squares, static_cast<float>(op.width[0])) + launch.eps);
    if (inside) {
        *reinterpret_cast<uint4*>(residual) = after;
        *reinterpret_cast<uint4*>(static_cast<ushort*>(launch.out) + place) = normed<Type>(after, inverse, weight);
    }
}

// A grid of a cluster for each row; those beyond the step's leave all as it is.
template <typename Type>
__device__ void expand_add_rms_norm(const NormLaunch& launch) {
    let_next_kernel_start();        // it waits for all that this one writes before it reads any of it
    const int number = blockIdx.x / launch.cluster;
    const Tile row = tile_of_row(launch.op, number);
    const bool is_of_step = number < num_step_rows(launch.op), is_known = row.slot >= 0;  // arrive at once
    if (is_of_step & is_known) add_and_norm_row<Type>(launch, number, row);
    wait_for_previous_kernel();     // blocks without work wait too: this kernel must not end before that one
    take_back_announcement(launch.op);
}
