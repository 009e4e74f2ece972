// Blocks of a cluster, which reach each other's shared memory. For compute capability 9 and above.

__device__ void announce_to_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

// Until each thread of the cluster has announced itself.
__device__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Stores where `own` is in the shared memory of a block of the cluster; counts towards what its `barrier` expects.
__device__ void send_to_block(float* own, Barrier* barrier, int block, float value) {
    asm volatile("{.reg .u32 place, at;\n"
                 "mapa.shared::cluster.u32 place, %0, %2;\n"
                 "mapa.shared::cluster.u32 at, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %3, [at];}"
                 :: "r"(shared_address(own)), "r"(shared_address(barrier)), "r"(block), "f"(value) : "memory");
}

__device__ void send_to_block(float4* own, Barrier* barrier, int block, float4 value) {
    asm volatile("{.reg .u32 place, at;\n"
                 "mapa.shared::cluster.u32 place, %0, %2;\n"
                 "mapa.shared::cluster.u32 at, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%3, %4, %5, %6}, [at];}"
                 :: "r"(shared_address(own)), "r"(shared_address(barrier)), "r"(block),
                    "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}

// For all that a barrier expects from the cluster.
__device__ void await_blocks(Barrier* barrier) {
    asm volatile("{.reg .pred ended;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%0], 0;\n"
                 "@!ended bra again;}"
                 :: "r"(shared_address(barrier)) : "memory");
}
