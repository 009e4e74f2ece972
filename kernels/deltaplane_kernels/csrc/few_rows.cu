// A linear of few rows: y = x W^T + bias. Shapes and costs are in few_rows_cuda.py. For compute capability 9 and above.
//
// All there is to it is to read W once, at the speed of the memory:
//
// * A block takes OUTPUTS rows of W at a time, a strip, and goes on to further strips. One thread asks for a strip's
//   columns, COLUMNS at a time, by tensor copies into a ring of STAGES places in shared memory, ahead of the products
//   and beyond the end of a strip too.
// * The multiplying warps share out the columns of a place. When a strip ends they add up what each has, in a fixed
//   order, so that equal products give equal bits.
// * W is asked for before the kernel ahead has ended, which does not write it (programmatic dependent launch): the
//   memory works while small kernels run between two products.
// * A tensor-core product is [16 rows of W, 16 columns] x [16 columns, 8 rows of x]. A thread reads 8 neighbouring
//   columns of its rows and feeds them to two products: which column is which k is free, as long as both operands
//   agree.

#include "elements.cuh"
#include "barriers.cuh"
#include "bulk_copies.cuh"

constexpr int WARPS = 8;              // that multiply
constexpr int MULTIPLYING = WARPS * 32;
constexpr int THREADS = MULTIPLYING + 32;
constexpr int OUTPUTS = 32;           // of a strip
constexpr int COLUMNS = 512;          // of a place
constexpr int STAGES = 4;
constexpr int BOXES = COLUMNS / BOX;
constexpr int RUN = 4 * VECTOR;       // columns that a warp reads of a row at once
constexpr int RUNS = COLUMNS / (WARPS * RUN);

// Mirrored by few_rows_cuda.FewRowLaunch.
struct Launch {
    TensorMap weight;                 // [out_features, in_features], OUTPUTS rows
    TensorMap x;                      // [num_rows, in_features], ROWS rows
    const void* bias;                 // [out_features], or null
    void* y;                          // [num_rows, out_features]
    long long y_pitch;                // in elements
    int num_rows;
    int in_features;
    int out_features;
};

// ROWS: of x, at most.
template <int ROWS>
struct Shared {
    static constexpr int TURNS = ROWS > GROUP ? 1 : 2;

    ushort weight[STAGES][BOXES][OUTPUTS][BOX];
    ushort x[STAGES][BOXES][ROWS][BOX];
    float sums[TURNS][WARPS][ROWS][OUTPUTS + 4];  // the pad spreads a warp's stores over all banks
    Barrier full[STAGES];             // a place holds what was asked for
    Barrier empty[STAGES];            // all warps have read it
};

__device__ void sync_multiplying_warps() { asm volatile("bar.sync 1, %0;" :: "n"(MULTIPLYING) : "memory"); }

// ---------------------------------------------------------------------------------------------------------
// The places of the ring, in the order in which they are filled: strip by strip, columns from left to right.

struct Place {
    int strip = static_cast<int>(blockIdx.x);
    int column = 0;
    int stage = 0;
    int phase = 0;                    // of the stage's barriers

    __device__ void advance(const Launch& launch) {
        column += COLUMNS;
        if (column >= launch.in_features) {
            column = 0;
            strip += gridDim.x;
        }
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

template <int ROWS>
__device__ void copy_weight(const Launch& launch, Shared<ROWS>& shared, const Place& place) {
    arrive_and_expect(&shared.full[place.stage], (OUTPUTS + ROWS) * COLUMNS * 2);
    Barrier* full = &shared.full[place.stage];
    copy_matrix(shared.weight[place.stage], launch.weight, place.column, place.strip * OUTPUTS, full);
}

template <int ROWS>
__device__ void copy_x(const Launch& launch, Shared<ROWS>& shared, const Place& place) {
    copy_matrix(shared.x[place.stage], launch.x, place.column, 0, &shared.full[place.stage]);
}

template <int ROWS>
__device__ void fill(const Launch& launch, Shared<ROWS>& shared, int strips) {
    Place place, first;
    int ahead = 0;                    // places filled with what the kernel ahead does not write
    for (; ahead < STAGES && place.strip < strips; ++ahead) {
        copy_weight(launch, shared, place);
        place.advance(launch);
    }
    wait_for_previous_kernel();
    for (; ahead > 0; --ahead) {
        copy_x(launch, shared, first);
        first.advance(launch);
    }
    while (place.strip < strips) {
        await(&shared.empty[place.stage], place.phase ^ 1);
        copy_weight(launch, shared, place);
        copy_x(launch, shared, place);
        place.advance(launch);
    }
}

// ---------------------------------------------------------------------------------------------------------
// What one warp multiplies of a strip. A thread holds, of each product, outputs (g, g + 8) x rows of x (2t, 2t + 1) of
// each group.

template <typename Type, int ROWS>
struct WarpProduct {
    static constexpr int GROUPS = ROWS / GROUP;
    float sum[GROUPS][OUTPUTS / 16][4];

    __device__ void clear() {
#pragma unroll
        for (auto& group : sum) {
#pragma unroll
            for (auto& outputs : group) {
#pragma unroll
                for (float& element : outputs) element = 0.0f;
            }
        }
    }

    // columns: that are left of W's from the place on; what a place has beyond them is zeros.
    __device__ void add(const Shared<ROWS>& shared, int stage, int columns) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int begin = (run * WARPS + warp) * RUN;
            if (begin >= columns) break;
            const int box = begin / BOX, swizzled = (begin % BOX / VECTOR + t ^ g) * VECTOR;
            uint4 inputs[GROUPS];
#pragma unroll
            for (int n = 0; n < GROUPS; ++n) inputs[n] = read(shared.x[stage][box][n * GROUP + g] + swizzled);
#pragma unroll
            for (int m = 0; m < OUTPUTS / 16; ++m) {
                const uint4 low = read(shared.weight[stage][box][m * 16 + g] + swizzled);
                const uint4 high = read(shared.weight[stage][box][m * 16 + 8 + g] + swizzled);
#pragma unroll
                for (int n = 0; n < GROUPS; ++n) {
                    Type::mma(sum[n][m], low.x, high.x, low.y, high.y, inputs[n].x, inputs[n].y);
                    Type::mma(sum[n][m], low.z, high.z, low.w, high.w, inputs[n].z, inputs[n].w);
                }
            }
        }
    }

    __device__ static uint4 read(const ushort* address) { return *reinterpret_cast<const uint4*>(address); }

    __device__ void store(float (&sums)[ROWS][OUTPUTS + 4]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
            for (int m = 0; m < OUTPUTS / 16; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[n * GROUP + 2 * t + e % 2][m * 16 + g + e / 2 * 8] = sum[n][m][e];
            }
        }
    }
};

// Two neighbouring outputs of a row each. output: the strip's first one.
template <typename Type, int ROWS>
__device__ void write(const Launch& launch, const float (&sums)[WARPS][ROWS][OUTPUTS + 4], int output) {
    const int pair = static_cast<int>(threadIdx.x);
    const int row = pair / (OUTPUTS / 2), own = pair % (OUTPUTS / 2) * 2;
    if (row >= launch.num_rows) return;
    float2 total = {0.0f, 0.0f};
    if (launch.bias) {
        total = Type::unpack(*reinterpret_cast<const uint*>(static_cast<const ushort*>(launch.bias) + output + own));
    }
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        total.x += sums[warp][row][own];
        total.y += sums[warp][row][own + 1];
    }
    ushort* y = static_cast<ushort*>(launch.y) + row * launch.y_pitch + output + own;
    *reinterpret_cast<uint*>(y) = Type::pack(total);
}

template <typename Type, int ROWS>
__device__ void multiply(const Launch& launch, Shared<ROWS>& shared, int strips) {
    constexpr int TURNS = Shared<ROWS>::TURNS;
    wait_for_previous_kernel();       // which may read what is written here
    Place place;
    WarpProduct<Type, ROWS> product;
    for (int turn = 0; place.strip < strips; ++turn) {
        const int strip = place.strip;
        product.clear();
        while (place.strip == strip) {
            await(&shared.full[place.stage], place.phase);
            product.add(shared, place.stage, launch.in_features - place.column);
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(&shared.empty[place.stage]);
            place.advance(launch);
        }
        auto& sums = shared.sums[turn % TURNS];
        if (TURNS == 1) sync_multiplying_warps();  // else those of the turn before may still be read
        product.store(sums[threadIdx.x / 32]);
        sync_multiplying_warps();
        write<Type, ROWS>(launch, sums, strip * OUTPUTS);
    }
}

template <typename Type, int ROWS>
__device__ void run(const Launch& launch) {
    extern __shared__ __align__(1024) uint4 memory[];  // as the swizzle counts from there
    auto& shared = *reinterpret_cast<Shared<ROWS>*>(memory);
    const int strips = launch.out_features / OUTPUTS;
    let_next_kernel_start();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(&shared.full[stage], 1);
            make_barrier(&shared.empty[stage], WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < MULTIPLYING) {
        multiply<Type>(launch, shared, strips);
    } else if (threadIdx.x == MULTIPLYING) {
        fill(launch, shared, strips);
    }
}

static_assert(sizeof(Shared<8>) == 182336 && sizeof(Shared<16>) == 215104);

#define FEW_ROWS(NAME, TYPE, ROWS)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Launch launch) {        \
        run<TYPE, ROWS>(launch);                                                                                  \
    }

FEW_ROWS(few_rows_bfloat16_8, BFloat16, 8)
FEW_ROWS(few_rows_bfloat16_16, BFloat16, 16)
FEW_ROWS(few_rows_float16_8, Float16, 8)
FEW_ROWS(few_rows_float16_16, Float16, 16)
