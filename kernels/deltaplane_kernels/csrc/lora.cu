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
#include "lora_step.cuh"
#include "shrink.cuh"
#include "expand.cuh"
#if __CUDA_ARCH__ >= 900
#include "barriers.cuh"
#include "clusters.cuh"
#include "expand_norm.cuh"
#endif

// Entry points. The number in a name is the most rows of a tile. BLOCKS of a multiprocessor leave each thread the
// registers for all loads of a turn to be in flight at once: 128 with four, 168 with three. Left to itself the
// compiler takes fewer registers and waits for each load.

// A tile of one group of rows leaves registers for more loads of A.
#define SHRINK(NAME, TYPE, TILE, RUNS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Launch launch) {   \
        for_each_shrink_item(launch, [&](const Tile& tile, int slice, int split, AwaitX& await_x) {               \
            if (tile.count <= GROUP) {                                                                            \
                shrink_item<TYPE, GROUP, 8>(launch, tile, slice, split, await_x);                                 \
            } else {                                                                                              \
                shrink_item<TYPE, TILE, RUNS>(launch, tile, slice, split, await_x);                               \
            }                                                                                                     \
        });                                                                                                       \
    }

#define EXPAND(NAME, BODY)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) NAME(const __grid_constant__ Launch launch) {        \
        let_next_kernel_start();    /* it waits for all that this one writes before it reads any of it */         \
        BODY(launch);                                                                                             \
        take_back_announcement(launch);                                                                           \
    }

SHRINK(shrink_bfloat16_16, BFloat16, 16, 4, 4)
SHRINK(shrink_bfloat16_64, BFloat16, 64, 2, 3)
SHRINK(shrink_float16_16, Float16, 16, 4, 4)
SHRINK(shrink_float16_64, Float16, 64, 2, 3)
EXPAND(expand_bfloat16, expand<BFloat16>)
EXPAND(expand_float16, expand<Float16>)
EXPAND(expand_float32, expand_in_float32)

#if __CUDA_ARCH__ >= 900            // has clusters
#define EXPAND_ADD_RMS_NORM(NAME, TYPE)                                                                           \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                  \
        NAME(const __grid_constant__ NormLaunch launch) {                                                         \
        expand_add_rms_norm<TYPE>(launch);                                                                        \
    }

EXPAND_ADD_RMS_NORM(expand_add_rms_norm_bfloat16, BFloat16)
EXPAND_ADD_RMS_NORM(expand_add_rms_norm_float16, Float16)
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 4) shrink_float32(const __grid_constant__ Launch launch) {
    for_each_shrink_item(launch, [&](const Tile& tile, int slice, int split, AwaitX& await_x) {
        shrink_item_float32(launch, tile, slice, split, await_x);
    });
}
