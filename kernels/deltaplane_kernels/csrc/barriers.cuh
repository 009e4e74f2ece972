// Barriers in shared memory (mbarrier): threads arrive at them, and bytes that are on their way. For compute
// capability 9 and above.

using Barrier = unsigned long long;

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
