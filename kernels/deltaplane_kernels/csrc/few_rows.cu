// A linear of few rows: y = x W^T + bias. Shapes and costs are in few_rows_cuda.py. For compute capability 9.0.
//
// All there is to it is to read W once, at the speed of the memory:
//
// * A block takes tiles of OUTPUTS rows of W, or a part of the columns of one: then the blocks of a cluster take one
//   part each and send each other what they have of the sums, in shared memory, a share of the outputs to each.
// * One thread asks for pieces of W, COLUMNS wide, by tensor copies into a ring of places in shared memory, ahead of
//   the products; another one does so for x, which comes from L2, again for each tile.
// * W is asked for before the kernel ahead has ended, which does not write it (programmatic dependent launch): the
//   memory works while small kernels run between two products. But only some pieces are on their way at once. More
//   would stand in queues before the memory, and with them x and what the small kernels read.
// * A warpgroup multiplies [ROWS of x, 16 columns] x [16 columns, OUTPUTS rows of W] from shared memory, at a third of
//   what it could. Rows that x does not have are whatever lies behind x's place: no product mixes rows.
// * It takes a third of the registers of a multiprocessor, so that LoRA's shrink runs beside it, and announces that x
//   is there, for which shrink waits (shrink.cuh).

#include "elements.cuh"
#include "barriers.cuh"
#include "bulk_copies.cuh"
#include "clusters.cuh"
#include "warpgroup_product.cuh"

constexpr int MULTIPLYING = 128;      // threads: a warpgroup
constexpr int THREADS = MULTIPLYING + 2 * 32;  // of the last two warps one thread each copies, W and x
constexpr int ROWS = 64;              // of x, at most
constexpr int COLUMNS = 128;          // of a piece
constexpr int MAX_STAGES = 16;
constexpr int BARRIERS = 4 * MAX_STAGES + 1;  // of a block: full and empty ones of two rings, and that of the sums
constexpr int SUMS = MULTIPLYING + 1; // of GROUP outputs, 4 of a thread; the pad spreads reads over all banks

// Mirrored by few_rows_cuda.FewRowLaunch.
struct Launch {
    TensorMap weight;                 // [out_features, in_features], OUTPUTS rows
    TensorMap x;                      // [num_rows, in_features], x_rows rows
    const void* bias;                 // [out_features], or null
    int* x_is_there;                  // announced for the kernel behind this one, or null
    void* y;                          // [num_rows, out_features]
    long long y_pitch;                // in elements
    int num_rows;
    int in_features;
    int out_features;
    int x_rows;                       // num_rows or more, a multiple of GROUP
    int splits;                       // of the columns: blocks of a cluster. More than 1 take one tile each
    int weight_stages;                // places for pieces of W
    int x_stages;                     // and of x
    int weight_ahead;                 // pieces of W on their way at once, at most
};

struct Turn {
    int stage = 0;
    int phase = 0;                    // of the place's barriers

    __device__ void advance(int stages) {
        if (++stage < stages) return;
        stage = 0;
        phase ^= 1;
    }
};

// Places for pieces, filled one after the other and again.
struct Ring {
    ushort* places;
    Barrier* full;                    // of each place: it holds a piece
    Barrier* empty;                   // all warps have read it
    int stages;
    int place_elements;

    __device__ ushort* place(const Turn& turn) const { return places + turn.stage * place_elements; }

    __device__ void make_barriers() const {
        for (int stage = 0; stage < stages; ++stage) {
            make_barrier(full + stage, 1);
            make_barrier(empty + stage, MULTIPLYING / 32);
        }
    }
};

// What a block has in shared memory. few_rows_cuda.weight_stages counts its bytes.
template <int OUTPUTS>
struct Shared {
    Ring weight;                      // places of [COLUMNS / BOX][OUTPUTS][BOX]
    Ring x;                           // places of [COLUMNS / BOX][x_rows][BOX]
    float4* sums;                     // [splits][groups of outputs][SUMS]
    Barrier* sums_are_there;

    __device__ Shared(const Launch& launch, uint4* memory) {
        weight.stages = launch.weight_stages;
        weight.place_elements = OUTPUTS * COLUMNS;
        weight.places = reinterpret_cast<ushort*>(memory);
        x.stages = launch.x_stages;
        x.place_elements = launch.x_rows * COLUMNS;
        x.places = weight.places + weight.stages * weight.place_elements;
        sums = reinterpret_cast<float4*>(x.places + x.stages * x.place_elements);
        Barrier* barriers = reinterpret_cast<Barrier*>(sums + OUTPUTS / GROUP * SUMS);
        weight.full = barriers;
        weight.empty = barriers + MAX_STAGES;
        x.full = barriers + 2 * MAX_STAGES;
        x.empty = barriers + 3 * MAX_STAGES;
        sums_are_there = barriers + BARRIERS - 1;
    }
};

// ---------------------------------------------------------------------------------------------------------
// A block's pieces of W and x, COLUMNS wide, in the order in which they are multiplied: tile by tile, columns from left
// to right.

struct Piece {
    int tile;
    int column;
    int begin, end;                   // of the block's columns

    __device__ explicit Piece(const Launch& launch) {
        const int part = blockIdx.x % launch.splits, pieces = ceil_div(launch.in_features, COLUMNS);
        tile = blockIdx.x / launch.splits;
        begin = part * pieces / launch.splits * COLUMNS;
        end = (part + 1) * pieces / launch.splits * COLUMNS;
        column = begin;
    }

    __device__ void advance(const Launch& launch) {
        column += COLUMNS;
        if (column < end) return;
        column = begin;
        tile += gridDim.x / launch.splits;
    }
};

__device__ void copy_piece(const Ring& ring, const Turn& turn, const TensorMap& matrix, int column, int row) {
    Barrier* full = ring.full + turn.stage;
    arrive_and_expect(full, ring.place_elements * 2);
    copy_matrix(ring.place(turn), matrix, column, row, full);
}

// The kernel ahead does not write W.
template <int OUTPUTS>
__device__ void copy_weight(const Launch& launch, const Ring& ring, int tiles) {
    Turn turn, landing;
    int ahead = 0;
    for (Piece piece(launch); piece.tile < tiles; piece.advance(launch)) {
        if (ahead == launch.weight_ahead) {
            await(ring.full + landing.stage, landing.phase);
            landing.advance(ring.stages);
        } else {
            ++ahead;
        }
        await(ring.empty + turn.stage, turn.phase ^ 1);
        copy_piece(ring, turn, launch.weight, piece.column, piece.tile * OUTPUTS);
        turn.advance(ring.stages);
    }
}

__device__ void copy_x(const Launch& launch, const Ring& ring, int tiles) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && launch.x_is_there) announce(launch.x_is_there);
    Turn turn;
    for (Piece piece(launch); piece.tile < tiles; piece.advance(launch)) {
        await(ring.empty + turn.stage, turn.phase ^ 1);
        copy_piece(ring, turn, launch.x, piece.column, 0);
        turn.advance(ring.stages);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Sums in shared memory, as the threads had them: see TileProduct.

template <typename Type>
__device__ uint4 packed(const float (&sums)[GROUP]) {
    return {Type::pack({sums[0], sums[1]}), Type::pack({sums[2], sums[3]}), Type::pack({sums[4], sums[5]}),
            Type::pack({sums[6], sums[7]})};
}

// Of a group of outputs, two rows: what 4 neighbouring threads had.
template <typename Type>
__device__ void write_group(const Launch& launch, const float4* sums, int share, int row, int output) {
    float total[2][GROUP] = {};
    if (launch.bias) {
        const uint4 bias = *reinterpret_cast<const uint4*>(static_cast<const ushort*>(launch.bias) + output);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 two = Type::unpack(component(bias, pair));
            total[0][2 * pair] = total[1][2 * pair] = two.x;
            total[0][2 * pair + 1] = total[1][2 * pair + 1] = two.y;
        }
    }
    for (int part = 0; part < launch.splits; ++part) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float4 two_rows = sums[part * share * SUMS + pair];
            total[0][2 * pair] += two_rows.x;
            total[0][2 * pair + 1] += two_rows.y;
            total[1][2 * pair] += two_rows.z;
            total[1][2 * pair + 1] += two_rows.w;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int number = row + half * 8;
        ushort* y = static_cast<ushort*>(launch.y) + number * launch.y_pitch + output;
        if (number < launch.num_rows) *reinterpret_cast<uint4*>(y) = packed<Type>(total[half]);
    }
}

// share: groups of outputs. Four neighbouring threads write 64 neighbouring bytes, of what these four have.
template <typename Type>
__device__ void write_sums(const Launch& launch, const float4* sums, int share, int first_output) {
    for (int item = threadIdx.x; item < ceil_div(share, 4) * 128; item += MULTIPLYING) {
        const int group = item / 128 * 4 + item % 4, quad = item % 128 / 4;
        const int output = first_output + group * GROUP;
        if (group >= share || output >= launch.out_features) continue;
        write_group<Type>(launch, sums + group * SUMS + quad * 4, share, quad / 8 * 16 + quad % 8, output);
    }
}

// ---------------------------------------------------------------------------------------------------------
// What the warpgroup has of a tile.

template <typename Type, int OUTPUTS>
struct TileProduct {
    static constexpr int GROUPS = OUTPUTS / GROUP;
    float sum[OUTPUTS / 2];

    __device__ void clear() {
#pragma unroll
        for (float& element : sum) element = 0.0f;
    }

    // x_rows: of a box of x.
    __device__ void add(const ushort* weight, const ushort* x, int x_rows) {
        begin_products();
#pragma unroll
        for (int box = 0; box < COLUMNS / BOX; ++box) {
            const Operand rows = operand(x + box * x_rows * BOX);
            const Operand outputs = operand(weight + box * OUTPUTS * BOX);
#pragma unroll
            for (int step = 0; step < BOX / 16; ++step) multiply<Type>(sum, rows.columns(step), outputs.columns(step));
        }
        end_products();
    }

    __device__ float4 group(int index) const {
        return {sum[4 * index], sum[4 * index + 1], sum[4 * index + 2], sum[4 * index + 3]};
    }

    // The block alone has all columns.
    __device__ void write(const Launch& launch, const Shared<OUTPUTS>& shared, int tile) const {
#pragma unroll
        for (int index = 0; index < GROUPS; ++index) shared.sums[index * SUMS + threadIdx.x] = group(index);
        __syncwarp();
        write_sums<Type>(launch, shared.sums, GROUPS, tile * OUTPUTS);
    }

    // Each block of the cluster gets what all have of its share of the outputs.
    __device__ void exchange_and_write(const Launch& launch, const Shared<OUTPUTS>& shared, int tile) const {
        const int own = blockIdx.x % launch.splits, share = GROUPS / launch.splits;
        wait_for_cluster();
#pragma unroll
        for (int index = 0; index < GROUPS; ++index) {
            const int owner = index * launch.splits / GROUPS;
            float4* target = shared.sums + (own * share + index - owner * share) * SUMS + threadIdx.x;
            send_to_block(target, shared.sums_are_there, owner, group(index));
        }
        await_blocks(shared.sums_are_there);
        write_sums<Type>(launch, shared.sums, share, tile * OUTPUTS + own * share * GROUP);
    }
};

template <typename Type, int OUTPUTS>
__device__ void multiply_tiles(const Launch& launch, const Shared<OUTPUTS>& shared, int tiles) {
    wait_for_previous_kernel();       // which may read what is written here
    const Ring &weight = shared.weight, &x = shared.x;
    Turn weight_turn, x_turn;
    Piece piece(launch);
    TileProduct<Type, OUTPUTS> product;
    while (piece.tile < tiles) {
        const int tile = piece.tile;
        product.clear();
        for (; piece.tile == tile; piece.advance(launch)) {
            await(weight.full + weight_turn.stage, weight_turn.phase);
            await(x.full + x_turn.stage, x_turn.phase);
            product.add(weight.place(weight_turn), x.place(x_turn), launch.x_rows);
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                arrive(weight.empty + weight_turn.stage);
                arrive(x.empty + x_turn.stage);
            }
            weight_turn.advance(weight.stages);
            x_turn.advance(x.stages);
        }
        if (launch.splits > 1) {
            product.exchange_and_write(launch, shared, tile);
        } else {
            product.write(launch, shared, tile);
        }
    }
}

template <int OUTPUTS>
__device__ void make_barriers(const Shared<OUTPUTS>& shared) {
    shared.weight.make_barriers();
    shared.x.make_barriers();
    make_barrier(shared.sums_are_there, 1);
    publish_barriers();
    arrive_and_expect(shared.sums_are_there, OUTPUTS * ROWS * sizeof(float));
}

template <typename Type, int OUTPUTS>
__device__ void run(const Launch& launch) {
    extern __shared__ __align__(1024) uint4 memory[];  // as the swizzle counts from there
    const Shared<OUTPUTS> shared(launch, memory);
    const int tiles = ceil_div(launch.out_features, OUTPUTS);
    let_next_kernel_start();
    if (threadIdx.x == 0) make_barriers(shared);
    if (launch.splits > 1) announce_to_cluster();  // what other blocks send can be received
    __syncthreads();
    if (threadIdx.x < MULTIPLYING) {
        multiply_tiles<Type>(launch, shared, tiles);
        return;
    }
    if (threadIdx.x == MULTIPLYING) copy_weight<OUTPUTS>(launch, shared.weight, tiles);
    if (threadIdx.x == MULTIPLYING + 32) copy_x(launch, shared.x, tiles);
    __syncwarp();
    if (launch.splits > 1) wait_for_cluster();  // as each thread does that has announced itself
}

#define FEW_ROWS(NAME, TYPE, OUTPUTS)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Launch launch) {        \
        run<TYPE, OUTPUTS>(launch);                                                                               \
    }

FEW_ROWS(few_rows_bfloat16_48, BFloat16, 48)
FEW_ROWS(few_rows_bfloat16_56, BFloat16, 56)
FEW_ROWS(few_rows_bfloat16_64, BFloat16, 64)
FEW_ROWS(few_rows_bfloat16_112, BFloat16, 112)
FEW_ROWS(few_rows_float16_48, Float16, 48)
FEW_ROWS(few_rows_float16_56, Float16, 56)
FEW_ROWS(few_rows_float16_64, Float16, 64)
FEW_ROWS(few_rows_float16_112, Float16, 112)
