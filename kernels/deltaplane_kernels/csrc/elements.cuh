// What kernels on two-byte elements share: the types and their tensor-core product, and how a kernel follows another.

using uint = unsigned int;
using ushort = unsigned short;       // a two-byte element that is only moved

constexpr int GROUP = 8;            // rows of x or y of one tensor-core product
constexpr int VECTOR = 8;           // two-byte elements in 16 bytes

__device__ int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

__device__ uint component(const uint4& v, int index) {
    return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}

// Programmatic dependent launch: the next kernel's blocks may start now; this kernel's inputs are complete.
__device__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A kernel tells one that runs beside it that all kernels ahead of both have ended: what they wrote is there.
__device__ void announce(int* flag) {
    asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
}

// By all threads of a block.
__device__ void await_announcement(const int* flag) {
    if (threadIdx.x == 0) {
        for (int announced = 0; !announced;) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(announced) : "l"(flag) : "memory");
            if (!announced) __nanosleep(100);
        }
    }
    __syncthreads();
}

struct BFloat16 {
    static __device__ float2 unpack(uint pair) {
        return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
    }
    static __device__ uint pack(float2 v) {
        uint pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(v.y), "f"(v.x));
        return pair;
    }
    static __device__ void mma(float (&d)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

struct Float16 {
    static __device__ float2 unpack(uint pair) {
        float2 v;
        asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
            : "=f"(v.x), "=f"(v.y) : "r"(pair));
        return v;
    }
    static __device__ uint pack(float2 v) {
        uint pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(v.y), "f"(v.x));
        return pair;
    }
    static __device__ void mma(float (&d)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};
