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

constexpr int WARPS = 8;              // that multiply
constexpr int MULTIPLYING = WARPS * 32;
constexpr int THREADS = MULTIPLYING + 32;
constexpr int ROWS = GROUP;           // of x, at most
constexpr int OUTPUTS = 32;           // of a strip
constexpr int COLUMNS = 512;          // of a place
constexpr int STAGES = 4;
constexpr int BOX = 64;               // columns whose rows lie side by side in shared memory, 128 bytes each
constexpr int BOXES = COLUMNS / BOX;
constexpr int RUN = 4 * VECTOR;       // columns that a warp reads of a row at once
constexpr int RUNS = COLUMNS / (WARPS * RUN);

// A matrix as the driver encodes it: BOX columns of some rows, and so on for COLUMNS columns. In shared memory the 16
// bytes at place p of row r of BOX columns lie at place p ^ r % 8 (128-byte swizzle); what is beyond the matrix is
// zeros.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

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

using Barrier = unsigned long long;

struct Shared {
    ushort weight[STAGES][BOXES][OUTPUTS][BOX];
    ushort x[STAGES][BOXES][ROWS][BOX];
    float sums[2][WARPS][ROWS][OUTPUTS + 4];  // in turn; the pad spreads a warp's stores over all banks
    Barrier full[STAGES];             // a place holds what was asked for
    Barrier empty[STAGES];            // all warps have read it
};

// ---------------------------------------------------------------------------------------------------------
// Barriers and copies.

__device__ uint shared_address(const void* pointer) {
    return static_cast<uint>(__cvta_generic_to_shared(pointer));
}

__device__ void make_barrier(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

__device__ void arrive_and_expect(Barrier* barrier, int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(nbytes) : "memory");
}

// For the end of the barrier's phase 0, 1, 0, ...
__device__ void await(Barrier* barrier, int phase) {
    asm volatile("{.reg .pred ended;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@!ended bra again;}"
                 :: "r"(shared_address(barrier)), "r"(phase) : "memory");
}

// A matrix from a column, a multiple of BOX, and a row on; counts towards what the barrier expects.
__device__ void copy_matrix(void* target, const TensorMap& matrix, int column, int row, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {0, %2, %3}], [%4];"
                 :: "r"(shared_address(target)), "l"(&matrix), "r"(row), "r"(column / BOX),
                    "r"(shared_address(barrier)) : "memory");
}

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

__device__ void copy_weight(const Launch& launch, Shared& shared, const Place& place) {
    arrive_and_expect(&shared.full[place.stage], (OUTPUTS + ROWS) * COLUMNS * 2);
    Barrier* full = &shared.full[place.stage];
    copy_matrix(shared.weight[place.stage], launch.weight, place.column, place.strip * OUTPUTS, full);
}

__device__ void copy_x(const Launch& launch, Shared& shared, const Place& place) {
    copy_matrix(shared.x[place.stage], launch.x, place.column, 0, &shared.full[place.stage]);
}

__device__ void fill(const Launch& launch, Shared& shared, int strips) {
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
// What one warp multiplies of a strip. A thread holds, of each product, outputs (g, g + 8) x rows of x (2t, 2t + 1).

template <typename Type>
struct WarpProduct {
    float sum[OUTPUTS / 16][4];

    __device__ void clear() {
#pragma unroll
        for (auto& outputs : sum) {
#pragma unroll
            for (float& element : outputs) element = 0.0f;
        }
    }

    // columns: that are left of W's from the place on; what a place has beyond them is zeros.
    __device__ void add(const Shared& shared, int stage, int columns) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const int begin = (run * WARPS + warp) * RUN;
            if (begin >= columns) break;
            const int box = begin / BOX, swizzled = (begin % BOX / VECTOR + t ^ g) * VECTOR;
            const uint4 inputs = read(shared.x[stage][box][g] + swizzled);
#pragma unroll
            for (int m = 0; m < OUTPUTS / 16; ++m) {
                const uint4 low = read(shared.weight[stage][box][m * 16 + g] + swizzled);
                const uint4 high = read(shared.weight[stage][box][m * 16 + 8 + g] + swizzled);
                Type::mma(sum[m], low.x, high.x, low.y, high.y, inputs.x, inputs.y);
                Type::mma(sum[m], low.z, high.z, low.w, high.w, inputs.z, inputs.w);
            }
        }
    }

    __device__ static uint4 read(const ushort* address) { return *reinterpret_cast<const uint4*>(address); }

    __device__ void store(float (&sums)[ROWS][OUTPUTS + 4]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < OUTPUTS / 16; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[2 * t + e % 2][m * 16 + g + e / 2 * 8] = sum[m][e];
        }
    }
};

// Two neighbouring outputs of a row each. output: the strip's first one.
template <typename Type>
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

template <typename Type>
__device__ void multiply(const Launch& launch, Shared& shared, int strips) {
    wait_for_previous_kernel();       // which may read what is written here
    Place place;
    WarpProduct<Type> product;
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
        auto& sums = shared.sums[turn % 2];  // those of the turn before may still be read
        product.store(sums[threadIdx.x / 32]);
        sync_multiplying_warps();
        write<Type>(launch, sums, strip * OUTPUTS);
    }
}

template <typename Type>
__device__ void run(const Launch& launch) {
    extern __shared__ __align__(1024) uint4 memory[];  // as the swizzle counts from there
    Shared& shared = *reinterpret_cast<Shared*>(memory);
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

constexpr int SHARED_BYTES = 182336;
static_assert(sizeof(Shared) == SHARED_BYTES);

extern "C" __global__ void __launch_bounds__(THREADS, 1) few_rows_bfloat16(const __grid_constant__ Launch launch) {
    run<BFloat16>(launch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) few_rows_float16(const __grid_constant__ Launch launch) {
    run<Float16>(launch);
}
