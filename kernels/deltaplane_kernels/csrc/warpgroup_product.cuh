// Tensor-core products of a warpgroup on operands in shared memory (wgmma). For compute capability 9.0.

// Rows of BOX columns each, as copy_matrix() leaves them: 128 bytes a row, swizzled in groups of 8 rows.
struct Operand {
    unsigned long long descriptor;

    // From 16 more columns on, `count` times.
    __device__ Operand columns(int count) const { return {descriptor + count * 2}; }
};

__device__ Operand operand(const ushort* rows) {
    constexpr unsigned long long GROUP_BYTES = 1024, SWIZZLE_128_BYTES = 1;
    return {shared_address(rows) >> 4 | GROUP_BYTES >> 4 << 32 | SWIZZLE_128_BYTES << 62};
}

// Registers and shared memory are ready for products.
__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Until all products that were begun have ended.
__device__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// d += [64 rows, 16 columns] x [outputs, 16 columns]^T, twice as many outputs as `d` has elements. A thread holds, of
// each 8 outputs, 4 elements: {row g, output 2t}, {g, 2t + 1}, {g + 8, 2t}, {g + 8, 2t + 1} of its warp's 16 rows.
template <typename Type, int SUMS>
__device__ void multiply(float (&d)[SUMS], Operand rows, Operand outputs);

#define MULTIPLY_48(TYPE, NAME)                                                                                  \
    template <>                                                                                                  \
    __device__ void multiply<TYPE>(float (&d)[24], Operand rows, Operand outputs) {                              \
        asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n48k16.f32." NAME "." NAME " {"                            \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
                     "%16, %17, %18, %19, %20, %21, %22, %23}, "                                                 \
                     "%24, %25, add, 1, 1, 0, 0;}"                                                               \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),       \
                       "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),                \
                       "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),             \
                       "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])                           \
                     : "l"(rows.descriptor), "l"(outputs.descriptor)                                             \
                     : "memory");                                                                                \
    }

#define MULTIPLY_56(TYPE, NAME)                                                                                  \
    template <>                                                                                                  \
    __device__ void multiply<TYPE>(float (&d)[28], Operand rows, Operand outputs) {                              \
        asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n56k16.f32." NAME "." NAME " {"                            \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, "                             \
                     "%28, %29, add, 1, 1, 0, 0;}"                                                               \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),       \
                       "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),                \
                       "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),             \
                       "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),             \
                       "+f"(d[25]), "+f"(d[26]), "+f"(d[27])                                                     \
                     : "l"(rows.descriptor), "l"(outputs.descriptor)                                             \
                     : "memory");                                                                                \
    }

#define MULTIPLY_64(TYPE, NAME)                                                                                  \
    template <>                                                                                                  \
    __device__ void multiply<TYPE>(float (&d)[32], Operand rows, Operand outputs) {                              \
        asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {"                            \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "         \
                     "%32, %33, add, 1, 1, 0, 0;}"                                                               \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),       \
                       "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),                \
                       "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),             \
                       "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),             \
                       "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),             \
                       "+f"(d[31])                                                                               \
                     : "l"(rows.descriptor), "l"(outputs.descriptor)                                             \
                     : "memory");                                                                                \
    }

#define MULTIPLY_112(TYPE, NAME)                                                                                 \
    template <>                                                                                                  \
    __device__ void multiply<TYPE>(float (&d)[56], Operand rows, Operand outputs) {                              \
        asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n112k16.f32." NAME "." NAME " {"                           \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
                     "%48, %49, %50, %51, %52, %53, %54, %55}, "                                                 \
                     "%56, %57, add, 1, 1, 0, 0;}"                                                               \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),       \
                       "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),                \
                       "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),             \
                       "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),             \
                       "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),             \
                       "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),             \
                       "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),             \
                       "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),             \
                       "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),             \
                       "+f"(d[55])                                                                               \
                     : "l"(rows.descriptor), "l"(outputs.descriptor)                                             \
                     : "memory");                                                                                \
    }

MULTIPLY_48(BFloat16, "bf16")
MULTIPLY_48(Float16, "f16")
MULTIPLY_56(BFloat16, "bf16")
MULTIPLY_56(Float16, "f16")
MULTIPLY_64(BFloat16, "bf16")
MULTIPLY_64(Float16, "f16")
MULTIPLY_112(BFloat16, "bf16")
MULTIPLY_112(Float16, "f16")
