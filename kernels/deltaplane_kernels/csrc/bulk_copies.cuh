// Copies of pieces of a matrix into shared memory, by one thread's request, which end at a barrier. For compute
// capability 9 and above.

constexpr int BOX = 64;               // columns whose rows lie side by side in shared memory, 128 bytes each

// A matrix as the driver encodes it: BOX columns of some rows, and so on for some multiple of BOX columns. In shared
// memory the 16 bytes at place p of row r of BOX columns lie at place p ^ r % 8 (128-byte swizzle); what is beyond the
// matrix is zeros.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// A piece from a column, a multiple of BOX, and a row on; counts towards what the barrier expects.
__device__ void copy_matrix(void* target, const TensorMap& matrix, int column, int row, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {0, %2, %3}], [%4];"
                 :: "r"(shared_address(target)), "l"(&matrix), "r"(row), "r"(column / BOX),
                    "r"(shared_address(barrier)) : "memory");
}

// What this thread has stored in shared memory comes before copies that are asked for from here on.
__device__ void let_copies_follow() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
